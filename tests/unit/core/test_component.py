"""The stage contract, as a program sees it: flags, exit codes, one commit, signals."""

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import Field, ValidationError

from tests.waiting import LIMIT_S
from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import OptionalInput, Options, Results, Stage, component

STAGE = '''
import os, time
from typing import Annotated
from pydantic import Field
from tuneloop.core.component import *
from tuneloop.core.errors import Retryable

@component("thing", image="base", results={"size": int, "mean_reward": float})
def toy(stage: Stage, source: OptionalInput, *,
        times: Annotated[int, Field(ge=1, description="how often")] = 3,
        weights: dict[str, float] | None = None,
        label: Annotated[str, Field(json_schema_extra=UNTRACKED | {"examples": ["a"]})] = "",
        sleep: int = 0, seed: int = 0) -> Results:
    """Write a file."""
    text = (source.path / "x").read_text() if source else "x"
    done = stage.latest_resume()
    start = done.manifest.facts["step"] if done else 0
    for step in range(start, sleep):
        if stage.stopping or step == int(os.environ.get("STOP_AT", -1)):
            stage.stopping = True
            stage.save_resume(step, lambda d: (d / "state").write_text(str(step)))
            stage.check_stop()
        print("step", step, flush=True)
        time.sleep(float(os.environ.get("NAP", 0)))
    if label == "crash": raise RuntimeError("boom")
    if label == "retry": raise Retryable("the endpoint is gone")
    if label.startswith("lacks "): raise ModuleNotFoundError("No module", name=label.removeprefix("lacks "))
    if label in ("28", "122"): raise OSError(int(label), os.strerror(int(label)), "/scratch")
    (stage.out / "x").write_text(text * times)
    stage.facts["start"] = start
    return {"size": len(text) * times, "mean_reward": 0.5}

if __name__ == "__main__":
    toy.main()
'''


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    program = tmp_path / "toy.py"
    program.write_text(STAGE)
    return program


def run(program: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(program), *flags]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **env}, timeout=LIMIT_S
    )


def load(program: Path) -> Any:
    """The program as a module of this process: most of what a start of it takes are imports."""
    spec = importlib.util.spec_from_file_location("toy", program)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_stage_may_read_and_write_the_same_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @component("thing", results={"length": int})
    def double(stage: Stage, thing: OptionalInput) -> Results:
        """Write a file twice as long as the one read."""
        text = 2 * (thing.path / "x").read_text() if thing else "x"
        (stage.out / "x").write_text(text)
        return {"length": len(text)}

    monkeypatch.setenv("TUNELOOP_OUTPUTS", str(tmp_path / "outputs"))
    assert double.run(["--thing-out", f"{tmp_path}/a"]) == 0
    first = (tmp_path / "outputs" / "thing-out").read_text()
    assert double.run(["--thing", first, "--thing-out", f"{tmp_path}/b"]) == 0
    made = Artifact(f"{tmp_path}/b").manifest
    assert (made.kind, made.inputs, made.results) == ("thing", {"thing": first}, {"length": 2})


class Shared(Options):
    """Of several stages."""

    rate: float = Field(0.5, gt=0, description="of learning")
    steps: int = Field(3, ge=1)
    unused: str = "kept"


class Fewer(Shared):
    """With other defaults, in another order, and without one."""

    flags: ClassVar[tuple[str, ...]] = ("steps", "rate")
    steps: int = Field(7, ge=1)


def test_options_that_stages_share_are_flags_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @component("thing", results={"total": float})
    def shares(stage: Stage, *, before: int = 1, options: Fewer, after: int = 2) -> Results:
        """Multiply."""
        (stage.out / "unused").write_text(options.unused)
        return {"total": before * options.rate * options.steps * after}

    assert list(shares.Params.model_fields) == ["before", "steps", "rate", "after"]
    assert shares(out=f"{tmp_path}/a").results == {"total": 7.0}
    assert shares(out=f"{tmp_path}/b", rate=2.0).params == {
        "before": 1,
        "steps": 7,
        "rate": 2.0,
        "after": 2,
    }
    assert (Artifact(f"{tmp_path}/b").path / "unused").read_text() == "kept"
    assert shares.run(["--thing", f"{tmp_path}/c", "--rate", "0"]) == 2
    assert "shares.rate: '0': has to be greater than 0" in capsys.readouterr().err


def test_an_empty_text_takes_the_place_of_another_text_alone(tmp_path: Path) -> None:
    """Workflows pass it for an input, an address or a number that is absent."""

    @component("thing")
    def names(
        stage: Stage,
        source: OptionalInput,
        *,
        label: str = "x",
        endpoint: str | None = None,
        iteration: int = 3,
    ) -> None:
        """Write nothing."""

    flags = ["--thing", f"{tmp_path}/a", "--source", "", "--label", ""]
    assert names.run([*flags, "--endpoint", "", "--iteration", ""]) == 0
    manifest = Artifact(f"{tmp_path}/a").manifest
    assert manifest.params == {"label": "", "endpoint": None, "iteration": 3}
    assert not manifest.inputs


def test_a_stage_commits_one_artifact_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @component("thing")
    def twice(stage: Stage) -> None:
        """Defer two artifacts."""
        for name in ("state", "aside"):
            stage.commit_later(name, lambda path: None, kind="state")

    assert twice.run(["--thing", f"{tmp_path}/a"]) == 1
    assert "commit_later is called once" in capsys.readouterr().err
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_commits_once_and_says_its_results(toy: Path, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    for attempt in range(2):
        done = run(toy, "--thing", f"{tmp_path}/a", "--times", "4", TUNELOOP_OUTPUTS=str(outputs))
        assert done.returncode == 0, done.stderr
        assert ("committed already" in done.stderr) == bool(attempt)
        assert (outputs / "size").read_text() == "4" and (
            outputs / "mean-reward"
        ).read_text() == "0.5"
    ref = (outputs / "thing").read_text()
    manifest = Artifact(ref).manifest
    assert manifest.params == {"times": 4, "weights": None, "sleep": 0, "seed": 0}
    assert manifest.provenance["device"].startswith("cpu") and manifest.timings["total"] >= 0


def test_inputs_are_recorded_and_followed(toy: Path, tmp_path: Path) -> None:
    assert run(toy, "--thing", f"{tmp_path}/a").returncode == 0
    ref = Artifact(f"{tmp_path}/a").ref
    assert (
        run(toy, "--source", ref, "--thing", f"{tmp_path}/b", "--weights", '{"w": 1}').returncode
        == 0
    )
    manifest = Artifact(f"{tmp_path}/b").manifest
    assert manifest.inputs == {"source": ref} and manifest.params["weights"] == {"w": 1.0}
    assert (Artifact(f"{tmp_path}/b").path / "x").read_text() == "x" * 9


def test_a_parameter_that_a_release_adds_does_not_refuse_what_is_committed(
    toy: Path, tmp_path: Path
) -> None:
    assert run(toy, "--thing", f"{tmp_path}/a").returncode == 0
    text = toy.read_text()
    toy.write_text(text.replace("seed: int = 0", "seed: int = 0, order: tuple[str, ...] = ('a',)"))
    again = run(toy, "--thing", f"{tmp_path}/a")
    assert (again.returncode, "committed already" in again.stderr) == (0, True)
    other = run(toy, "--thing", f"{tmp_path}/a", "--order", '["b"]')
    assert other.returncode == 2
    assert other.stderr.startswith("error: --order: ") and "made from None" in other.stderr


def test_an_output_made_otherwise_is_refused_by_field(toy: Path, tmp_path: Path) -> None:
    assert run(toy, "--thing", f"{tmp_path}/a").returncode == 0
    other = run(toy, "--thing", f"{tmp_path}/a", "--times", "5")
    assert other.returncode == 2
    assert (
        other.stderr.startswith("error: --times: 5: ")
        and "made from 3; use another run name" in other.stderr
    )
    assert run(toy, "--thing", f"{tmp_path}/a", "--label", "other").returncode == 0, (
        "untracked: not part of identity"
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--times", "0"], "toy.times: '0': has to be greater than or equal to 1"),
        (["--times", "many"], "toy.times: 'many': has to be a whole number"),
        (["--tmes", "1"], "unrecognized arguments: --tmes"),
        (["--weights", "[1]"], "toy.weights: [1]"),
        (["--source", "/nowhere"], "artifact: 'file:///nowhere': has no manifest.json"),
        (["--source", "ftp://x"], "store: 'ftp://x': use one of"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    toy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    assert load(toy).toy.run(["--thing", f"{tmp_path}/a", *flags]) == 2
    said = capfd.readouterr().err
    assert says in said and said.count("\n") == 1
    assert not (tmp_path / "a").exists(), "nothing half-written"


def test_an_extra_that_is_not_installed_is_named(toy: Path, tmp_path: Path) -> None:
    done = run(toy, "--thing", f"{tmp_path}/a", "--label", "lacks torch")
    assert done.returncode == 2
    assert (
        done.stderr == "error: package: 'torch': is not installed; pip install 'tuneloop[train]'\n"
    )


@pytest.mark.parametrize(
    ("label", "code"), [("crash", 1), ("lacks mine", 1), ("retry", 75), ("28", 75), ("122", 75)]
)
def test_failures_keep_their_kind_and_leave_nothing(
    toy: Path, tmp_path: Path, label: str, code: int
) -> None:
    done = run(toy, "--thing", f"{tmp_path}/a", "--label", label)
    assert done.returncode == code, done.stderr
    assert [p for p in tmp_path.glob("a/*") if p.is_dir()] == []


@pytest.mark.parametrize("address", ["{{tasks.serve.ip}}", "{{tasks.serve-2.ip}}"])
def test_a_pod_that_was_created_while_its_server_had_no_address(
    toy: Path, tmp_path: Path, address: str
) -> None:
    """Argo leaves the text as it is: no name that could be looked up, and no bug."""
    done = run(toy, "--thing", f"{tmp_path}/a", "--label", f"http://1.2.3.4:1,http://{address}:1")
    assert done.returncode == 75
    name = address.split(".")[1]
    assert done.stderr.startswith(f"unavailable: server: {name} has no address yet: this pod")
    template = run(toy, "--thing", f"{tmp_path}/a", "--label", "{{ messages }}")
    assert template.returncode == 0, "a chat template has braces, too"


def start(program: Path, *flags: str) -> subprocess.Popen[str]:
    """The program, at work on the first of its steps, each of which takes 0.1 s."""
    env = {**os.environ, "NAP": "0.1"}
    child = subprocess.Popen(
        [sys.executable, str(program), *flags], stdout=subprocess.PIPE, text=True, env=env
    )
    assert child.stdout and child.stdout.readline() == "step 0\n"
    return child


def test_sigterm_saves_a_resume_point_and_exits_75(toy: Path, tmp_path: Path) -> None:
    flags = ("--thing", f"{tmp_path}/a", "--sleep", "300")
    child = start(toy, *flags)
    child.send_signal(signal.SIGTERM)
    assert child.wait(LIMIT_S) == 75
    assert not (tmp_path / "a/manifest.json").exists()
    assert len(list(tmp_path.glob("a/resume/*/manifest.json"))) == 1
    assert run(toy, *flags).returncode == 0
    assert 0 < Artifact(f"{tmp_path}/a").manifest.facts["start"] < 300, "went on where it stopped"
    assert not (tmp_path / "a/resume").exists(), "resume points end with the commit"


@pytest.mark.parametrize("step", [3, 7])
def test_a_resume_point_of_other_parameters_is_not_in_the_way(
    toy: Path, tmp_path: Path, step: int
) -> None:
    flags = ("--thing", f"{tmp_path}/a", "--sleep", "10")
    assert run(toy, *flags, STOP_AT="7").returncode == 75
    for stop_at, code in ((step, 75), (-1, 0)):
        assert run(toy, *flags, "--times", "4", STOP_AT=str(stop_at)).returncode == code
    assert Artifact(f"{tmp_path}/a").manifest.facts["start"] == step


def test_sigkill_leaves_nothing_a_reader_would_trust(toy: Path, tmp_path: Path) -> None:
    flags = ("--thing", f"{tmp_path}/a", "--sleep", "300")
    child = start(toy, *flags)
    child.kill()
    child.wait(LIMIT_S)
    assert not (tmp_path / "a/manifest.json").exists()
    assert run(toy, *flags).returncode == 0


def test_two_at_once_commit_one(toy: Path, tmp_path: Path) -> None:
    flags = ("--thing", f"{tmp_path}/a", "--sleep", "30")
    first = start(toy, *flags)
    first.send_signal(signal.SIGSTOP)  # else it may have ended before the other begins
    twins = [first, start(toy, *flags)]
    first.send_signal(signal.SIGCONT)
    assert [twin.wait(LIMIT_S) for twin in twins] == [0, 0]
    assert len(list(tmp_path.glob("a/data-*"))) == 1
    _ = Artifact(f"{tmp_path}/a").path


def test_help_names_every_flag_quickly_imported(toy: Path) -> None:
    done = run(toy, "--help")
    for text in ("--source REF", "--thing URL", "how often (default: 3)", "Write a file."):
        assert text in done.stdout
    heavy = "[m for m in ('torch','hera','kfp','vllm') if m in sys.modules]"
    code = f"import sys; import tuneloop.core.component; print({heavy})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_stage_must_return_the_results_it_declares(tmp_path: Path) -> None:
    program = tmp_path / "bad.py"
    program.write_text(
        textwrap.dedent(
            """
            from tuneloop.core.component import *
            @component("thing", results={"a": int})
            def bad(stage: Stage) -> Results:
                "Forget a result."
                return {}
            if __name__ == "__main__": bad.main()
            """
        )
    )
    done = run(program, "--thing", f"{tmp_path}/a")
    assert done.returncode == 1 and "must return ['a']" in done.stderr


def test_settings_are_the_parameters_a_pipeline_leaves_open(toy: Path) -> None:
    module = load(toy)
    settings = module.toy.settings(without={"seed"}, times=7)
    assert settings().times == 7 and "seed" not in settings.model_fields
    assert module.toy.Params().times == 3, "the stage's own default stays"
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        settings(times=0)
    with pytest.raises(ValidationError, match="Extra inputs"):
        settings(seed=1)
