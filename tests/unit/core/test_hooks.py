"""Extensions join by their declarations, and nothing is missed where they are absent."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hera.workflows import DAG, Container

from tuneloop.argo.jobset import pod_spec
from tuneloop.argo.template import add_exit_handler, define_workflow
from tuneloop.cli import COMMANDS, run_cli
from tuneloop.cluster.preflight import CHECKS
from tuneloop.config.extended import dump_settings, extend_config, load_sections
from tuneloop.config.loading import find_pipeline, list_pipelines
from tuneloop.core.errors import UserError
from tuneloop.core.hooks import list_extensions, list_shipped_extensions
from tuneloop.kube.connection import Connection
from tuneloop.local.executor import execute_workflow
from tuneloop.workflow.pod_hook import list_pod_hooks

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


def test_a_stage_of_an_extension_is_loaded_by_its_declaration_alone() -> None:
    program = """
from tuneloop.core.component import find_component
stage = find_component("tuneloop.extensions.evaluation.evaluate_lm_eval")
print(stage and stage.name, find_component("tuneloop.extensions.evaluation"))
"""
    outputs = [
        subprocess.check_output([sys.executable, "-c", beginning + program], text=True)
        for beginning in ("", WITHOUT)
    ]
    assert outputs == ["evaluate_lm_eval None\n", "None None\n"]


def forget_extensions() -> None:
    """Let the extensions be searched again, which a process does once."""
    for cached in (list_extensions, list_pod_hooks, load_sections, extend_config):
        cached.cache_clear()


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
    "program, message, is_declared",
    [
        (PROGRAM.replace("NAME", "submit"), "its command submit is there already", True),
        (PROGRAM.replace(":greet", ":meet"), "their_extension:meet cannot be imported", True),
        ("EXTENSION = {}", "is no tuneloop.core.hooks.Extension", False),
        ("import nowhere", "cannot be imported (No module named 'nowhere')", False),
    ],
)
def test_a_faulty_extension_is_one_line_and_stops_only_what_needs_its_declaration(
    program: str,
    message: str,
    is_declared: bool,
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
    assert run_cli(["gc", "--help"]) == 0
    # What it declares of a pipeline's settings and pods is not left out without a word.
    forget_extensions()
    assert run_cli(["schema", "grpo"]) == (0 if is_declared else 2)
    forget_extensions()
    assert is_declared or message in capsys.readouterr().err


PODS = '''
import contextlib
from pydantic import BaseModel, Field
from tuneloop.core.errors import UserError
from tuneloop.core.hooks import Extension
from tuneloop.workflow.pod_hook import PodChange, PodHook

class Team(BaseModel, frozen=True, extra="forbid"):
    """Whose pods these are. They have its priority."""
    name: str = Field(pattern="^[a-z]+$", description="name of the team")

class Notes(BaseModel, frozen=True, extra="forbid"):
    """What people wrote about a run."""
    text: str = "none"

class TeamHook(PodHook):
    def change_pod(self, cluster, role, image):
        team = cluster.find_section("team")
        if team is None:
            return None
        spec = {"priorityClassName": team.name, "terminationGracePeriodSeconds": 7}
        return PodChange(labels={"team": team.name}, spec=spec)

    def find_obstacle(self, cluster, use):
        team = cluster.find_section("team")
        if team and use == "kfp":
            return UserError("cluster.team.name", team.name, "is for Argo: leave it out")

    def find_cluster_problems(self, connection, workflow):
        yield UserError("cluster.team", connection.namespace, "has no such team")

    def replaces_container(self, container):
        return container["name"] == "team"

    @contextlib.contextmanager
    def hold_pod(self, pod):
        pod.show_message("waits for the team")
        (FOLDER / pod.template["name"]).write_text(pod.store)
        yield

HOOK = TeamHook()
EXTENSION = Extension(
    name="theirs",
    settings={"cluster.team": "their_extension:Team", "notes": "their_extension:Notes"},
    pod="their_extension:HOOK",
)
'''


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of somebody else that adds two sections and changes pods; the folder that it writes to."""
    install(tmp_path, f"from pathlib import Path\nFOLDER = Path({str(tmp_path)!r})\n{PODS}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_extension", raising=False)
    forget_extensions()
    yield tmp_path
    forget_extensions()


def render_sft(*sets: str) -> dict[str, Any]:
    """Render the pipeline `sft` with settings."""
    pipeline = find_pipeline("sft")
    return pipeline.build(pipeline.configure(sets=sets))


def list_pods(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    """List the templates of a workflow that are pods."""
    return [template for template in workflow["spec"]["templates"] if "container" in template]


@pytest.mark.usefixtures("theirs")
def test_a_section_of_somebody_else_changes_every_pod() -> None:
    for pod in list_pods(render_sft()):
        assert "team" not in pod["metadata"]["labels"]
    for pod in list_pods(render_sft("cluster.team.name=blue", "notes.text=first")):
        assert pod["metadata"]["labels"]["team"] == "blue"
        patch = json.loads(pod["podSpecPatch"])
        assert (patch["priorityClassName"], patch["terminationGracePeriodSeconds"]) == ("blue", 7)


@pytest.mark.usefixtures("theirs")
def test_what_the_user_says_of_pods_wins_over_a_change_of_somebody_else() -> None:
    sets = ["cluster.team.name=blue", "cluster.pod.priority_class=urgent"]
    for pod in list_pods(render_sft(*sets)):
        patch = json.loads(pod["podSpecPatch"])
        assert (patch["priorityClassName"], patch["terminationGracePeriodSeconds"]) == ("urgent", 7)
    cluster = find_pipeline("sft").configure(sets=sets).cluster
    spec = pod_spec("trainer", "trainer", [], [], cluster)
    assert (spec["priorityClassName"], spec["terminationGracePeriodSeconds"]) == ("urgent", 7)


@pytest.mark.usefixtures("theirs")
def test_a_section_of_somebody_else_is_described_and_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_cli(["schema", "sft"]) == 0
    text = capsys.readouterr().out
    assert "# What people wrote about a run" in text and "# Whose pods these are; left out" in text
    assert run_cli(["schema", "sft", "cluster.team"]) == 0
    assert "# name of the team\n    #name:" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"cluster\.team\.name: 'Blue'"):
        render_sft("cluster.team.name=Blue")
    pipeline = find_pipeline("sft")
    settings = pipeline.configure(sets=["cluster.team.name=blue"])
    with pytest.raises(UserError, match="'blue': is for Argo: leave it out"):
        pipeline.module.build_kfp(settings)


def test_a_section_that_is_not_set_is_not_recorded(theirs: Path) -> None:
    """So a run can be forked where the extension is no more."""
    pipeline = find_pipeline("sft")
    recorded = dump_settings(pipeline.configure())
    assert "notes" not in recorded and "team" not in recorded["cluster"]
    set_here = dump_settings(pipeline.configure(sets=["cluster.team.name=blue", "notes={}"]))
    assert set_here["cluster"]["team"] == {"name": "blue"} and set_here["notes"]["text"] == "none"
    (theirs / "config.json").write_text(json.dumps(recorded))
    command = ["render", "sft", "-c", str(theirs / "config.json")]
    program = f"from tuneloop.cli import run_cli; print(run_cli({command}) and 'refused')"
    printed = subprocess.check_output([sys.executable, "-c", WITHOUT + program], text=True)
    assert printed.endswith("\n0\n")


def test_a_section_is_unknown_without_its_extension() -> None:
    with pytest.raises(UserError, match=r"cluster\.team.*'blue': unknown key"):
        render_sft("cluster.team.name=blue")


@pytest.mark.usefixtures("theirs")
def test_a_change_of_pods_says_what_it_needs_on_a_cluster() -> None:
    connection = Connection("tuneloop", "here", "https://localhost", None, None, None)
    problems = [str(error) for error in CHECKS["extensions"](connection, render_sft())]
    assert problems == ["cluster.team: 'tuneloop': has no such team"]


def build_pod() -> dict[str, Any]:
    """Build a workflow of one pod with an init container."""
    with define_workflow("x") as built:
        stage = Container(name="stage", image="any", command=["bash", "-c", "true"])
        with DAG(name="main"):
            stage(name="stage")
    workflow: dict[str, Any] = built.to_dict()
    init_container = {"name": "team", "image": "any", "command": ["true"]}
    list_pods(workflow)[0]["initContainers"] = [init_container]
    return workflow


def test_a_change_of_pods_has_a_meaning_on_this_machine(theirs: Path) -> None:
    arguments = {"run": "a", "store": str(theirs)}
    outcome = execute_workflow(build_pod(), workdir=theirs / "work", arguments=arguments)
    assert outcome.phase == "Succeeded", outcome.message
    assert (theirs / "stage").read_text() == str(theirs)
    assert "waits for the team" in (theirs / "work" / "nodes.jsonl").read_text()


def test_an_init_container_of_nobody_is_refused(tmp_path: Path) -> None:
    arguments = {"run": "a", "store": str(tmp_path)}
    with pytest.raises(UserError, match="initContainers: 'team': is not supported"):
        execute_workflow(build_pod(), workdir=tmp_path / "work", arguments=arguments)


def test_a_section_that_is_there_already_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, PODS.replace('"cluster.team"', '"cluster.cpu"'))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_extension", raising=False)
    forget_extensions()
    with pytest.raises(UserError, match=r"cluster\.cpu: .*an extension adds a section of this key"):
        render_sft()
    forget_extensions()


def test_what_several_extensions_do_at_the_end_is_one_handler() -> None:
    templates: list[Any] = []
    assert add_exit_handler(templates, []) is None
    assert add_exit_handler(templates, ["give"]) == "give" and not templates
    assert add_exit_handler(templates, ["give", "tell"]) == templates[0].name
    assert [task.template for task in templates[0].tasks] == ["give", "tell"]


RUN = """
from pathlib import Path
from hera.workflows import DAG, Container
from tuneloop.argo.template import define_workflow
from tuneloop.local.executor import execute_workflow

with define_workflow("x") as built:
    stage = Container(name="stage", image="any", command=["bash", "-c", "true"])
    with DAG(name="main"):
        stage(name="stage")
folder = Path(sys.argv[1])
arguments = {"run": "a", "store": str(folder)}
print(execute_workflow(built.to_dict(), workdir=folder / "work", arguments=arguments).phase)
"""


def test_a_workflow_runs_here_without_extensions(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT + RUN, str(tmp_path)]
    assert subprocess.check_output(command, text=True) == "Succeeded\n"


def test_a_section_that_ships_with_an_extension_goes_with_the_folder() -> None:
    program = """
from tuneloop.cli import run_cli
print(run_cli(["render", "grpo", "--set", "cluster.share.group=a"]))
"""
    command = [sys.executable, "-c", WITHOUT + program]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stdout == "2\n" and "cluster.share.group: 'a': unknown key" in ended.stderr
