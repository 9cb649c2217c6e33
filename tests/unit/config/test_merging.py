"""Several files of settings, such as a preset of a cluster and a user's own, are merged."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tuneloop.cli import run_cli
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import UserError

PRESETS = Path(__file__).parents[3] / "manifests" / "presets"


def configure(tmp_path: Path, *texts: str, preset: str = "", sets: tuple[str, ...] = ()) -> Any:
    """Configure grpo by a preset and files with these texts."""
    files = [PRESETS / f"{preset}.yaml"] if preset else []
    for number, text in enumerate(texts):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        files.append(file)
    return find_pipeline("grpo").configure(files, sets)


def test_a_later_file_wins_key_by_key(tmp_path: Path) -> None:
    first = "seed: 1\ncluster: {queue: a, pod: {env: {A: '1', B: '1'}, env_from: [secret/a]}}\n"
    second = "seed: 2\ncluster: {pod: {env: {B: '2'}, env_from: [secret/b]}, cpu: {cpu: '1'}}\n"
    settings = configure(tmp_path, first, second, sets=("seed=3",))
    assert settings.seed == 3
    assert settings.cluster.queue == "a"
    assert settings.cluster.cpu.cpu == "1"
    assert settings.cluster.pod.env == {"A": "1", "B": "2"}
    # A list has no keys: it is replaced.
    assert settings.cluster.pod.env_from == ["secret/b"]


def test_texts_and_headings_stand_for_sections_in_each_file(tmp_path: Path) -> None:
    first = "engine: {kind: vllm, replicas: 2}\nloop: {iterations: 7}\n"
    # A heading below which all is commented out sets nothing.
    settings = configure(tmp_path, first, "engine: vllm\nloop:\ndata: digits\n")
    assert settings.engine.replicas == 2
    assert settings.loop.iterations == 7
    assert settings.data.source == "digits"


def test_patches_of_pods_merge_by_their_own_rules(tmp_path: Path) -> None:
    platform = "cluster: {pod: {spec: {containers: [{name: main, stdin: true}, {name: wait, tty: true}]}}}\n"
    own = "cluster: {pod: {spec: {containers: [{name: main, tty: true}]}}}\n"
    settings = configure(tmp_path, platform, own)
    main, wait = settings.cluster.build_spec_patch("cpu")["containers"]
    assert main == {"name": "main", "stdin": True, "tty": True}
    assert wait == {"name": "wait", "tty": True}


def test_a_patch_that_is_none_is_refused_in_each_file(tmp_path: Path) -> None:
    wrong = "cluster: {trainer: {pod: {spec: {nodeNam: a}}}}\n"
    right = "cluster: {trainer: {pod: {spec: {nodeName: a}}}}\n"
    for texts in ((wrong, right), (right, wrong), (wrong,)):
        with pytest.raises(UserError, match=r"cluster\.trainer\.pod\.spec\.nodeNam: 'a': is no"):
            configure(tmp_path, *texts)


def test_sections_that_an_anchor_makes_equal_are_set_apart(tmp_path: Path) -> None:
    settings = configure(tmp_path, preset="amd", sets=("cluster.trainer.gpus=2",))
    assert settings.cluster.trainer.gpus == 2
    assert settings.cluster.sampler.gpus == 1


def test_commands_take_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.yaml").write_text("loop: {iterations: 9}\n")
    preset = str(PRESETS / "istio.yaml")
    assert run_cli(["render", "grpo", "-c", preset, "-c", str(tmp_path / "own.yaml")]) == 0
    workflow = yaml.safe_load(capsys.readouterr().out)
    parameters = {item["name"]: item for item in workflow["spec"]["arguments"]["parameters"]}
    assert parameters["iterations"]["value"] == "9"
    injected = [
        template["metadata"]["labels"]["sidecar.istio.io/inject"]
        for template in workflow["spec"]["templates"]
        if "container" in template
    ]
    assert injected and set(injected) == {"false"}
