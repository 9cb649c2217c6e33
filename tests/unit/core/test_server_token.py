"""The file with the token of a run's servers."""

from pathlib import Path

import pytest

from tuneloop.core.server_token import VARIABLE, build_token_headers, create_token_file, read_tokens


def test_a_token_is_made_once_and_only_its_owner_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    create_token_file(path)
    made = path.read_text()
    create_token_file(path)
    assert path.read_text() == made and path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["token"]
    monkeypatch.setenv(VARIABLE, str(path))
    assert build_token_headers() == {"Authorization": f"Bearer {made.strip()}"}
    path.write_text("new\nold\n")
    assert read_tokens() == ["new", "old"] and build_token_headers() == {
        "Authorization": "Bearer new"
    }


def test_no_file_is_no_token_and_an_empty_one_a_token_of_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not read_tokens() and build_token_headers() == {}
    monkeypatch.setenv(VARIABLE, str(tmp_path / "token"))
    assert not read_tokens()
    (tmp_path / "token").write_text("\n")
    assert read_tokens() and read_tokens() != read_tokens(), "it is just being replaced"
    (tmp_path / "token").unlink()
    assert read_tokens() and read_tokens() != read_tokens(), "it is gone, which lets nobody in"
