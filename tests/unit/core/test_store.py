"""The store's three promises, on files; tests/cluster repeats them on S3."""

import multiprocessing
from datetime import timedelta
from pathlib import Path

import pytest

from tests.objects import served
from tests.waiting import LIMIT_S
from tuneloop.core import object_stores
from tuneloop.core.errors import NoKeys, Unavailable, UserError
from tuneloop.core.store import Conflict, Store, local_path, normalize_url


def test_normalize() -> None:
    assert normalize_url("/a/b") == "file:///a/b"
    assert normalize_url("s3://bucket/x/") == normalize_url("S3://bucket/x") == "s3://bucket/x"
    assert local_path("/a/b c") == Path("/a/b c")
    assert local_path("s3://bucket/x") is None
    with pytest.raises(UserError, match=r"ftp://x.*use one of file://"):
        normalize_url("ftp://x")


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "file", "memory"])
def test_a_store_without_a_bucket_or_directory_is_refused(scheme: str) -> None:
    """Without its last slashes ``s3://`` would be a path: a directory named ``s3:``."""
    of_files = scheme in ("file", "memory")
    for rest in ("", "/", "//", "bucket/x", "/bucket/x", "//bucket/x" if of_files else "///x"):
        with pytest.raises(
            UserError, match=f"names no {'directory' if of_files else 'bucket'}; write {scheme}://"
        ):
            normalize_url(f"{scheme}:{rest}")


@pytest.mark.parametrize("url", ["\0", "/a\0b", "s3://b/\0", "/\ud800"])
def test_characters_that_no_address_has_are_refused(url: str) -> None:
    with pytest.raises(UserError, match="has a character that no address has; correct it"):
        normalize_url(url)


def test_the_root_is_a_directory_and_a_colon_may_be_in_a_name() -> None:
    assert normalize_url("/") == normalize_url("file:///") == "file:///" and local_path(
        "file:///"
    ) == Path("/")
    assert (
        normalize_url("/a/s3:/b") == "file:///a/s3:/b"
        and local_path("a:b") == Path("a:b").absolute()
    )


def test_create_is_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.create("a/b", b"1")
    with pytest.raises(Conflict):
        store.create("a/b", b"2")
    assert store.get("a/b") == b"1"
    assert store.get("a") is None and store.get("nothing") is None
    assert store.keys() == ["a/b"]


def test_swap_demands_what_was_seen(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.swap("p", None, b"1")
    store.swap("p", b"1", b"2")
    for stale in (None, b"1"):
        with pytest.raises(Conflict):
            store.swap("p", stale, b"3")
    assert store.get("p") == b"2"


def _count(url: str, times: int) -> None:
    store = Store(url)
    done = 0
    while done < times:
        seen = store.get("n")
        try:
            store.swap("n", seen, str(int(seen or b"0") + 1).encode())
            done += 1
        except Conflict:
            pass


def test_swap_loses_no_update_between_processes(tmp_path: Path) -> None:
    counters = [multiprocessing.Process(target=_count, args=(str(tmp_path), 50)) for _ in range(3)]
    for counter in counters:
        counter.start()
    for counter in counters:
        counter.join(LIMIT_S)
        assert counter.exitcode == 0
    assert Store(str(tmp_path)).get("n") == b"150"


def test_delete_takes_everything_below(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for key in ("x/1", "x/y/2", "z"):
        store.put(key, b"")
    store.delete("x")
    store.delete("x")
    assert store.keys() == ["z"]


def test_a_place_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(UserError, match=r"store: 'file:///proc/nothing/\.probe"):
        Store("/proc/nothing").check_writable()
    with pytest.raises(UserError, match="choose a writable place"):
        Store("/dev/null/x").check_writable()


def test_disk_full_is_retryable(tmp_path: Path) -> None:
    from tuneloop.core.errors import Retryable

    with pytest.raises(Retryable, match="disk full"):  # the kernel's own full device
        with Store(str(tmp_path))._faults("k"), Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"x")


def test_objects_behave_as_files_do(tmp_path: Path) -> None:
    """obstore's in-memory store takes the branch of object stores; tests/cluster repeats the promises on S3."""
    for store in (Store(str(tmp_path)), Store("memory:///x")):
        for key in ("a/b", "a/bc", "a/b2/c"):
            store.create(key, b"1")
        assert store.parts() == ["a"]
        store.swap("a/b", b"1", b"2")
        with pytest.raises(Conflict):
            store.swap("a/b", b"1", b"3")
        assert store.get("a/b") == b"2"
        store.delete("a/b")
        assert [key for key in store.keys("") if not key.endswith(".lock")] == ["a/b2/c", "a/bc"]
        store.delete("a/b")
        store.delete("a")
        assert [key for key in store.keys("") if not key.endswith(".lock")] == []


def test_a_download_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    for store in (Store(str(tmp_path / "store")), Store("memory:///x")):
        store.put("k", b"new")
        (path := tmp_path / "file").write_text("old")
        for target in (path, tmp_path / "other" / "file"):
            with pytest.raises(UserError):
                store.download("none", target)
        assert path.read_text() == "old"
        store.download("k", path)
        assert path.read_text() == "new"
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {"file", "k"}, "no leftovers"


ELSEWHERE = (
    "garbage",
    "localhost:9000",
    "//h",
    "ftp://h",
    "http://",
    "http://a b",
    "http://a:b",
    "http://h:70000",
)


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
def test_an_endpoint_that_is_no_url_is_one_line(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (*ELSEWHERE, 'http://a"b', "http://[::1", "http://%zz"):
        monkeypatch.setenv(variable, value)
        with pytest.raises(
            UserError, match=f"^{variable}: .*: is not the URL of an S3; write http://HOST:PORT"
        ):
            Store("s3://b/x")
    for value in ("http://s3.s3.svc:7070", "https://h/path/", "http://[::1]:9000", ""):
        monkeypatch.setenv(variable, value)
        Store("s3://b/x")


def test_a_pod_asks_a_store_that_refuses_connections_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next attempt of its stage would cost half a minute of imports."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    with pytest.raises(Unavailable, match="after 10 retries, max_retries: 10"):
        Store("s3://b/x").get("k")
    monkeypatch.setenv("TUNELOOP_IMAGE", "tuneloop/base:dev")
    monkeypatch.setattr(object_stores, "PATIENCE", timedelta(seconds=1))
    with pytest.raises(Unavailable, match="max_retries: 1000, retry_timeout: 1s"):
        Store("s3://b/x").get("k")
    assert Store("memory:///x").get("k") is None


def test_a_store_that_lacks_a_setting_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        UserError, match=r"az://c/x.*Account must be specified; set AZURE_STORAGE_ACCOUNT_NAME"
    ):
        Store("az://c/x")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere")
    with pytest.raises(
        UserError, match=r"gs://b/x.*/nowhere.*; set GOOGLE_APPLICATION_CREDENTIALS"
    ):
        Store("gs://b/x")


def test_a_machine_that_gives_out_no_keys_is_a_mistake_of_who_types(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stages are tried again: a node's metadata server may answer later."""
    said = "<Error><Message>GET http://169.254.169.254/latest/meta-data: refused</Message></Error>"
    with served({}, monkeypatch, missing=(400, said)):
        with pytest.raises(NoKeys, match="no keys; set AWS_ACCESS_KEY_ID"):
            Store("s3://b/x").get("k")
        with pytest.raises(UserError, match=r"^store: 's3://b/x': no keys; set AWS_ACCESS_KEY_ID"):
            Store("s3://b/x").check_writable()


@pytest.mark.parametrize("key", ["run.json", "below/run.json"])
def test_a_file_where_a_directory_should_be_is_no_lost_race(tmp_path: Path, key: str) -> None:
    (tmp_path / "file").touch()
    store = Store(str(tmp_path / "file"))
    for work in (lambda: store.create(key, b""), lambda: store.put(key, b""), store.check_writable):
        with pytest.raises(
            UserError, match=r"store: 'file://.*/file/.*: Not a directory; choose a writable place"
        ):
            work()


REFUSED = "<Error><Code>{}</Code><Message>Long.</Message><BucketName>b</BucketName><HostId>{}</HostId></Error>"


@pytest.mark.parametrize(
    "status, code", [(403, "AccessDenied"), (403, "SignatureDoesNotMatch"), (404, "NoSuchBucket")]
)
def test_what_an_s3_refuses_is_said_by_its_code(
    status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    with served({}, monkeypatch, missing=(status, REFUSED.format(code, "x" * 300))):
        store = Store("s3://b/x")
        for work in (
            store.keys,
            store.stat,
            lambda: store.put("k", b""),
            lambda: store.delete("k"),
        ):
            with pytest.raises(UserError, match=rf"store: 's3://b/x.*{code}.*; [a-z]") as refusal:
                work()
            said.append(str(refusal.value))
        if status == 403:
            with pytest.raises(UserError, match="not permitted"):
                store.open("k")  # which begins with HEAD, whose answers have no body
    assert not any("<" in line or "Debug" in line for line in said) and max(map(len, said)) < 120


def test_a_part_of_a_key_is_read_alone(tmp_path: Path) -> None:
    for store in (Store(str(tmp_path)), Store("memory:///x")):
        store.create("k", bytes(range(256)) * 1024)
        with store.open("k") as file:
            assert (file.seek(-4, 2), file.read()) == (256 * 1024 - 4, b"\xfc\xfd\xfe\xff")
            assert (file.seek(1 << 17), file.read(2), file.tell()) == (
                1 << 17,
                b"\x00\x01",
                (1 << 17) + 2,
            )
            assert (file.seek(1 << 20), file.read(1)) == (1 << 20, b""), "behind the end"
        with pytest.raises(FileNotFoundError):
            store.open("none")
