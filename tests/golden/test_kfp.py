"""Every pipeline's compiled form is what it was; `make golden` rewrites it after a wanted change."""

from pathlib import Path

import pytest
from kfp import components

from tests.compiling import compiled
from tuneloop.config.loading import find_pipeline

HERE = Path(__file__).parent / "kfp"
PIPELINES = sorted(Path(__file__).parents[2].glob("pipelines/*.py"))
FORMS = {
    "": [],
    "-unrolled": [
        "loop.iterations=2",
        "kfp.unroll=2",
        "loop.evaluate_every=1",
        "cluster.trainer.gpus=2",
        "cluster.sampler.gpus=1",
    ],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: p.stem)
def test_compiled_pipeline(
    pipeline: Path, form: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if form and pipeline.stem != "grpo":
        pytest.skip("one loop of each form is enough to read")
    if not hasattr(find_pipeline(str(pipeline)).module, "build_kfp"):
        pytest.skip("is for Argo Workflows alone")
    path = compiled(str(pipeline), FORMS[form], tmp_path / "pipeline.yaml")
    inputs = components.load_component_from_file(str(path)).component_spec.inputs
    assert {"run", "store"} <= set(inputs), "kfp took the pipeline for one of its components"
    golden = HERE / f"{pipeline.stem}{form}.yaml"
    if request.config.getoption("--update-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(path.read_text())
    assert golden.read_text() == path.read_text(), (
        "compiled otherwise than before; `make golden` if that is wanted"
    )
