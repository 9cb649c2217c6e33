"""Compiled pipelines, whole, by KFP's rules (tests/kfp_backend.py) and by its local runner: equal to `tuneloop run`."""

import html
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import components
from kfp.local import config as kfp_config
from PIL import Image

from tests.compiling import compiled
from tests.kfp_api import Api, serve_api
from tests.kfp_backend import Backend, BackendRun, TaskFailed
from tests.local.loops import SMALL, command, digests, finish
from tests.warm import python
from tuneloop.cli import run_cli
from tuneloop.core.artifacts import Artifact
from tuneloop.kfp.local import init_local_runner

pytestmark = [
    pytest.mark.local,
    pytest.mark.filterwarnings("ignore:Task .* have no effect:UserWarning"),
]

SETTINGS = {**SMALL, "kfp.retries": 0}
AFTER_THE_LOOP = ("evaluate-after", "export")
FORMS = {"in one task": 0, "written out": 3}
"""Name → the setting `kfp.unroll`."""


class Place:
    """A store for runs, with the run `ours` by `tuneloop run`, and a backend."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.store = directory, directory / "store"
        self.backend = Backend(directory / "root")

    def run(
        self,
        run: str,
        *,
        cache: bool = True,
        target_reward: float = 2.0,
        run_id: str = "",
        **changes: Any,
    ) -> BackendRun:
        """Run `sft_then_grpo` on the backend; `changes` are settings with ``__`` for a dot."""
        given = {"loop_target_reward": target_reward, "store": str(self.store), "run": run}
        return self.backend.run(
            self.compile("sft_then_grpo", **changes), run, cache=cache, run_id=run_id, **given
        )

    def compile(self, pipeline: str, **changes: Any) -> Path:
        settings = {**SETTINGS, **{key.replace("__", "."): value for key, value in changes.items()}}
        return compiled(
            pipeline, [f"{k}={v}" for k, v in settings.items()], self.directory / f"{pipeline}.yaml"
        )

    def copy(self, run: str, without: tuple[str, ...]) -> None:
        """Make a run that has committed what `ours` has, but for some."""
        shutil.copytree(self.store / "ours", self.store / run)
        for name in without:
            shutil.rmtree(self.store / run / name)

    def exported(self, run: str) -> str:
        return (
            Artifact(str(self.store / run / "export")).manifest.inputs["policy"].partition("@")[2]
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = Place(tmp_path_factory.mktemp("kfp"))
    one_pod = {
        "loop.iterations_per_pod": SMALL["loop.iterations"]
    }  # the same bytes (test_loop.py), by fewer starts
    finish(command("run", "sft_then_grpo", "--run", "ours", store=made.store, **one_pod))
    return made


@pytest.fixture
def api() -> Iterator[Api]:
    with serve_api() as server:
        yield server


def assert_ended(place: Place, run: BackendRun) -> None:
    """Nothing is left running in KFP's metadata."""
    states = place.backend.get_states(run)
    assert set(states.values()) <= {"COMPLETE", "CACHED"}, states


def test_a_loop_in_one_task_goes_on_in_the_next_run(place: Place, api: Api) -> None:
    """Two iterations a run, of three: the first run's task submits the second run, whose stages are cached."""
    changes: Any = {"loop__per_workflow": 2, "kfp__api": api.url}
    api.runs.append(
        {"display_name": "theirs", "experiment_id": "e1", "run_id": "x", "created_at": ""}
    )
    first = place.run("theirs", run_id="x", **changes)
    assert first.started[-4:] == ["iterations", "evaluate-2", "export", "report"]
    assert not (place.store / "theirs/export").exists(), (
        "nothing is made of a policy that is not the last"
    )
    assert_ended(place, first)
    assert [run["run_id"] for run in api.runs] == ["x", "r2"], "it asked for the next"
    again = place.run(
        "theirs", run_id="x", cache=False, **changes
    )  # a task that is tried again after that
    assert (
        again.started.count("iterations") == 1
        and not (place.store / "theirs/iterations/3").exists()
    )
    assert len(api.runs) == 2, "the next run is there"
    second = place.run("theirs", run_id="r2", **changes)
    assert second.started == ["configure", "iterations", "evaluate-2", "export", "report"]
    assert second.skipped == ["data-prep", "base-model", "sft", "evaluate"]
    assert_ended(place, second)
    assert digests(place.store, "theirs") == digests(place.store, "ours")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_stage_is_killed_and_the_run_resumed(place: Place, form: str) -> None:
    run, unroll = f"killed-{FORMS[form]}", FORMS[form]
    obstacle = place.store / run / "iterations/2/policy-update"
    obstacle.parent.mkdir(parents=True)
    obstacle.touch()  # a file where the stage needs a directory
    with pytest.raises(
        TaskFailed, match="iterations" if form == "in one task" else "policy-update-2"
    ):
        place.run(run, kfp__unroll=unroll)
    failed = place.backend.runs[-1]
    assert failed.started[-1] == "report"
    if form == "in one task":  # else the obstacle is in the way of what the stage would leave, too
        assert "Not a directory" in place.backend.read_page(failed, "report"), "it says why"
    assert place.backend.get_states(failed)["root/exit-handler-1"] == "FAILED"
    obstacle.unlink()
    resumed = place.run(run, kfp__unroll=unroll)
    assert not {"sft", "rollout", "data-prep"} & set(resumed.started), "KFP's cache knows them"
    assert_ended(place, resumed)
    assert digests(place.store, run) == digests(place.store, "ours")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_retry_goes_on_from_what_is_committed(place: Place, form: str, tmp_path: Path) -> None:
    """SIGKILL in the middle of a stage: the attempt after it finds what was committed, and KFP's cache is not asked."""
    run, unroll = f"retried-{FORMS[form]}", FORMS[form]
    watched = place.store / run / "iterations/2/rollout/manifest.json"
    killed = threading.Thread(
        target=kill_program, args=(watched, f"{place.store}/{run}"), daemon=True
    )
    killed.start()
    made = place.run(run, cache=False, kfp__unroll=unroll, kfp__retries=3)
    killed.join()
    task = "iterations" if form == "in one task" else "policy-update-2"
    assert (
        made.started.count(task) >= 2 or form == "written out"
    )  # there, the next stage may have been between two
    assert_ended(place, made)
    assert digests(place.store, run) == digests(place.store, "ours")


def kill_program(watched: Path, word: str) -> None:
    """Kill what has `word` in its command line, once the file `watched` is there."""
    while not watched.exists():
        threading.Event().wait(0.01)
    subprocess.run(["pkill", "-KILL", "-f", f"executor-input.*{word}"])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_reached_target_ends_the_loop(place: Place, form: str) -> None:
    run = f"early-{FORMS[form]}"
    place.copy(run, ("iterations/2", "iterations/3", *AFTER_THE_LOOP))
    place.run(run, cache=False, kfp__unroll=FORMS[form], target_reward=-1.0)
    assert not (place.store / run / "iterations/2").exists(), "the second iteration did nothing"
    assert (
        place.exported(run)
        == Artifact(str(place.store / run / "iterations/1/policy-update")).manifest.digest
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("chromium"), reason="Chromium draws the pages: apt-get install chromium"
)
def test_pages_are_drawn_in_the_frame_of_the_user_interface(place: Place, tmp_path: Path) -> None:
    """KFP's UI shows an HTML artifact in a frame without an origin, in which scripts may run but reach nothing.

    `TUNELOOP_PICTURES=DIR` keeps the pictures.
    """
    place.copy("pages", ())
    run = place.run("pages", cache=False)
    kept = Path(os.environ.get("TUNELOOP_PICTURES", tmp_path))
    kept.mkdir(exist_ok=True)
    outputs = {"report": ("report",), "curves": ("exit-handler-1/iterations", "curves")}
    empty = draw_in_frame("<!doctype html>", kept / "empty.png")
    assert empty < 5
    for name, output in outputs.items():
        page = place.backend.read_page(run, *output)
        assert draw_in_frame(page, kept / f"{name}.png") > 100, f"{name} is blank"


def draw_in_frame(page: str, picture: Path) -> int:
    """Draw an HTML page as KFP's UI does (frontend/src/components/viewers/HTMLViewer.tsx); return its colours."""
    frame = picture.with_suffix(".html")
    attributes = f'sandbox="allow-scripts" srcdoc="{html.escape(page)}" style="width:100%;height:99vh;border:0"'
    frame.write_text(
        f"<!doctype html><meta charset=utf-8><body style=margin:0><iframe {attributes}></iframe>"
    )
    line = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1280,1600",
    ]
    line += [
        f"--user-data-dir={picture.with_suffix('.profile')}"
    ]  # two browsers with one profile wait for each other
    # A frame in a process of its own may be drawn after the picture is taken.
    line += [
        "--disable-features=IsolateSandboxedIframes",
        "--run-all-compositor-stages-before-draw",
    ]
    subprocess.run(
        [*line, f"--screenshot={picture}", frame.as_uri()],
        check=True,
        capture_output=True,
        timeout=300,
    )
    with Image.open(picture) as drawn:
        return len(drawn.convert("RGB").getcolors(1 << 24) or ())


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "unroll"), [("sft", 0), ("dpo", 0), ("grpo", 0), ("grpo", 2)])
def test_other_pipelines_fresh_cached_killed_and_resumed(
    place: Place, pipeline: str, unroll: int
) -> None:
    sets, name = choose_settings(pipeline), f"{pipeline}-{unroll}"
    line = [
        word
        for word in command("run", pipeline, "--run", name, store=place.store)
        if "--set" not in word
    ]
    finish([*line, *(f"--set={each}" for each in sets)])
    more = ["kfp.retries=2", *([f"kfp.unroll={unroll}"] if pipeline == "grpo" else [])]
    package = compiled(pipeline, [*sets, *more], place.directory / f"{pipeline}.yaml")
    target = {"loop_target_reward": 2.0} if pipeline == "grpo" else {}

    def run(suffix: str, *, cache: bool = True) -> BackendRun:
        given = {"store": str(place.store), "run": f"{name}-{suffix}", **target}
        made = place.backend.run(package, f"{name}-{suffix}", cache=cache, **given)
        if (
            len(made.started) > 2
        ):  # where all is in the cache no launcher completes KFP's own node of the exit handler
            assert_ended(place, made)
        assert digests(place.store, f"{name}-{suffix}") == digests(place.store, name)
        return made

    run("fresh")
    uncached = {"configure", "report"}
    if pipeline == "grpo" and not unroll:
        uncached.add("iterations")
    again = run("fresh").started
    assert uncached <= set(again) <= uncached | {"evaluate-2", "export"}, "all else is in the cache"
    shutil.rmtree(place.store / f"{name}-fresh" / "export")
    assert run("fresh", cache=False).started[-2:] == ["export", "report"]
    if pipeline != "sft":  # the stage that is killed is one that all have
        return
    watched = place.store / f"{name}-killed" / "base-model/manifest.json"
    killed = threading.Thread(
        target=kill_program, args=(watched, f"{place.store}/{name}-killed"), daemon=True
    )
    killed.start()
    run("killed", cache=False)
    killed.join()


def choose_settings(pipeline: str) -> list[str]:
    """Return small settings for a pipeline."""
    if pipeline == "grpo":
        chosen: dict[str, Any] = {k: v for k, v in SMALL.items() if not k.startswith("sft.")} | {
            "loop.iterations": 2
        }
    else:
        chosen = {k: v for k, v in SMALL.items() if not k.startswith(("rollout", "loop", "engine"))}
    if pipeline == "dpo":
        chosen |= {"data.source_args.digits": 3, "data.preference": 32, "data.preference_eval": 16}
    return [f"{key}={value}" for key, value in chosen.items()]


@pytest.mark.slow
def test_three_ticks_of_a_schedule(
    place: Place, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data changes before the third: two trainings, and one tick that is skipped."""
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", api.url)
    rows, store = tmp_path / "rows.jsonl", tmp_path / "store"
    write_rows(rows, 40)
    small = [
        f"data={rows}",
        "data.train=8",
        "data.eval=8",
        "data.sft=16",
    ]
    # The pods of this backend are processes here, and see what this machine has.
    small += [f"cluster.pod.volumes={{{tmp_path}: pvc/rows}}"]
    small += ["sft.max_steps=4", "kfp.retries=0", f"kfp.api={api.url}"]
    line = [
        "kfp",
        "schedule",
        "sft",
        "--name",
        "nightly",
        "--store",
        str(store),
        "--cron",
        "0 3 * * *",
    ]
    assert run_cli([*line, *(word for each in small for word in ("--set", each))]) == 0
    tick_package, package = tmp_path / "tick.yaml", compiled("sft", small, tmp_path / "sft.yaml")
    tick_package.write_text(yaml.dump(api.recurring[0]["pipeline_spec"]["pipeline_spec"]))

    said = []
    for i in (1, 2, 3):
        if i == 3:
            write_rows(rows, 41)
        own = {
            "display_name": f"nightly{i}",
            "experiment_id": "e1",
            "run_id": f"tick-{i}",
            "created_at": "",
        }
        known = len(api.runs)
        api.runs.append({**own, "state": "RUNNING"})
        tick = place.backend.run(tick_package, f"nightly{i}", run_id=f"tick-{i}")
        said.append(tick.outputs["root/check-data"].parameters["done"])
        for started in api.runs[known + 1 :]:  # what the API server would do
            given = started["runtime_config"]["parameters"]
            assert place.backend.run(package, started["display_name"], **given).started[-2:] == [
                "export",
                "report",
            ]
            started["state"] = "SUCCEEDED"
    names = sorted(path.name for path in store.iterdir())
    assert [line.split()[0] for line in said] == ["started", "skipped:", "started"], said
    assert len(names) == 2 and all(any(name in line for line in said) for name in names)


def write_rows(path: Path, count: int) -> None:
    lines = [
        {"prompt": f"add {i} and 1 =", "answer": str(i + 1), "completion": f" {i + 1}"}
        for i in range(count)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.fixture
def local_runner() -> Iterator[None]:
    """kfp's local mode is a state of the process."""
    yield
    kfp_config.LocalExecutionConfig.instance = None


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_kfps_own_local_runner(
    place: Place, form: str, local_runner: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = f"local-{FORMS[form]}"
    place.copy(run, ("iterations/3", *AFTER_THE_LOOP))
    init_local_runner(place.directory / "local")
    component = components.load_component_from_file(
        str(place.compile("sft_then_grpo", kfp__unroll=FORMS[form]))
    )
    monkeypatch.setattr(sys, "executable", python())  # by which kfp starts its tasks
    component(store=str(place.store), run=run, loop_target_reward=2.0)
    assert digests(place.store, run) == digests(place.store, "ours")
