"""One pod for several iterations: what is written into its command, and what runs there."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S, until
from tuneloop.cli.live import ITERATION
from tuneloop.config.loading import find_pipeline
from tuneloop.core.artifacts import Draft
from tuneloop.core.errors import UserError
from tuneloop.local.iterations import RECORDS
from tuneloop.workflow.pod_loop import PROGRAM, PodLoop, StageCall

COARSE = ["engine.kind=transformers", "loop.iterations_per_pod=10"]


@pytest.fixture(scope="module")
def workflow() -> dict:
    found = find_pipeline("grpo")
    return found.module.build_argo(found.configure(None, COARSE)).to_dict()


def list_pod_words(workflow: dict) -> list[str]:
    """The words of the pod that runs iterations."""
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    return templates["iterations"]["container"]["args"]


def test_the_steps_of_a_pod_have_the_flags_of_pods_of_their_own(workflow: dict) -> None:
    found = find_pipeline("grpo")
    fine = found.module.build_argo(
        found.configure(None, [*COARSE[:1], "loop.iterations_per_pod=0"])
    ).to_dict()
    alone = {template["name"]: template for template in fine["spec"]["templates"]}
    words = list_pod_words(workflow)
    text = words[words.index("--loop") + 1]
    assert "{{" not in text, "nothing that Argo would replace, which knows no JSON"
    for step in PodLoop.model_validate_json(text).steps:
        args = alone[step.name]["container"]["args"]
        assert args[: len(step.flags)] == step.flags
        assert {f"--{name}" for name in (*step.wires, step.output)} == set(
            args[len(step.flags) :: 2]
        )


STAGE = '''
import os, time
from pathlib import Path
from tuneloop.core.component import Stage, component
from tuneloop.core.errors import UserError

@component("made", results={"total": int})
def toy(stage: Stage, *, number: int = 0, wait_s: float = 0.0):
    """A toy."""
    Path(os.environ["SEEN"]).open("a").write(f"{os.getpid()} {number}\\n")
    Path(os.environ["SEEN"] + f"-{number}").touch()
    wanted = os.environ.get("ASIDE")

    def write(place: Path) -> None:
        if not wanted:
            raise UserError("aside", number, "cannot be written")
        while not os.path.exists(wanted.format(number + 1)):
            time.sleep(0.01)
        (place / "aside.txt").write_text(str(number))

    if wanted is not None:
        stage.commit_later("aside", write)
    os.environ["LEFT"] = "by the stage before"
    until = time.monotonic() + (float(os.environ.get("SECOND_S", wait_s)) if number == 2 else wait_s)
    go = os.environ.get("GO")
    while time.monotonic() < until and not (go and os.path.exists(go)):
        if not go:
            stage.check_stop()
        time.sleep(0.01)
    (stage.out / "made.txt").write_text(str(number))
    return {"total": number + 1}
'''


def toys(wait_s: float = 0.0) -> PodLoop:
    """Two stages, the second of which takes the first one's result, and hands its own to the next iteration."""
    about = {
        "command": ["python", "-m", "tuneloop.stages.toy"],
        "flags": ["--wait-s", str(wait_s)],
        "output": "made",
    }
    first = StageCall(name="first", wires={"number": "total"}, **about)
    second = StageCall(name="second", wires={"number": "first.total"}, **about)
    return PodLoop(steps=[first, second], carry={"total": "second.total"}, reward="second.total")


def start(
    tmp_path: Path, loop: PodLoop | None = None, *more: str, **environment: str
) -> subprocess.Popen:
    """The program, with a stage `tuneloop.stages.toy`, of one iteration.

    Args:
        more: flags that replace those.
    """
    (tmp_path / "toy.py").write_text(STAGE)
    program = f"""
        import importlib.util, sys
        from importlib.machinery import SourceFileLoader
        spec = importlib.util.spec_from_loader("tuneloop.stages.toy", SourceFileLoader("tuneloop.stages.toy", {str(tmp_path / "toy.py")!r}))
        sys.modules["tuneloop.stages.toy"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["tuneloop.stages.toy"])
        from {PROGRAM} import main
        main()
    """  # noqa: E501
    env = {
        **os.environ,
        **environment,
        "SEEN": str(tmp_path / "seen"),
        "TUNELOOP_OUTPUTS": str(tmp_path / "outputs"),
    }
    flags = [
        "--loop",
        (loop or toys()).model_dump_json(),
        "--run",
        str(tmp_path / "store"),
        "--iterations",
        "9",
    ]
    flags += [
        "--per-pod",
        "1",
        "--target-reward",
        "inf",
        "--value",
        "iteration=1",
        "--value",
        "total=1",
        *more,
    ]
    command = [sys.executable, "-c", textwrap.dedent(program), *flags]
    return subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)


def outputs(tmp_path: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (tmp_path / "outputs").iterdir()}


def test_stages_run_in_one_process_and_hand_over_results(tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    process = start(tmp_path, None, "--per-pod", "2", ARGO_PROGRESS_FILE=str(progress))
    assert process.stderr
    printed = process.stderr.read()
    assert process.wait(LIMIT_S) == 0, printed
    lines = [line for line in printed.splitlines() if ITERATION.match(line)]
    assert [line.split()[1] for line in lines] == ["1/9", "2/9"], (
        "a line for each, which the console shows"
    )
    assert outputs(tmp_path) == {"iteration": "2", "total": "5"}
    assert (tmp_path / "seen").read_text().splitlines() == [
        f"{process.pid} {number}" for number in (1, 2, 3, 4)
    ]
    assert progress.read_text() == "2/2"


@pytest.mark.parametrize(
    ("more", "last"),
    [
        (("--per-pod", "3", "--value", "iteration=5"), "6"),
        (("--per-pod", "90"), "9"),
        (("--per-pod", "90", "--target-reward", "5"), "2"),
    ],
)
def test_a_pod_ends_where_its_part_or_the_loop_does(
    tmp_path: Path, more: tuple[str, ...], last: str
) -> None:
    process = start(tmp_path, None, *more)
    assert process.wait(LIMIT_S) == 0, process.stderr.read()
    assert outputs(tmp_path)["iteration"] == last


def test_a_pod_that_decides_goes_on_to_the_end_of_its_workflow_where_a_new_one_takes_long(
    tmp_path: Path,
) -> None:
    """Days went by since the last commit. Begun again, it walks over what is committed, and measures what is not."""
    Draft(f"{tmp_path}/store/sft", attempt="data-test").commit(stage="sft")
    os.utime(tmp_path / "store/sft/manifest.json", (0, 0))
    for per_workflow, first in ((6, 1), (8, 7)):
        process = start(tmp_path, None, "--per-pod", str(per_workflow), "--auto")
        assert process.stderr
        printed = process.stderr.read()
        assert process.wait(LIMIT_S) == 0 and outputs(tmp_path)["iteration"] == str(per_workflow), (
            printed
        )
        record = json.loads((tmp_path / "store" / RECORDS).read_text())[-1]
        assert (record["first"], record["iterations"]) == (first, per_workflow - first + 1)
        for place in (tmp_path / "store").rglob("manifest.json"):
            os.utime(place, (0, 0))
    assert f"pod 2 runs 2 iterations: {record['between_s']:.3g} s between pods, " in printed


def test_a_number_of_its_own_or_none_where_one_pod_cannot_run_the_loop() -> None:
    found = find_pipeline("grpo")

    def chosen(*sets: str) -> object:
        return found.configure(None, sets).iterations_per_pod

    shared = ("cluster.share.group=a",)
    for sets in (["nodes=2"], ["loop.asynchronous=true"], ["engine.colocate=true"], shared):
        assert chosen(*sets) == 0
    assert (chosen(), chosen("loop.iterations_per_pod=4"), chosen("loop.iterations_per_pod=0")) == (
        "auto",
        4,
        0,
    )
    assert chosen("loop.iterations_per_pod=4", *shared) == 4
    for wrong in ("-1", "many", "1.5"):
        with pytest.raises(
            UserError, match=r"^loop.iterations_per_pod: .* must be auto or a number"
        ):
            chosen(f"loop.iterations_per_pod={wrong}")
    auto = list_pod_words(found.build(found.configure()))
    assert auto[auto.index("--per-pod") + 1 :][:2] == [
        "{{workflow.parameters.per-workflow}}",
        "--auto",
    ]


def test_a_check_runs_after_each_so_many_iterations(tmp_path: Path) -> None:
    loop = toys()
    check = loop.steps[0].model_copy(update={"name": "check"})
    loop = loop.model_copy(update={"check": check, "evaluate_every": 2})
    process = start(tmp_path, loop, "--per-pod", "3")
    assert process.wait(LIMIT_S) == 0, process.stderr.read()
    (checked,) = (tmp_path / "store").glob("iterations/*/check")
    assert (checked.parent.name, outputs(tmp_path)["iteration"]) == ("2", "3")
    text = (tmp_path / "seen").read_text().split()[1::2]
    assert text == ["1", "2", "3", "4", "5", "5", "6"], "with what the iteration hands on"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_stopped_pod_is_taken_over_by_the_next(tmp_path: Path, number: int, code: int) -> None:
    words = tmp_path / "words"
    words.touch()
    process = start(tmp_path, SECOND_S="600", TUNELOOP_TERMINATION_LOG=str(words))
    second = tmp_path / "store/iterations/1/second"
    seen = tmp_path / "seen"
    until(
        lambda: seen.exists() and len(seen.read_text().splitlines()) == 2, child=process
    )  # the second is at work
    process.send_signal(number)
    assert process.wait(LIMIT_S) == code
    assert (code != 75) or words.read_text().startswith("interrupted: "), "a free end"
    assert not (second / "manifest.json").exists() and not (tmp_path / "outputs").exists()
    again = start(tmp_path)
    assert again.wait(LIMIT_S) == 0
    ran = [line.split()[1] for line in seen.read_text().splitlines()]
    assert ran == ["1", "2", "2"], "the first stage did not run again"


def test_a_stage_that_ends_well_after_sigterm_is_the_last(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.touch()
    process = start(
        tmp_path, toys(wait_s=600), GO=str(tmp_path / "go"), TUNELOOP_TERMINATION_LOG=str(words)
    )
    until((tmp_path / "seen").exists, child=process)
    process.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert process.wait(LIMIT_S) == 75
    assert (tmp_path / "store/iterations/1/first/manifest.json").exists()
    assert len((tmp_path / "seen").read_text().splitlines()) == 1
    assert words.read_text() == "interrupted: iterations: stopped by a signal"


def single(*command: str) -> PodLoop:
    """A loop of one step."""
    step = StageCall(name="step", command=list(command), flags=[], wires={}, output="made")
    return PodLoop(steps=[step], carry={}, reward="step.total")


def test_a_stage_that_can_not_be_imported_ends_the_pod(tmp_path: Path) -> None:
    process = start(tmp_path, single("python", "-m", "tuneloop.stages.nowhere"))
    assert process.wait(LIMIT_S) == 1
    assert "No module named tuneloop.stages.nowhere" in process.stderr.read()


def test_sigterm_reaches_a_stage_in_a_process_of_its_own(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    process = start(
        tmp_path,
        single("sh", "-c", f"trap 'exit 75' TERM; touch {begun}; while sleep 0.05; do :; done"),
    )
    try:
        until(begun.exists, child=process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 75
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stage_that_a_signal_ended_has_the_code_of_a_container(
    tmp_path: Path, number: signal.Signals
) -> None:
    """128 + n, by which an end is classed; a negative one would be a bug's, and never tried again."""
    process = start(tmp_path, single("sh", "-c", f"kill -{number.value} $$"))
    assert process.wait(LIMIT_S) == 128 + number


def test_a_stage_finds_its_environment_as_a_fresh_process_would(tmp_path: Path) -> None:
    fails = single("sh", "-c", 'test -z "$LEFT"')
    loop = PodLoop(steps=[toys().steps[0], *fails.steps], carry={}, reward="first.total")
    process = start(tmp_path, loop)
    assert process.wait(LIMIT_S) == 0, "what the stage before had set"


def asides(tmp_path: Path) -> list[str]:
    """What stages have committed later, in turn."""
    return sorted(
        path.read_text()
        for path in (tmp_path / "store").rglob("aside.txt")
        if committed(path.parents[1])
    )


def committed(place: Path) -> bool:
    return (place / "manifest.json").is_file()


def test_what_a_stage_commits_later_is_written_beside_the_next(tmp_path: Path) -> None:
    """Each is written once the stage after it has begun, and the last before the pod ends."""
    (tmp_path / "seen-5").touch()
    process = start(tmp_path, None, "--per-pod", "2", ASIDE=str(tmp_path / "seen-{}"))
    assert process.wait(LIMIT_S) == 0, process.stderr.read()
    assert asides(tmp_path) == ["1", "2", "3", "4"]


def test_a_pod_that_is_stopped_finishes_what_it_commits_later(tmp_path: Path) -> None:
    process = start(tmp_path, SECOND_S="600", ASIDE=str(tmp_path / "go"))
    until((tmp_path / "seen-2").exists, child=process)
    process.send_signal(signal.SIGTERM)
    second = tmp_path / "store/iterations/1/second"
    until(lambda: not any(second.glob("data-*")), child=process)  # it has left the stage
    assert asides(tmp_path) == []
    (tmp_path / "go").touch()
    assert process.wait(LIMIT_S) == 75 and asides(tmp_path) == ["1"]


@pytest.mark.parametrize("steps", [1, 2])
def test_what_cannot_be_committed_later_fails_the_pod(tmp_path: Path, steps: int) -> None:
    """Where the next is to be begun, or at the end."""
    words = tmp_path / "words"
    words.touch()
    loop = PodLoop(steps=toys().steps[:steps], carry={}, reward="first.total")
    process = start(tmp_path, loop, ASIDE="", TUNELOOP_TERMINATION_LOG=str(words))
    assert (
        process.wait(LIMIT_S) == 2 and "error: aside: 1: cannot be written" in process.stderr.read()
    )
    assert words.read_text() == "error: aside: 1: cannot be written"
    assert committed(tmp_path / "store/iterations/1/first") and not (tmp_path / "outputs").exists()


def test_a_users_mistake_is_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no directory")
    words = tmp_path / "words"
    words.touch()
    process = start(tmp_path, TUNELOOP_TERMINATION_LOG=str(words))
    assert process.wait(LIMIT_S) == 2
    assert "error: store" in process.stderr.read()
    assert words.read_text().startswith("error: store"), "the pod's message is that of its stage"
