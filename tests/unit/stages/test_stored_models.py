"""A base model in a store, or of another run: fetched, verified, pinned to its bytes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.store_bytes import CountingS3, serve_s3
from tests.models import write_model
from tests.policies import commit_policy
from tuneloop.core.artifacts import Artifact, Draft, hash_files
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import Store
from tuneloop.formats.checksums import SUMS, format_sums
from tuneloop.formats.stored_models import open_model
from tuneloop.runs.promotions import promote_result
from tuneloop.runs.replay import replay_iteration
from tuneloop.runs.run_record import Run
from tuneloop.stages.base_model import base_model
from tuneloop.stages.export import export

URL = "s3://models/llama"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "llama"
    write_model("llama2", directory)
    return directory


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingS3]:
    monkeypatch.setenv("TUNELOOP_CACHE", str(tmp_path / "cache"))
    with serve_s3(tmp_path / "s3") as server:
        server.bytes_per_s = 1e12
        yield server


def put(model: Path, url: str = URL, *, sums: bool = True) -> None:
    store = Store(url)
    for path in model.iterdir():
        store.upload(path.name, path)
    if sums:
        digests = {name: file.sha256 for name, file in hash_files(model).items()}
        store.put(SUMS, format_sums(digests))


def read_digests(artifact: Artifact) -> dict[str, str]:
    return {name: file.sha256 for name, file in artifact.manifest.files.items()}


def test_a_directory_in_a_bucket_gives_the_bytes_of_the_local_one(
    bucket: CountingS3, model: Path, tmp_path: Path
) -> None:
    put(model)
    base_model(out=str(tmp_path / "local"), model=str(model))
    base_model(out=str(tmp_path / "remote"), model=URL)
    local = Artifact(str(tmp_path / "local"))
    remote = Artifact(str(tmp_path / "remote"))
    assert read_digests(remote) == read_digests(local)
    digest = remote.manifest.facts["model_digest"]
    assert remote.manifest.params["model"] == f"{URL}@{digest}"
    # A second run on this machine takes the files from the cache.
    bytes_read = bucket.read("safetensors")
    base_model(out=str(tmp_path / "again"), model=URL)
    assert bucket.read("safetensors") == bytes_read > 0
    # Where the same bytes lie does not matter.
    put(model, "s3://other/place")
    base_model(out=str(tmp_path / "elsewhere"), model="s3://other/place")
    elsewhere = Artifact(str(tmp_path / "elsewhere"))
    assert elsewhere.manifest.digest == remote.manifest.digest


def test_a_model_that_was_replaced_is_refused_where_a_run_has_the_former(
    bucket: CountingS3, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(model)
    out = str(tmp_path / "runs" / "demo" / "base-model")
    base_model(out=out, model=URL)
    base_model(out=out, model=URL)
    assert "committed already" in capsys.readouterr().err
    committed = Artifact(out)
    changed = tmp_path / "changed"
    shutil.copytree(model, changed)
    config = json.loads((changed / "generation_config.json").read_text())
    (changed / "generation_config.json").write_text(json.dumps({**config, "top_k": 7}))
    put(changed)
    with pytest.raises(UserError, match=r"--model: .*committed already, made from.*another run"):
        base_model(out=out, model=URL)
    # Whoever names the digest is told what is there instead.
    with pytest.raises(UserError, match=r"holds sha256:.* now: its files were changed"):
        base_model(out=str(tmp_path / "new"), model=committed.manifest.params["model"])
    put(model)
    base_model(out=str(tmp_path / "new"), model=committed.manifest.params["model"])
    assert Artifact(str(tmp_path / "new")).manifest.digest == committed.manifest.digest


def test_a_directory_without_sums_is_known_by_its_listing(
    bucket: CountingS3, model: Path, tmp_path: Path
) -> None:
    put(model, sums=False)
    base_model(out=str(tmp_path / "c"), model=URL)
    assert Artifact(str(tmp_path / "c")).manifest.facts["model_digest"] == open_model(URL).digest
    Store(URL).put("LICENSE", b"mine")
    with pytest.raises(UserError, match="committed already, made from"):
        base_model(out=str(tmp_path / "c"), model=URL)


def test_bytes_that_differ_from_their_sums_are_refused(
    bucket: CountingS3, model: Path, tmp_path: Path
) -> None:
    put(model)
    weights = (model / "model.safetensors").read_bytes()
    Store(URL).put("model.safetensors", weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(Corrupt, match=r"llama/model.safetensors.*differs from its line in SHA256"):
        base_model(out=str(tmp_path / "c"), model=URL)
    # A store that is a directory here is read in place, and verified, too.
    local = tmp_path / "local"
    put(model, str(local))
    with (local / "config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(Corrupt, match=r"local/config.json.*differs from its line"):
        base_model(out=str(tmp_path / "c"), model=f"file://{local}")


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("s3://models/nothing", "has no files; correct the address, or bring them by `tuneloop"),
        ("s3://models/texts", "has no config.json; name the directory of a model"),
        ("s3://models/half", "lacks model.safetensors, which its SHA256SUMS lists"),
        ("s3://models/spoilt", "line 1 is not a SHA-256 and a name"),
        ("run://demo/../x", "is not a reference to a run; write run://RUN/ARTIFACT"),
        ("run://demo@latest", "is not a reference to a run; write run://RUN/ARTIFACT"),
        ("run://demo@promoted", "nothing was promoted as demo in"),
        ("run://demo/iterations/3", "has no checkpoint; `tuneloop status`"),
    ],
)
def test_what_is_no_model_is_refused_in_a_line(
    bucket: CountingS3, tmp_path: Path, address: str, problem: str
) -> None:
    Store("s3://models/texts").put("rows.jsonl", b"{}")
    Store("s3://models/half").put("config.json", b"{}")
    sums = format_sums({"model.safetensors": "0" * 64})
    Store("s3://models/half").put(SUMS, sums)
    Store("s3://models/spoilt").put("config.json", b"{}")
    Store("s3://models/spoilt").put(SUMS, b"what?")
    with pytest.raises(UserError, match=problem):
        base_model(out=str(tmp_path / "runs" / "mine" / "base-model"), model=address)


@pytest.mark.parametrize("store", ["s3://artifacts/runs", "{}/runs"])
def test_the_model_of_another_run_is_a_base_model(
    bucket: CountingS3, tmp_path: Path, store: str
) -> None:
    store = store.format(tmp_path)
    policy = commit_policy(Path(tmp_path / "policy"))
    export(out=f"{store}/demo/export", policy=policy.ref)
    out = f"{store}/next/base-model"
    base_model(out=out, model="run://demo/export")
    exported = Artifact(f"{store}/demo/export")
    following = Artifact(out)
    assert following.manifest.params["model"] == exported.ref
    digests = read_digests(following)
    expected = read_digests(exported)
    assert digests["model/model.safetensors"] == expected["model.safetensors"]
    # A replay takes the same bytes, though it writes to another store.
    (replay,) = replay_iteration(Run("next", store), 0)
    assert replay.difference is None
    # So does its address, and a folder of this machine.
    base_model(out=str(tmp_path / "other"), model=f"{store}/demo/export")
    assert Artifact(str(tmp_path / "other")).manifest.digest == following.manifest.digest


def test_the_checkpoint_of_an_iteration_is_a_base_model(tmp_path: Path) -> None:
    policy = commit_policy(tmp_path / "runs" / "demo" / "iterations" / "3" / "policy-update")
    out = str(tmp_path / "runs" / "next" / "base-model")
    base_model(out=out, model="run://demo/iterations/3")
    assert Artifact(out).manifest.params["model"] == policy.ref


def test_a_promoted_version_is_a_base_model(tmp_path: Path) -> None:
    store = f"{tmp_path}/runs"
    policies: list[Artifact] = []
    for name, reward in (("monday", 0.25), ("tuesday", 0.5)):
        policy = commit_policy(Path(store, name, "iterations", "3", "policy-update"), version=3)
        policies.append(policy)
        evaluation = Draft(f"{store}/{name}/evaluate")
        evaluation.commit(
            stage="evaluate",
            role="evaluator",
            inputs={"policy": policy.ref},
            results={"mean_reward": reward},
        )
        export(out=f"{store}/{name}/export", policy=policy.ref)
        said = promote_result(Run(name, store), "nightly", {"mean_reward": reward})
        assert said.startswith(f"promoted: {name}: mean_reward {reward}")
    base_model(out=f"{store}/next/base-model", model="run://nightly@promoted")
    following = Artifact(f"{store}/next/base-model")
    assert following.manifest.params["model"] == policies[1].ref
    base_model(out=f"{store}/other/base-model", model="run://nightly/export@promoted")
    exported = Artifact(f"{store}/tuesday/export")
    assert Artifact(f"{store}/other/base-model").manifest.params["model"] == exported.ref
    with pytest.raises(UserError, match="is not of version 3, which was promoted as nightly"):
        open_model("run://nightly/evaluate@promoted", f"file://{store}")


def test_a_revision_is_for_the_hub(bucket: CountingS3, model: Path, tmp_path: Path) -> None:
    put(model)
    with pytest.raises(UserError, match=r"model.revision: .*is for a name on the hub"):
        base_model(out=str(tmp_path / "c"), model=URL, revision="main")


@pytest.mark.parametrize(
    "form", ["run://demo", "{store}/demo/export", "file://{store}/demo/export"]
)
def test_a_committed_model_does_without_its_source(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = f"{tmp_path}/runs"
    policy = commit_policy(Path(tmp_path / "policy"))
    export(out=f"{store}/demo/export", policy=policy.ref)
    out = f"{store}/next/base-model"
    reference = form.format(store=store)
    first = base_model(out=out, model=reference)
    shutil.rmtree(f"{store}/demo")
    assert base_model(out=out, model=reference) == first
    assert "base_model: goes on with what is committed, as base_model: " in capsys.readouterr().err
    # Whoever names the digest needs no source.
    assert base_model(out=out, model=first.params["model"]) == first
    assert "goes on with" not in capsys.readouterr().err
    with pytest.raises(UserError, match="base_model: 'run://other'"):
        base_model(out=out, model="run://other")
    with pytest.raises(UserError, match="base_model: "):
        base_model(out=f"{store}/new/base-model", model=first.params["model"])
