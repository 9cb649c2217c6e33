"""Signed models: made with real keys, proved without the store and by the library's own program; refused if changed."""

import base64
import datetime
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from tests.unit import toy
from tuneloop.cli import run_cli
from tuneloop.core.artifacts import find_manifest
from tuneloop.runs.audit import compute_root
from tuneloop.runs.run_record import Run

Key = ec.EllipticCurvePrivateKey
Call = Callable[..., str]


def write_private(path: Path, key: Any, lock: KeySerializationEncryption | None = None) -> Path:
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock or NoEncryption()))
    return path


def write_public(path: Path, key: Key) -> Path:
    path.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    found = {}
    for name in ("our", "other"):
        key = ec.generate_private_key(ec.SECP256R1())
        found[name] = write_private(tmp_path / f"{name}.key", key)
        found[f"{name}.pub"] = write_public(tmp_path / f"{name}.pub", key)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Versions 1 to 3, of which 1 and 3 are evaluated."""
    toy.make(f"{tmp_path}/store/x")
    return Run("x", f"{tmp_path}/store")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return what a command printed; `code` is what it has to return, and an error is one line."""

    def call(*words: object, code: int = 0) -> str:
        capsys.readouterr()
        returned = run_cli([str(word) for word in words])
        out, error = capsys.readouterr()
        assert returned == code, error
        assert error.count("\n") == (code == 2), error
        return error if code else out

    return call


def attest(call: Call, run: Run, key: Path, into: Path, *words: object, code: int = 0) -> str:
    return call(
        "attest", run.name, *words, "--key", key, "-o", into, "--store", run.store_url, code=code
    )


@pytest.fixture
def model(tmp_path: Path, run: Run, keys: dict[str, Path], call: Call) -> Path:
    """Version 3, signed; the store is gone."""
    attest(call, run, keys["our"], tmp_path / "model")
    shutil.rmtree(tmp_path / "store")
    return tmp_path / "model"


def read_statement(path: Path) -> dict[str, Any]:
    envelope = json.loads(path.read_text())["dsseEnvelope"]
    return dict(json.loads(base64.b64decode(envelope["payload"])))


def test_a_model_is_proved_without_the_store(
    model: Path, keys: dict[str, Path], call: Call
) -> None:
    said = call("verify-model", model, "--public-key", keys["our.pub"])
    facts = dict(line.strip().split(maxsplit=1) for line in said.splitlines())
    assert facts["run"] == "x" and facts["version"] == "3"
    assert facts["files"] == "3, by SHA-256"
    assert sorted(path.name for path in model.iterdir()) == [
        "README.md",
        "model.sig",
        "provenance.sigstore.json",
        "weights.json",
    ]


def test_the_librarys_own_program_accepts_the_signature(model: Path, keys: dict[str, Path]) -> None:
    def verify(key: str) -> subprocess.CompletedProcess[str]:
        words = ("-m", "model_signing", "verify", "key", model, "--signature", model / "model.sig")
        command = [sys.executable, *map(str, words), "--public_key", str(keys[key])]
        return subprocess.run(command, capture_output=True, text=True)

    assert (done := verify("our.pub")).returncode == 0, done.stderr
    assert verify("other.pub").returncode != 0
    (model / "weights.json").write_text("{}")
    assert verify("our.pub").returncode != 0


def test_the_statement_has_what_the_version_was_made_from(
    tmp_path: Path, run: Run, keys: dict[str, Path], call: Call
) -> None:
    into = tmp_path / "model"
    attest(call, run, keys["our"], into, "v2", "--builder", "https://example.org/cluster")
    statement = read_statement(into / "provenance.sigstore.json")
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    sha256 = hashlib.sha256((into / "weights.json").read_bytes()).hexdigest()
    assert statement["subject"] == [{"name": "weights.json", "digest": {"sha256": sha256}}]
    build, details = statement["predicate"]["buildDefinition"], statement["predicate"]["runDetails"]
    assert (build["externalParameters"]["run"], build["externalParameters"]["version"]) == (
        "x",
        "2",
    )
    assert json.loads(build["externalParameters"]["stages"]["sft"]) == {"seed": 0, "skill": 1}
    made = {each["name"]: each for each in build["resolvedDependencies"]}
    assert made.keys() == {
        "sft",
        *(f"iterations/1/{stage}" for stage in ("rollout", "reward", "policy-update")),
    }
    for name, about in made.items():
        manifest = find_manifest(f"{run.url}/{name}")
        assert manifest and about["uri"] == f"{run.url}/{name}"
        assert about["digest"] == {"tuneloopArtifact": manifest.digest.removeprefix("sha256:")}
        assert about["annotations"]["code"] == manifest.provenance["code"]
    assert details["builder"] == {"id": "https://example.org/cluster"}
    assert details["byproducts"] == [
        {"name": "root", "digest": {"tuneloopRoot": compute_root(run)[7:]}}
    ]
    attest(call, run, keys["our"], tmp_path / "newest")
    (_, judged) = read_statement(tmp_path / "newest/provenance.sigstore.json")["predicate"][
        "runDetails"
    ]["byproducts"]
    assert (judged["name"], judged["annotations"]["results"]) == (
        "evaluate-after",
        {"mean_reward": 1},
    )
    said = call("verify-model", into, "--public-key", keys["our.pub"])
    assert compute_root(run) in said and "https://example.org/cluster" in said


def test_what_lies_outside_the_run_is_named_by_its_reference(
    tmp_path: Path, run: Run, keys: dict[str, Path], call: Call
) -> None:
    (tmp_path / "store/y/iterations").mkdir(parents=True)
    at, policy = (
        f"{tmp_path}/store/y/iterations/1",
        f"{run.url}/sft@{find_manifest(f'{run.url}/sft').digest}",
    )  # type: ignore[union-attr]
    toy.rollout(out=f"{at}/rollout", policy=policy, iteration=1)
    toy.reward(out=f"{at}/reward", rollouts=f"{at}/rollout")
    toy.policy_update(out=f"{at}/policy-update", policy=policy, rewards=f"{at}/reward", iteration=1)
    attest(call, Run("y", run.store_url), keys["our"], tmp_path / "model")
    statement = read_statement(tmp_path / "model/provenance.sigstore.json")
    outside = statement["predicate"]["buildDefinition"]["resolvedDependencies"][0]
    assert (
        f"{outside['uri']}@sha256:{outside['digest']['tuneloopArtifact']}" == policy
        and outside["name"] == "policy"
    )


def test_the_card_is_of_the_run_and_a_written_one_stays(
    tmp_path: Path, run: Run, keys: dict[str, Path], call: Call
) -> None:
    into = tmp_path / "model"
    attest(call, run, keys["our"], into)
    card = (into / "README.md").read_text()
    for said in (
        "Version 3 of the run `x`",
        "`policy-update`: iteration `2`",
        "| 3 | 1 | greedy",
    ):
        assert said in card, card
    assert compute_root(run) in card and 'from_pretrained("model")' in card and "{" not in card
    (into / "README.md").write_text("Ours.")
    call("verify-model", into, "--public-key", keys["our.pub"], code=2)
    (into / "LICENSE").write_text("Apache-2.0")
    attest(call, run, keys["our"], into)
    assert (into / "README.md").read_text() == "Ours."
    assert "4, by SHA-256" in call("verify-model", into, "--public-key", keys["our.pub"])


def change_byte(model: Path) -> None:
    data = bytearray((model / "weights.json").read_bytes())
    data[-2] ^= 1
    (model / "weights.json").write_bytes(data)


def link_file(model: Path) -> None:
    shutil.move(model / "weights.json", model.parent / "weights.json")
    (model / "weights.json").symlink_to(model.parent / "weights.json")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (change_byte, "model/weights.json': differs from its signature"),
        (
            lambda model: (model / "weights.json").unlink(),
            "model/weights.json': is missing from those in its signature",
        ),
        (lambda model: (model / "added.py").touch(), "model/added.py': is not in its signature"),
        (
            lambda model: (model / "README.md").write_text("Better."),
            "model/README.md': differs from its signature",
        ),
        (
            lambda model: (model / "README.md").unlink(),
            "model/README.md': is missing from those in its signature",
        ),
        (
            lambda model: (model / "provenance.sigstore.json").unlink(),
            "provenance.sigstore.json': is missing from",
        ),
        (lambda model: (model / "model.sig").unlink(), "model/model.sig': does not fit: "),
        (lambda model: (model / "model.sig").write_text("{}"), "model/model.sig': does not fit: "),
        (lambda model: (model / "model.sig").write_text("[1"), "model/model.sig': does not fit: "),
        (
            lambda model: (model / "model.sig").write_bytes(b"\xff" * 99),
            "model/model.sig': does not fit: ",
        ),
        (
            lambda model: shutil.copy(model / "provenance.sigstore.json", model / "model.sig"),
            "not https://model_signing/",
        ),
        (link_file, "model': cannot be read, or has links"),
        (shutil.rmtree, "model/model.sig': does not fit: "),
    ],
)
def test_what_was_changed_is_refused_and_named(
    model: Path, keys: dict[str, Path], call: Call, damage: Callable[[Path], object], says: str
) -> None:
    damage(model)
    assert says in call("verify-model", model, "--public-key", keys["our.pub"], code=2)


def test_no_place_of_a_signature_can_be_changed(
    model: Path, keys: dict[str, Path], call: Call
) -> None:
    """Of the payload and of the signature, which the rest of the bundle only wraps."""
    bundle = json.loads((model / "model.sig").read_text())
    envelope = bundle["dsseEnvelope"]
    payload, sig = (
        base64.b64decode(each) for each in (envelope["payload"], envelope["signatures"][0]["sig"])
    )
    for place in range(0, len(payload) + len(sig), 53):
        data = bytearray(payload + sig)
        data[place] ^= 1
        envelope["payload"] = base64.b64encode(data[: len(payload)]).decode()
        envelope["signatures"][0]["sig"] = base64.b64encode(data[len(payload) :]).decode()
        (model / "model.sig").write_text(json.dumps(bundle))
        assert "model.sig': does not fit" in call(
            "verify-model", model, "--public-key", keys["our.pub"], code=2
        )


def test_the_statement_of_another_model_is_refused(
    tmp_path: Path, run: Run, keys: dict[str, Path], call: Call
) -> None:
    """Whether or not the model's signature was made over it, as one of its files."""
    for version in (2, 1):
        attest(call, run, keys["our"], tmp_path / f"v{version}", version)
    statement = "provenance.sigstore.json"
    shutil.copy(tmp_path / "v1" / statement, tmp_path / "v2" / statement)
    verify = ("verify-model", tmp_path / "v2", "--public-key", keys["our.pub"])
    assert f"v2/{statement}': differs from its signature" in call(*verify, code=2)
    from model_signing import hashing, signing

    ours = signing.Config().use_elliptic_key_signer(private_key=keys["our"])
    ours.set_hashing_config(hashing.Config().set_ignored_paths(paths=["model.sig"]))
    ours.sign(tmp_path / "v2", tmp_path / "v2/model.sig")
    assert "it describes another model: weights.json has another digest" in call(*verify, code=2)
    theirs = tmp_path / "theirs"
    attest(call, run, keys["other"], theirs, 2)
    shutil.copy(theirs / statement, tmp_path / "v2" / statement)
    ours.sign(tmp_path / "v2", tmp_path / "v2/model.sig")
    assert f"v2/{statement}': does not fit: " in call(*verify, code=2), "signed by another key"


def test_another_key_is_refused(model: Path, keys: dict[str, Path], call: Call) -> None:
    assert "model.sig': does not fit: " in call(
        "verify-model", model, "--public-key", keys["other.pub"], code=2
    )
    assert "--public-key: None: give it or --certificate" in call("verify-model", model, code=2)
    assert "--public-key" in call(
        "verify-model", model, "--public-key", model / "README.md", code=2
    )
    assert "nothing.pub" in call(
        "verify-model", model, "--public-key", model / "nothing.pub", code=2
    )


def test_a_key_that_cannot_sign_is_refused_before_anything_is_written(
    tmp_path: Path, run: Run, call: Call
) -> None:
    words = ec.generate_private_key(ec.SECP256R1())
    bad = {
        "locked": write_private(tmp_path / "locked", words, BestAvailableEncryption(b"secret")),
        "rsa": write_private(tmp_path / "rsa", rsa.generate_private_key(65537, 2048)),
        "curve": write_private(tmp_path / "curve", ec.generate_private_key(ec.SECP256K1())),
        "public": write_public(tmp_path / "public", words),
        "missing": tmp_path / "missing",
    }
    for path in bad.values():
        assert f"--key: '{path}': cannot sign: " in attest(
            call, run, path, tmp_path / "model", code=2
        )
    assert not (tmp_path / "model").exists()


def test_what_cannot_be_signed_is_refused(
    tmp_path: Path, run: Run, keys: dict[str, Path], call: Call
) -> None:
    into = tmp_path / "model"
    assert "'v9': is not in x" in attest(call, run, keys["our"], into, 9, code=2)
    file = next((run.directory / "iterations/1/reward").glob("data-*/rewards.parquet"))
    whole = file.read_bytes()
    file.write_bytes(whole + b" ")
    said = "VERSION: 3: does not pass the audit: iterations/1/reward: "
    assert said in attest(call, run, keys["our"], into, code=2) and not into.exists()
    file.write_bytes(whole)
    attest(call, run, keys["our"], into, 2)
    signature = (into / "model.sig").read_bytes()
    said = "model/weights.json': differs from iterations/2/policy-update of x; name a directory"
    assert said in attest(call, run, keys["our"], into, 3, code=2)
    assert (into / "model.sig").read_bytes() == signature, "what was signed stays so"
    (into / "added.py").touch()
    assert "model/added.py': is not in iterations/1" in attest(
        call, run, keys["our"], into, 2, code=2
    )


def certify(tmp_path: Path, name: str, key: Key, issuer: str, by: Key, *, authority: bool) -> Path:
    def called(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    )
    usage |= dict.fromkeys(("encipher_only", "decipher_only"), False)
    usage |= {"digital_signature": not authority, "key_cert_sign": authority, "crl_sign": authority}
    builder = x509.CertificateBuilder().subject_name(called(name)).issuer_name(called(issuer))
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
        now + datetime.timedelta(1)
    )
    builder = builder.add_extension(
        x509.BasicConstraints(ca=authority, path_length=None), critical=True
    )
    builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
    path = tmp_path / f"{name}.pem"
    path.write_bytes(builder.sign(by, hashes.SHA256()).public_bytes(Encoding.PEM))
    return path


def test_a_certificate_stands_for_its_key(
    tmp_path: Path, run: Run, keys: dict[str, Path], call: Call
) -> None:
    root, between, own, stranger = (ec.generate_private_key(ec.SECP384R1()) for _ in range(4))
    authority = certify(tmp_path, "root", root, "root", root, authority=True)
    middle = certify(tmp_path, "between", between, "root", root, authority=True)
    leaf = certify(tmp_path, "signer", own, "between", between, authority=False)
    unknown = certify(tmp_path, "stranger", stranger, "stranger", stranger, authority=True)
    key = write_private(tmp_path / "own.key", own)
    into = tmp_path / "model"
    attest(call, run, key, into, "--certificate", leaf, "--certificate", middle)
    assert "CN=signer" in call("verify-model", into, "--certificate", authority)
    assert "model.sig': does not fit: " in call(
        "verify-model", into, "--certificate", unknown, code=2
    )
    assert "model.sig': does not fit: " in call(
        "verify-model", into, "--public-key", keys["our.pub"], code=2
    )
    words = ("--certificate", authority, "--public-key", keys["our.pub"])
    assert "not both" in call("verify-model", into, *words, code=2)
    assert "cannot sign: " in attest(call, run, keys["our"], into, "--certificate", leaf, code=2), (
        "of another key"
    )
    change_byte(into)
    assert "weights.json': differs from" in call(
        "verify-model", into, "--certificate", authority, code=2
    )
    alone = certify(tmp_path, "alone", own, "root", root, authority=False)
    attest(call, run, key, tmp_path / "second", "--certificate", alone)
    assert "CN=alone" in call("verify-model", tmp_path / "second", "--certificate", authority)


def test_without_the_library_the_remedy_is_said(
    tmp_path: Path, run: Run, keys: dict[str, Path], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model_signing", "model_signing._signing"):
        monkeypatch.setitem(sys.modules, name, None)
    said = "is not installed: pip install 'tuneloop[sign]'"
    assert said in attest(call, run, keys["our"], tmp_path / "model", code=2)
    assert said in call("verify-model", tmp_path, "--public-key", keys["our.pub"], code=2)
