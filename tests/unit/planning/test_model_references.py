"""A base model in a store before a run: what is read of it, and what is refused where pods run."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.store_bytes import CountingS3, serve_s3
from tests.policies import commit_policy
from tuneloop.cli import run_cli
from tuneloop.config import stored_facts
from tuneloop.config.loading import find_pipeline
from tuneloop.config.model_facts import Model, read_model_facts
from tuneloop.config.stored_facts import preview_model
from tuneloop.core.artifacts import Artifact
from tuneloop.core.store import Store
from tuneloop.planning.pod_paths import list_mounted_paths
from tuneloop.stages.export import export

URL = "s3://models/smollm2"
RUNS = ["--store", "s3://artifacts/runs"]


@pytest.fixture(scope="module")
def bucket(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingS3]:
    """SmolLM2 in a bucket, and beside it a folder that is no model."""
    with serve_s3(tmp_path_factory.mktemp("s3")) as server:
        store = Store(URL)
        for path in smollm2.iterdir():
            store.upload(path.name, path)
        Store("s3://models/rows").put("train.jsonl", b"{}")
        yield server


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNELOOP_CACHE", str(tmp_path / "cache"))
    preview_model.cache_clear()


def submit(*words: str) -> int:
    return run_cli(["submit", "sft", "--run", "demo", *RUNS, "--dry-run", *words])


def test_facts_of_a_model_in_a_bucket_are_those_of_the_local_one(
    bucket: CountingS3, smollm2: Path
) -> None:
    local = read_model_facts(str(smollm2))
    read_before = bucket.read()
    stored = read_model_facts(URL)
    assert isinstance(stored.shape, Model) and isinstance(local.shape, Model)
    assert stored.shape.parameters == local.shape.parameters == 134515008
    assert stored.shape.linears == local.shape.linears
    assert (stored.context, stored.dtype, stored.has_chat_template) == (
        local.context,
        local.dtype,
        local.has_chat_template,
    )
    # The weights have 269 MB: only their headers travel.
    assert bucket.read() - read_before < 2_000_000
    requests = len(bucket.log)
    assert read_model_facts(URL) == stored
    assert len(bucket.log) == requests


def test_settings_and_pods_follow_the_model_in_the_bucket(
    bucket: CountingS3, smollm2: Path
) -> None:
    sft = find_pipeline("sft")
    stored = sft.configure(sets=[f"base_model={URL}"]).model_dump()
    local = sft.configure(sets=[f"base_model={smollm2}"]).model_dump()
    assert stored.pop("base_model") == URL
    assert local.pop("base_model") == str(smollm2)
    assert stored == local


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["base_model=s3://models/nothing"],
            "base_model: 's3://models/nothing': has no files; correct the address",
        ),
        (
            ["base_model=s3://models/rows"],
            "base_model: 's3://models/rows': has no config.json; name the directory of a model",
        ),
        (["base_model={smollm2}"], "base_model: '{smollm2}': is a path of this machine, which"),
        (["base_model=/nowhere"], "`tuneloop store put DIRECTORY s3://BUCKET/NAME`"),
        (
            ["base_model=" + URL, "data={rows}"],
            "data.source: '{rows}': is a path of this machine, which pods do not see",
        ),
        (
            ["base_model=" + URL, "model.chat_template=my.jinja"],
            "model.chat_template: 'my.jinja': is a path of this machine, which pods do not see",
        ),
        (
            ["base_model=" + URL, "model.revision=main"],
            "model.revision: 'main': is for a name on the hub; leave it out",
        ),
        (["base_model=run://other/export"], "has no files; correct the address"),
    ],
)
def test_what_pods_cannot_reach_is_refused_in_a_line(
    bucket: CountingS3,
    smollm2: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    line: str,
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "completion": "2"}\n')
    paths = {"smollm2": str(smollm2), "rows": str(rows)}
    sets: list[str] = []
    for word in words:
        sets += ["--set", word.format(**paths)]
    assert submit(*sets) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: ") and line.format(**paths) in last


def test_what_pods_can_reach_is_rendered(
    bucket: CountingS3, capsys: pytest.CaptureFixture[str]
) -> None:
    for address in (URL, "hf://some/model", "file:///models/in-the-image", "tiny-llama"):
        assert submit("--set", f"base_model={address}") == 0, address
        assert f"- {address}\n" in capsys.readouterr().out
    # A claim of the pods is their own disk.
    mounted = ["--set", "cluster.claim=models", "--set", "base_model=/tuneloop/store/llama"]
    sft = find_pipeline("sft")
    patched = sft.configure(sets=["cluster.pod.volumes={/models: pvc/weights}"])
    assert "/models" in list_mounted_paths(sft.build(patched))
    paths = list_mounted_paths(sft.build(sft.configure(sets=["cluster.claim=models"])))
    assert len(paths) == 1
    mounted[-1] = f"base_model={paths[0]}/llama"
    assert submit(*mounted) == 0


def test_keys_that_this_machine_lacks_are_no_reason_to_refuse(
    bucket: CountingS3,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Pods may have keys of their own; here nobody can read the model."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    # The metadata service of a machine in a cloud.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    assert submit("--set", f"base_model={URL}") == 0
    capsys.readouterr()
    words = ["run", "sft", "--run", "x", "--store", str(tmp_path), "--set", f"base_model={URL}"]
    assert run_cli(words) == 2
    assert f"error: base_model: '{URL}':" in capsys.readouterr().err


def test_the_model_of_another_run_is_pinned_where_the_store_is_known(
    bucket: CountingS3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = commit_policy(tmp_path / "policy")
    export(out="s3://artifacts/runs/first/export", policy=policy.ref)
    exported = Artifact("s3://artifacts/runs/first/export")
    assert submit("--set", "base_model=run://first/export") == 0
    assert f"- {exported.ref}\n" in capsys.readouterr().out
    assert run_cli(["plan", "sft", *RUNS, "--set", "base_model=run://first/export"]) == 0
    assert "counted in the headers" in capsys.readouterr().out
    # `render` knows no store: the stage looks the run up in its own.
    assert run_cli(["render", "sft", "--set", "base_model=run://first/export"]) == 0
    assert "- run://first/export\n" in capsys.readouterr().out
    assert run_cli(["lint", "sft", "--set", "base_model=run://first/export"]) == 0
    assert json.loads(Store("s3://artifacts/runs/first/export").get("manifest.json") or b"")


def test_the_previews_that_were_used_last_are_kept(
    bucket: CountingS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_facts, "KEPT", 3)
    previews = tmp_path / "cache" / "previews"
    used = preview_model(URL).directory
    assert used is not None
    os.utime(used, (1, 1))
    for number, name in enumerate((".killed-1", "older", "newer"), 2):
        (previews / name).mkdir()
        (previews / name / "config.json").touch()
        os.utime(previews / name, (number, number))
    # It is used again, and is the newest then.
    preview_model.cache_clear()
    assert preview_model(URL).directory == used
    assert len(list(previews.iterdir())) == 4
    other = Store("s3://models/other")
    for path in used.iterdir():
        if path.suffix == ".json":
            other.upload(path.name, path)
    other.upload("model.safetensors", used / "model.safetensors")
    written = preview_model("s3://models/other").directory
    assert written is not None
    assert {path.name for path in previews.iterdir()} == {used.name, written.name, "newer"}
