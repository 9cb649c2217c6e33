"""The primitives on a real policy, without HTTP."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.making import checkpoint_artifact
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.extensions.gateway.messages import (
    CreateModel,
    CreateSampling,
    LoadWeights,
    LoraConfig,
    OptimStep,
    Sample,
    SaveWeights,
)
from tuneloop.extensions.gateway.resident import INPUTS, AdamParams
from tuneloop.extensions.gateway.session import Session
from tuneloop.extensions.gateway.wire import Datum, ForwardBackward
from tuneloop.training.checkpoint import trainer_state
from tuneloop.training.fsdp.ranks import Ranks

ID = "local.session-0123456789"
MODEL = f"{ID}:train:0"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return checkpoint_artifact(
        tmp_path_factory.mktemp("base") / "policy", version=3, dtype=torch.float32
    )


class Driver:
    """A session, and the thread that would do its work."""

    def __init__(self, path: Path, base: Artifact, **lora: Any) -> None:
        self.session = Session(
            ID, f"{path}/sessions/local/session-0123456789", lambda: Ranks("cpu")
        )
        config = LoraConfig(train_unembed=False, **(lora or {"rank": 0}))
        self.result(
            self.session.create_model(
                CreateModel(session_id=ID, base_model=base.ref, lora_config=config)
            )
        )

    def result(self, request: str) -> Any:
        while entries := self.session.ledger.take(0):
            self.session.do(entries)
        return self.session.ledger.future(request).result(0)

    def forward_backward(
        self, data: list[Datum], loss: str, config: dict | None = None, only: bool = False
    ) -> Any:
        asked = ForwardBackward(MODEL, None, data, loss, config or {}, only)
        return self.result(self.session.forward_backward(repr(asked).encode(), asked))

    def step(self, **adam: Any) -> Any:
        return self.result(
            self.session.optim_step(OptimStep(model_id=MODEL, adam_params=AdamParams(**adam)))
        )

    def save(self, name: str) -> str:
        return str(
            self.result(self.session.save_weights(SaveWeights(model_id=MODEL, path=name)))["path"]
        )

    def load(self, path: str, optimizer: bool = True) -> None:
        self.result(
            self.session.load_weights(LoadWeights(model_id=MODEL, path=path, optimizer=optimizer))
        )

    def weights(self) -> dict[str, torch.Tensor]:
        return self.session.models[MODEL].snapshot().state


@pytest.fixture
def driver(tmp_path: Path, base: Artifact) -> Driver:
    return Driver(tmp_path, base)


def data(seed: int = 0, **needed: Any) -> list[Datum]:
    """Three sequences of 3 to 8 tokens whose targets are not always the next token."""
    rng = np.random.default_rng(seed)
    found = []
    for length in (3, 8, 5):
        inputs = {name: make(rng, length).astype("f4") for name, make in needed.items()}
        targets = rng.integers(3, 41, length)
        found.append(
            Datum(rng.integers(3, 41, length).tolist(), {"target_tokens": targets, **inputs})
        )
    return found


def normal(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.normal(size=length)


def sampled(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.normal(-3, 0.5, length)


SUPERVISED = {"weights": normal}
REINFORCED = {"logprobs": sampled, "advantages": normal}


@pytest.mark.parametrize("name", INPUTS)
def test_losses_are_those_of_the_formulas(name: str, driver: Driver, base: Artifact) -> None:
    """Against one sequence at a time in transformers' own model, and autograd on the formula as documented."""
    batch = data(**(SUPERVISED if name == "cross_entropy" else REINFORCED))
    found = driver.forward_backward(batch, name)
    model = AutoModelForCausalLM.from_pretrained(base.path / "model", dtype=torch.float32)
    total = torch.tensor(0.0)
    for datum, mine in zip(batch, found.logprobs):
        logits = model(input_ids=torch.tensor([datum.tokens])).logits[0]
        logp = logits.log_softmax(-1).gather(
            1, torch.tensor(datum.inputs["target_tokens"])[:, None]
        )[:, 0]
        assert np.allclose(mine, logp.detach(), atol=1e-4)
        given = {name: torch.from_numpy(values) for name, values in datum.inputs.items()}
        if name == "cross_entropy":
            total = total - (given["weights"] * logp).sum()
            continue
        ratio, advantages = (logp - given["logprobs"]).exp(), given["advantages"]
        total = (
            total
            - {
                "importance_sampling": ratio * advantages,
                "ppo": torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages),
                "cispo": ratio.detach().clamp(0.0, 4.0) * advantages * logp,
            }[name].sum()
        )
    assert found.metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-4)
    total.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert driver.step()["metrics"]["grad_norm:mean"] == pytest.approx(float(norm), rel=1e-3)


def test_gradients_of_several_requests_add_up(tmp_path: Path, base: Artifact) -> None:
    whole, parts = Driver(tmp_path / "a", base), Driver(tmp_path / "b", base)
    batch = data(**SUPERVISED)
    whole.forward_backward(batch, "cross_entropy")
    for datum in batch:
        parts.forward_backward([datum], "cross_entropy")
    parts.forward_backward(batch, "cross_entropy", only=True)  # adds nothing
    norms = [driver.step()["metrics"]["grad_norm:mean"] for driver in (whole, parts)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("lora", [{}, {"rank": 4}], ids=["whole", "adapters"])
def test_a_saved_state_goes_on_bit_for_bit(lora: dict, tmp_path: Path, base: Artifact) -> None:
    driver = Driver(tmp_path, base, **lora)

    def train(seed: int) -> None:
        driver.forward_backward(data(seed, **SUPERVISED), "cross_entropy")
        driver.step(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0)

    train(1)
    path = driver.save("one")
    train(2)
    wanted, version = driver.weights(), driver.session.models[MODEL].version
    driver.load(path)
    train(2)
    assert driver.session.models[MODEL].version == version == 5
    assert all(torch.equal(value, wanted[name]) for name, value in driver.weights().items())
    driver.load(path, optimizer=False)  # without its moments the step is another
    train(2)
    assert not all(torch.equal(value, wanted[name]) for name, value in driver.weights().items())
    saved = Artifact(driver.session._url(path))
    assert path == f"tinker://{MODEL}/weights/one"
    assert (
        saved.manifest.stage,
        saved.manifest.facts["version"],
        trainer_state(saved).step,
    ) == ("session", 4, 1)
    assert "model/tokenizer.json" in saved.manifest.files and saved.path


def test_what_can_not_be_done_says_why_and_changes_nothing(driver: Driver) -> None:
    before = driver.weights()
    good = data(**SUPERVISED)
    with pytest.raises(UserError, match="there is no gradient"):
        driver.step()
    for wrong, why in (
        ([], "is empty"),
        ([Datum([5, 41], good[0].inputs)], r"must be \[2\]"),
        ([Datum([5, 41, 6], good[0].inputs)], "is not a token of this model, which has 41"),
        ([Datum([5] * 65, good[0].inputs)], "1 to 64"),
        (
            [Datum(good[0].tokens, {**good[0].inputs, "mask": np.ones(3)})],
            "this loss does not use it",
        ),
    ):
        with pytest.raises(UserError, match=why):
            driver.forward_backward([*good[1:], *wrong] if wrong else [], "cross_entropy")
    with pytest.raises(
        UserError, match=r"loss_fn_inputs.advantages.*required|loss_fn_inputs.logprobs.*required"
    ):
        driver.forward_backward(good, "ppo")
    with pytest.raises(UserError, match="unknown; known: cross_entropy"):
        driver.forward_backward(good, "dro")
    with pytest.raises(UserError, match="cross_entropy has no options"):
        driver.forward_backward(good, "cross_entropy", {"beta": 1.0})
    infinite = Datum(good[0].tokens, {**good[0].inputs, "weights": np.full(3, np.inf, "f4")})
    with pytest.raises(UserError, match="version 3 is not finite: check the data's weights"):
        driver.forward_backward([infinite], "cross_entropy")
    parameter = next(driver.session.models[MODEL].trainer.model.parameters())
    hook = parameter.register_hook(lambda gradient: gradient * torch.inf)
    driver.forward_backward(good, "cross_entropy")
    hook.remove()
    with pytest.raises(UserError, match="has gradients that no step has used"):
        driver.save("x")
    with pytest.raises(UserError, match="no step was taken"):
        driver.step()
    assert all(torch.equal(value, before[name]) for name, value in driver.weights().items())
    driver.save("x")
    with pytest.raises(UserError, match="is taken"):
        driver.result(
            driver.session.save_weights(SaveWeights(model_id=MODEL, path="x", ttl_seconds=3600))
        )
    for name in ("", "../x", "a/b", None):
        with pytest.raises(UserError, match="a name of letters"):
            driver.session.save_weights(SaveWeights(model_id=MODEL, path=name))


def test_a_gradient_that_is_not_whole_is_never_applied(driver: Driver) -> None:
    before, resident = driver.weights(), driver.session.models[MODEL]
    good = data(**SUPERVISED)

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    hook = next(resident.trainer.model.parameters()).register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        driver.forward_backward(good, "cross_entropy")
    hook.remove()
    driver.forward_backward(good, "cross_entropy")  # sent before the client heard of it
    with pytest.raises(UserError, match="all gradients are dropped"):
        driver.step()
    assert all(torch.equal(value, before[name]) for name, value in driver.weights().items())
    driver.forward_backward(good, "cross_entropy")
    driver.step()
    assert resident.version == 4


@pytest.mark.parametrize("option", ["learning_rate", "weight_decay"])
def test_weights_that_a_step_makes_infinite_are_refused_afterwards(
    option: str, driver: Driver
) -> None:
    """Fuzzing finds it once in many runs: the first step that has a gradient needs the huge value."""
    supervised = data(**SUPERVISED)
    whole = driver.save("before")
    driver.forward_backward(supervised, "cross_entropy")
    driver.step(**{option: 1e308})
    with pytest.raises(UserError, match="version 4 is not finite: check"):
        driver.forward_backward(supervised, "cross_entropy")
    asked = SaveWeights(model_id=MODEL, sampling_session_seq_id=0)
    name = str(driver.result(driver.session.save_weights_for_sampler(asked))["sampling_session_id"])
    for temperature in (0.0, 1.0):
        with pytest.raises(UserError, match="version: 4: its logits are not finite"):
            driver.result(driver.session.sample(ask(name, [5, 6], temperature=temperature)))
    driver.load(whole)
    assert np.isfinite(driver.forward_backward(supervised, "cross_entropy").metrics["loss:sum"])


def test_what_can_not_be_loaded_is_found_out_before_the_model_goes(driver: Driver) -> None:
    before, path = driver.weights(), driver.save("one")
    (shard,) = Artifact(driver.session._url(path)).path.glob("trainer/*.safetensors")
    kept = shard.rename(shard.with_name("kept"))
    with pytest.raises(UserError, match="is missing"):
        driver.load(path)
    assert all(torch.equal(value, before[name]) for name, value in driver.weights().items())
    kept.rename(shard)
    driver.session.models[MODEL].ranks = None  # the device fails, once the old model is gone
    with pytest.raises(AttributeError):
        driver.load(path)
    with pytest.raises(UserError, match="load_state or optim_step lost it"):
        driver.step()
    driver.session.sleep()  # which wants nothing of that model any more


def test_checkpoints_of_other_namespaces_are_out_of_reach(driver: Driver) -> None:
    for path in (
        "tinker://other.session-0123456789:train:0/weights/x",
        "tinker://local.session-0123456789:train:0/weights/../../../x",
        "tinker://local.../x:train:0/weights/x",
    ):
        with pytest.raises(UserError, match="no checkpoint of this namespace"):
            driver.load(path)
    for path in (
        "s3://artifacts/sessions/other/session-0123456789/train-0/weights/x",
        "s3://artifacts/sessions//local/../%6fther/session-0123456789/train-0/weights/x",
        "/mnt/store/sessions/other/session-0123456789@1f",
    ):
        with pytest.raises(UserError, match="of another namespace"):
            driver.load(path)
    own = driver.session._url(driver.save("mine"))
    driver.load(own)


def ask(sampling: str, tokens: list[int], **params: Any) -> Sample:
    about = {"sampling_session_id": sampling, "prompt": {"chunks": [{"tokens": tokens}]}}
    own = {
        name: params.pop(name)
        for name in ("num_samples", "prompt_logprobs", "seq_id")
        if name in params
    }
    return Sample.model_validate({**about, **own, "sampling_params": {"max_tokens": 6, **params}})


def test_samples_are_of_the_version_they_name(driver: Driver) -> None:
    session = driver.session

    def snapshot(number: int) -> str:
        asked = SaveWeights(model_id=MODEL, sampling_session_seq_id=number)
        return str(driver.result(session.save_weights_for_sampler(asked))["sampling_session_id"])

    old = snapshot(0)
    (found,) = [
        driver.result(session.sample(ask(old, [5, 6], num_samples=3, prompt_logprobs=True)))
    ]
    assert found.version == 3
    for sequence in found.sequences:  # the trainer agrees with what the sampler says of its tokens
        ids = [5, 6, *sequence["tokens"]]
        inputs = {"target_tokens": np.array(ids[1:]), "weights": np.ones(len(ids) - 1, "f4")}
        theirs = driver.forward_backward(
            [Datum(ids[:-1], inputs)], "cross_entropy", only=True
        ).logprobs[0]
        assert np.allclose(theirs, [*found.prompt_logprobs, *sequence["logprobs"]], atol=1e-4)
    driver.forward_backward(data(**SUPERVISED), "cross_entropy")
    driver.step(learning_rate=1e-2)
    new = snapshot(1)
    requests = [session.sample(ask(name, [5, 6], temperature=0.0)) for name in (old, new, old)]
    first, changed, again = (driver.result(request) for request in requests)
    assert (first.version, changed.version) == (3, 4)
    assert (
        first.sequences == again.sequences
        and first.sequences[0]["logprobs"] != changed.sequences[0]["logprobs"]
    )
    snapshot(2)
    with pytest.raises(UserError, match="were dropped for newer ones"):
        driver.result(session.sample(ask(old, [5, 6])))


def test_samples_do_not_depend_on_who_is_sampled_beside_them(
    driver: Driver, base: Artifact
) -> None:
    session = driver.session
    sampling = session.create_sampling(CreateSampling(session_id=ID, base_model=base.ref))
    together = [session.sample(ask(sampling, [5, 6 + n], seq_id=n)) for n in range(4)]
    together = [driver.result(request).sequences for request in together]
    other = Driver(Path(session.artifacts) / "other", base).session
    other.create_sampling(CreateSampling(session_id=ID, base_model=base.ref))
    for number, wanted in enumerate(together):
        request = other.sample(ask(sampling, [5, 6 + number], seq_id=number))
        other.do(other.ledger.take(0))
        assert [s["tokens"] for s in other.ledger.future(request).result(0).sequences] == [
            s["tokens"] for s in wanted
        ]
    seeded = [driver.result(session.sample(ask(sampling, [5], seed=7))).sequences for _ in range(2)]
    assert seeded[0] == seeded[1]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"top_p": 0.9}, "top_k and top_p are not supported"),
        ({"top_k": 5}, "top_k and top_p are not supported"),
        ({"stop": "end"}, "token ids"),
        ({"stop": ["x"]}, "ids"),
    ],
)
def test_sampling_that_is_not_had_is_refused(wrong: dict, why: str, driver: Driver) -> None:
    with pytest.raises(UserError, match=why):
        driver.session.sample(ask("s", [5], **wrong))


def test_one_bad_prompt_spoils_no_other(driver: Driver, base: Artifact) -> None:
    session = driver.session
    sampling = session.create_sampling(CreateSampling(session_id=ID, base_model=base.ref))
    bad, good = session.sample(ask(sampling, [99])), session.sample(ask(sampling, [5]))
    assert driver.result(good).sequences
    with pytest.raises(UserError, match="the model has 41 tokens"):
        driver.result(bad)


def test_a_session_that_sleeps_between_turns_computes_the_same(
    tmp_path: Path, base: Artifact
) -> None:
    steady, turning = Driver(tmp_path / "a", base), Driver(tmp_path / "b", base)
    for seed in range(3):
        for driver in (steady, turning):
            driver.forward_backward(data(seed, **SUPERVISED), "cross_entropy")
            if driver is turning:  # in the middle of a step: gradients sleep, too
                driver.session.sleep()
                with pytest.raises(RuntimeError, match="sleeps"):
                    driver.forward_backward(data(seed, **SUPERVISED), "cross_entropy")
                driver.session.wake()
            driver.step(learning_rate=1e-2)
    assert all(
        torch.equal(value, turning.weights()[name]) for name, value in steady.weights().items()
    )


def test_a_model_whose_step_failed_half_way_is_used_no_more(driver: Driver) -> None:
    """Its weights are neither those of the version it has nor those of the next; a checkpoint of before is."""
    path, before = driver.save("before"), driver.weights()
    resident = driver.session.models[MODEL]

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    resident.trainer.optimizer.register_step_post_hook(fail)
    driver.forward_backward(data(**SUPERVISED), "cross_entropy")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        driver.step()
    for use in (
        driver.step,
        lambda: driver.forward_backward(data(**SUPERVISED), "cross_entropy"),
        lambda: driver.save("after"),
        lambda: driver.load(path),
        lambda: driver.result(driver.session.save_weights_for_sampler(SaveWeights(model_id=MODEL))),
    ):
        with pytest.raises(UserError, match="load_state or optim_step lost it, saying why"):
            use()
    again = LoadWeights(session_id=ID, model_seq_id=1, path=path, optimizer=True)
    driver.result(driver.session.load_weights(again))
    found = driver.session.models[f"{ID}:train:1"].snapshot()
    assert found.version == 3 and all(
        torch.equal(value, before[name]) for name, value in found.state.items()
    )
    driver.session.sleep()
    driver.session.wake()


def test_at_the_end_models_are_saved_under_a_free_name_each_for_itself(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.forward_backward(data(**SUPERVISED), "cross_entropy")
    driver.step()
    driver.save("drained")
    driver.save("drained-2")
    driver.forward_backward(data(**SUPERVISED), "cross_entropy")
    driver.step()
    driver.session.models = {"nobody": driver.session.models[MODEL], **driver.session.models}
    for _ in range(2):  # what was saved is not saved again
        saved = driver.session.save_models()
        driver.session.do(driver.session.ledger.take(0))
        saved.result(0)
    assert len(list(Path(f"{driver.session.artifacts}/train-0/weights").iterdir())) == 3
    assert (
        Artifact(f"{driver.session.artifacts}/train-0/weights/drained-3").manifest.facts["version"]
        == 5
    )
    assert (
        "nobody could not be saved (UserError: path: 'tinker://nobody/weights/drained': no checkpoint"
        in caplog.text
    )
