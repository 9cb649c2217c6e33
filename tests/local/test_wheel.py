"""The wheel and the sdist: what is in them, and what a wheel does where there is no clone."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.local
ROOT = Path(__file__).parents[2]
UV = shutil.which(ROOT / ".tools/bin/uv") or shutil.which("uv")
PIPELINES = sorted(path.stem for path in (ROOT / "pipelines").glob("[a-z]*.py"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was made of it."""
    if UV is None:
        pytest.skip("builds with uv, which is neither in .tools (make install) nor on PATH")
    place = tmp_path_factory.mktemp("dist")
    subprocess.run([UV, "build", "--quiet", "--out-dir", place, ROOT], check=True)
    return place


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel installed, without its dependencies: those of this environment serve."""
    place = tmp_path_factory.mktemp("installed")
    [wheel] = built.glob("*.whl")
    command = [
        str(UV),
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--python",
        sys.executable,
        "--target",
        place,
        wheel,
    ]
    subprocess.run(command, check=True)
    return place


MANY = """
import json, sys
import tuneloop
from tuneloop.cli import run_cli

print(tuneloop.__file__)
for words in json.loads(sys.argv[1]):
    print(end="\\0", flush=True)
    assert run_cli(words) == 0, words
"""


def command(installed: Path, at: Path, *words: str) -> str:
    """What `tuneloop` of the wheel prints, in the folder `at`."""
    return start(installed, at, "-m", "tuneloop.cli", *words)


def start(installed: Path, at: Path, *words: str) -> str:
    """What Python with the wheel prints; nothing on standard error."""
    env = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "TUNELOOP_WARM": "",
    }  # that of the tests has the clone's code
    done = subprocess.run([sys.executable, *words], cwd=at, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_the_package_and_the_pipelines(built: Path) -> None:
    def below(folder: Path, name: str) -> set[str]:
        found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        return {f"{name}/{path}" for path in found if "__pycache__" not in path.parts}

    [wheel] = built.glob("*.whl")
    there = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert there == below(ROOT / "components/tuneloop", "tuneloop") | below(
        ROOT / "pipelines", "tuneloop/_pipelines"
    )


def test_the_sdist_has_what_a_cluster_is_prepared_with(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    for wanted in (
        "manifests/overlays/local/kustomization.yaml",
        "docs/install.md",
        "LICENSE",
        "pyproject.toml",
    ):
        assert wanted in names
    assert not any(name.startswith(("tests", "requirements", ".ci")) for name in names)


def test_the_wheel_renders_what_the_clone_renders(installed: Path, tmp_path: Path) -> None:
    """One command after the other in one process; the demo below is a program of its own."""
    rendered = [["render", name] for name in PIPELINES]
    others = [
        ["lint", "sft_then_grpo"],
        ["plan", "sft_then_grpo"],
        [
            "kfp",
            "render",
            "sft",
        ],
    ]
    at, *texts = start(installed, tmp_path, "-c", MANY, json.dumps([*rendered, *others])).split(
        "\0"
    )
    assert Path(at.strip()).is_relative_to(installed), "not the clone's"
    for name, text in zip(PIPELINES, texts):
        assert text == (ROOT / f"tests/golden/argo/{name}.yaml").read_text()
    for said, text in zip(
        ("0 problems", "at most", "deploymentSpec"), texts[len(PIPELINES) :], strict=True
    ):
        assert said in text
    assert list(tmp_path.iterdir()) == []


def test_the_demo_of_the_wheel_runs_where_there_is_no_clone(
    installed: Path, tmp_path: Path
) -> None:
    small = (
        *(
            "data.train=64",
            "data.eval=16",
            "data.sft=64",
            "data.source_args.digits=2",
            "sft.max_steps=2",
            "sft.warmup_steps=0",
        ),
        *(
            "rollout.prompts_per_iteration=2",
            "rollout.n=2",
            "loop.iterations=1",
            "loop.target_reward=2",
        ),
    )
    sets = [f"--set={each}" for each in ("engine.kind=transformers", *small)]
    out = command(installed, tmp_path, "demo", "--no-track", *sets)
    assert "demo: succeeded" in out
    assert (tmp_path / "runs/demo/report.html").stat().st_size > 10_000
