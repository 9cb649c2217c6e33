"""Extensions join by their declarations, and nothing is missed where they are absent."""

import subprocess
import sys
from pathlib import Path

import pytest

from tuneloop.cli import COMMANDS, run_cli
from tuneloop.config.loading import list_pipelines
from tuneloop.core.hooks import list_shipped_extensions

WITHOUT = "import sys; sys.modules['tuneloop.extensions'] = None\n"
"""A program that begins so finds no extension that ships with tuneloop."""


def render_all(beginning: str) -> list[str]:
    """Render every pipeline in one process that begins with the program `beginning`; return what is printed."""
    program = f"""
from tuneloop.cli import run_cli
for name in {sorted(list_pipelines())}:
    print("pipeline", name, run_cli(["render", name]), flush=True)
"""
    command = [sys.executable, "-c", beginning + program]
    return subprocess.check_output(command, text=True).split("pipeline ")


def test_every_pipeline_renders_the_same_without_extensions() -> None:
    rendered = render_all("")
    assert all(" 0\n" in text for text in rendered[1:]), rendered
    assert render_all(WITHOUT) == rendered


def test_a_command_of_an_extension_is_there_with_it_alone() -> None:
    shipped = [name for extension in list_shipped_extensions() for name in extension.commands]
    assert "gateway" in shipped and not set(shipped) & set(COMMANDS)
    command = [sys.executable, "-c", f"{WITHOUT}from tuneloop.cli import main; main()", "--help"]
    text = subprocess.check_output(command, text=True)
    listed = {line.split()[0] for line in text.splitlines() if line.startswith("  ")}
    assert "submit" in listed and not set(shipped) & listed


def install(folder: Path, program: str) -> None:
    """Install a package whose entry point declares an extension: its module, and what pip writes beside it."""
    (folder / "their_extension.py").write_text(program)
    metadata = folder / "their_extension-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: their-extension\nVersion: 1.0\n"
    )
    entry = "[tuneloop.extensions]\ntheirs = their_extension:EXTENSION\n"
    (metadata / "entry_points.txt").write_text(entry)


PROGRAM = """
import typer
from tuneloop.core.hooks import Extension

EXTENSION = Extension(name="theirs", commands={"NAME": "their_extension:greet"})

def greet(whom: str) -> None:
    '''Greet somebody.'''
    typer.echo(f"hello {whom}")
"""


def test_a_package_of_somebody_else_adds_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, PROGRAM.replace("NAME", "greet"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_extension", raising=False)
    assert run_cli(["greet", "Ada"]) == 0
    assert capsys.readouterr().out == "hello Ada\n"
    run_cli(["--help"])
    assert "Greet somebody." in capsys.readouterr().out


@pytest.mark.parametrize(
    "program, message",
    [
        (PROGRAM.replace("NAME", "submit"), "its command submit is there already"),
        (PROGRAM.replace(":greet", ":meet"), "their_extension:meet cannot be imported"),
        ("EXTENSION = {}", "is no tuneloop.core.hooks.Extension"),
        ("import nowhere", "cannot be imported (No module named 'nowhere')"),
    ],
)
def test_a_faulty_extension_is_one_line_and_stops_no_command_of_the_core(
    program: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(tmp_path, program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_extension", raising=False)
    assert run_cli(["--help"]) == 2
    error = capsys.readouterr().err
    assert "extension" in error and message in error and error.count("\n") == 1
    assert run_cli(["schema", "grpo"]) == 0
