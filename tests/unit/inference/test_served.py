"""An engine with servers that is none of ours: how it is chosen, refused and served. tests/local has a whole run."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.making import checkpoint_artifact
from tests.served import SETTING, install_engine, read_program
from tests.unit.inference.rollout_server import ask
from tests.waiting import LIMIT_S, until
from tuneloop.config.loading import find_pipeline
from tuneloop.core import plugins
from tuneloop.core.errors import UserError
from tuneloop.formats.rollouts import Request
from tuneloop.inference.capabilities import Capabilities
from tuneloop.inference.engines import Sampling, transformers
from tuneloop.inference.proof import prove_weights
from tuneloop.workflow.plan import read_plan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, whose packages are those that are installed."""
    monkeypatch.syspath_prepend(tmp_path)
    plugins._registered.cache_clear()
    modules = set(sys.modules)
    yield tmp_path
    plugins._registered.cache_clear()
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def find_container(workflow: dict[str, Any], name: str) -> dict[str, Any]:
    (template,) = (item for item in workflow["spec"]["templates"] if item["name"] == name)
    container: dict[str, Any] = template["container"]
    return container


def test_its_settings_start_servers_and_make_stages_their_clients(folder: Path) -> None:
    install_engine(folder)
    grpo = find_pipeline("grpo")
    sets = [SETTING, "engine.port=8770", "engine.replicas=2", "engine.args.max_num_seqs=3"]
    config: Any = grpo.configure(
        sets=[*sets, "loop.iterations_per_pod=0", "cluster.sampler.gpus=3"]
    )
    assert config.engine.server.port == 8770
    # What is recorded of a run is read again as what it was.
    assert grpo.validate(config.model_dump(mode="json")) == config
    workflow = grpo.build(config)
    words = find_container(workflow, "serve")["args"]
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert flags["--engine"] == "simple"
    assert json.loads(flags["--engine-args"]) == {"max_num_seqs": 3}
    plan = read_plan(workflow)
    assert plan.servers["serve"].kind == "simple" and plan.servers["serve"].replicas == 2
    assert plan.stages["rollout"].resource_role == "cpu"
    with pytest.raises(UserError, match=r"engine\.porrt: 1: unknown key; did you mean port\?"):
        grpo.configure(sets=[SETTING, "engine.porrt=1"])
    with pytest.raises(UserError, match="not of simple, which has args, port, replicas, weights"):
        grpo.configure(sets=[SETTING, "engine.colocate=true"])
    # Only vLLM's server was measured: a guess must not be another's limit.
    assert plan.servers["serve"].resources.memory_limit is None


def test_the_command_of_a_server_of_vllm_does_not_name_it() -> None:
    grpo = find_pipeline("grpo")
    workflow = grpo.build(grpo.configure())
    assert "--engine" not in find_container(workflow, "serve")["args"]
    assert read_plan(workflow).servers["serve"].kind == "vllm"


def test_options_that_are_vllms_are_given_to_its_servers_alone(folder: Path, smollm2: Path) -> None:
    install_engine(folder)
    grpo = find_pipeline("grpo")
    sets = [f"base_model={smollm2}"]
    config: Any = grpo.configure(sets=sets)
    assert config.engine.options["max_model_len"] >= 1024
    for more in ([], ["engine.args.max_num_seqs=3"]):
        config = grpo.configure(sets=[*sets, SETTING, *more])
        assert not {"max_model_len", "enforce_eager"} & config.engine.options.keys()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('SECTION = "my_served:Settings"\n', "", "serves, but its settings have no server"),
        ("(ServingEngine,", "(Engine,", "serves, but its settings have no server"),
        ("serves=True", "", "CAPABILITIES of its module has to say serves=True"),
        ("def open_served_engine", "def open_other", "its module has no open_served_engine"),
        ("my_served:Settings", "my_served:Setings", "has no attribute 'Setings'"),
        ("my_served:Settings", "my_served:Simple", "has to name a class of Engine"),
        ("from typing", "from absent", "my_served cannot be imported (No module named 'absent')"),
    ],
)
def test_an_engine_whose_server_nothing_would_start_is_refused(
    folder: Path, old: str, new: str, message: str
) -> None:
    program = read_program()
    assert program.count(old) == 1
    program = program.replace(old, new)
    program = program.replace("import ServingEngine", "import Engine, ServingEngine")
    install_engine(folder, program)
    with pytest.raises(UserError) as caught:
        find_pipeline("grpo").configure(sets=[SETTING])
    assert caught.value.field.startswith("engine")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_engine_that_ships_is_refused_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "CAPABILITIES", Capabilities(serves=True))
    with pytest.raises(UserError, match="transformers serves, but its settings have no server"):
        find_pipeline("grpo").configure(sets=["engine=transformers"])


def test_an_entry_point_of_a_function_is_an_engine_in_the_process_of_its_stage(
    folder: Path,
) -> None:
    install_engine(folder)
    entries = folder / "my_served-1.0.dist-info" / "entry_points.txt"
    entries.write_text("[tuneloop.engines]\nsimple = my_served:open_engine\n")
    config: Any = find_pipeline("grpo").configure(sets=[SETTING])
    assert config.engine.server is None and config.engine.capabilities == Capabilities()
    assert "my_served" not in sys.modules, "its code need not be here"


@pytest.mark.parametrize("kind", ["transformers", "absent", "my.module:open_engine"])
def test_a_server_refuses_an_engine_that_does_not_serve(kind: str) -> None:
    command = [sys.executable, "-m", "tuneloop.inference.server", "--port", "0", "--engine", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"--engine: {kind!r}: is no engine that serves" in line


def test_its_server_samples_from_the_policy_that_a_client_loads(folder: Path) -> None:
    install_engine(folder)
    policy = checkpoint_artifact(folder / "policy", "qwen3")
    command = [sys.executable, "-m", "tuneloop.inference.server", "--port", "0"]
    command += ["--engine", "simple", "--engine-args", '{"dtype": "float32"}']
    pipes: Any = {"stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, **pipes) as child:
        try:
            address = next(
                match[1] for line in child.stderr if (match := re.search(r"at http://(\S+)", line))
            )
            # It says its address before it listens there.
            until(lambda: ask(address, "GET", "/version")[0] == 200, child=child)
            open_engine = plugins.load_variant("engines", "simple", "open_engine")
            engine = open_engine(f"http://{address}", {}, LIMIT_S)
            engine.load(policy)
            assert (engine.name, engine.digest) == ("simple", policy.manifest.digest)
            assert prove_weights(engine, policy, None).is_by_tensors
            requests = [Request("a", [1, 2, 3], [4]), Request("b", [6], [7])]
            here = transformers.Transformers(dtype="float32")
            here.load(policy)
            for temperature in (0.0, 1.0):
                sampling = Sampling(temperature, 6)
                answers = engine.generate(requests, sampling, lambda _: None)
                for request, (completion,) in zip(requests, answers, strict=True):
                    # Alone, as in the server: another batch may round otherwise.
                    ((expected,),) = here.generate([request], sampling, lambda _: None)
                    assert completion.ids == expected.ids
            assert engine.score([1, 2, 3, 4]) == pytest.approx(here.score([1, 2, 3, 4]), abs=1e-5)
            with pytest.raises(UserError, match="prompt and completion must have 1 to"):
                engine.generate([Request("a", [1], [0])], Sampling(1.0, 10**6), lambda _: None)
        finally:
            child.kill()
