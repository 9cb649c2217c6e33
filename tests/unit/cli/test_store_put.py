"""`tuneloop store put`: what is sent, what is not sent again, and what is never overwritten."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.store_bytes import serve_s3
from tuneloop.cli import run_cli
from tuneloop.core.artifacts import hash_file
from tuneloop.core.errors import UserError
from tuneloop.core.store import Store
from tuneloop.data.readers.opening import open_files
from tuneloop.formats.checksums import CLAIM, SUMS, format_sums, parse_sums
from tuneloop.formats.stored_models import open_model

FILES = {"config.json": b"{}", "model.safetensors": b"\0" * 3000, "nested/rows.jsonl": b"{}\n"}
Put = Callable[[], tuple[int, str, str]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    for name, data in FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (directory / ".cache").mkdir()
    (directory / ".cache" / "lock").write_bytes(b"")
    return directory


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/store/model"
        return
    with serve_s3(tmp_path / "s3"):
        yield "s3://bucket/model"


@pytest.fixture
def put(directory: Path, url: str, capsys: pytest.CaptureFixture[str]) -> Put:
    def run() -> tuple[int, str, str]:
        code = run_cli(["store", "put", str(directory), url])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def read_all(url: str) -> dict[str, bytes]:
    store = Store(url)
    names = store.keys()
    return {name: store.get(name) or b"" for name in names if name != SUMS}


def test_a_directory_is_put_once(put: Put, url: str, directory: Path) -> None:
    code, out, err = put()
    assert code == 0
    assert out.splitlines() == [
        f"{url}: 3 files, 3 kB: 3 sent, 0 were there",
        f"base_model={open_model(url).reference}",
    ]
    assert "store put: 1/1 MB" in err
    assert read_all(url) == FILES
    sums = parse_sums(Store(url).get(SUMS) or b"", url)
    assert sums == {name: hash_file(directory / name).sha256 for name in FILES}
    marks = Store(url).stat()
    code, out, _ = put()
    assert code == 0 and "3 files, 3 kB: all were there" in out
    assert Store(url).stat() == marks


def test_an_interrupted_upload_goes_on(put: Put, url: str, directory: Path) -> None:
    """As a kill leaves it: the claim, and a part of the files."""
    put()
    Store(url).delete(SUMS)
    Store(url).delete("model.safetensors")
    digests = {name: hash_file(directory / name).sha256 for name in FILES}
    Store(url).create(CLAIM, format_sums(digests))
    with pytest.raises(UserError, match="is not whole: its upload goes on, or run `tuneloop store"):
        open_model(url)
    code, out, _ = put()
    assert code == 0 and "1 sent, 2 were there" in out
    assert read_all(url) == FILES
    assert open_model(url).files.keys() == {"config.json", "model.safetensors"}


def test_a_lost_file_is_sent_again(put: Put, url: str) -> None:
    put()
    Store(url).delete("config.json")
    code, out, _ = put()
    assert code == 0 and "1 sent, 2 were there" in out


def test_files_that_somebody_else_brought_are_compared_by_their_bytes(put: Put, url: str) -> None:
    Store(url).put("model.safetensors", FILES["model.safetensors"])
    code, out, _ = put()
    assert code == 0 and "2 sent, 1 were there" in out


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("config.json", b"[]"),
        ("model.safetensors", b"\0" * 2999),
        ("tokenizer.json", b"{}"),
        (CLAIM, format_sums({"other": "0" * 64})),
        (SUMS, format_sums({"config.json": "0" * 64})),
    ],
)
def test_other_content_is_not_overwritten(put: Put, url: str, name: str, data: bytes) -> None:
    Store(url).put(name, data)
    code, _, err = put()
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith(f"error: URL: '{url}': holds another directory (")
    assert Store(url).stat().keys() == {name}
    assert Store(url).get(name) == data


def test_a_changed_directory_is_another_one(put: Put, url: str, directory: Path) -> None:
    put()
    (directory / "config.json").write_bytes(b"[]")
    code, _, err = put()
    assert code == 2 and "(config.json differs)" in err
    assert read_all(url) == FILES


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nowhere", "s3://b/x"], "DIRECTORY: 'nowhere': is not a directory here"),
        (["{empty}", "s3://b/x"], "has no files"),
        (["{empty}", "s3://"], "names no bucket"),
    ],
)
def test_what_cannot_be_put(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    assert run_cli(["store", "put", *(word.format(empty=tmp_path) for word in words)]) == 2
    assert problem in capsys.readouterr().err


def test_smollm2_is_put_and_is_the_same_model(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELOOP_CACHE", str(tmp_path / "cache"))
    with serve_s3(tmp_path / "s3"):
        assert run_cli(["store", "put", str(smollm2), "s3://models/smollm2"]) == 0
        model = open_model("s3://models/smollm2")
        directory = model.fetch()
        for path in smollm2.iterdir():
            assert hash_file(directory / path.name) == hash_file(path)


def test_a_folder_in_a_bucket_is_data_by_its_splits(tmp_path: Path) -> None:
    rows = {"train": [1, 2, 3], "test": [4]}
    for split, numbers in rows.items():
        lines = [json.dumps({"prompt": f"{n} =", "completion": f"{n}"}) for n in numbers]
        file = tmp_path / "rows" / split / "part.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text("\n".join(lines))
    with serve_s3(tmp_path / "s3"):
        assert run_cli(["store", "put", f"{tmp_path}/rows", "s3://data/sums"]) == 0
        for split, numbers in rows.items():
            files = open_files("s3://data/sums/", split)
            assert [*files] == [f"s3://data/sums/{split}/part.jsonl"]
            assert [len(table) for table in files.values()] == [len(numbers)]
        with pytest.raises(UserError, match="no file there ends in one of"):
            open_files("s3://data/nothing", "train")
