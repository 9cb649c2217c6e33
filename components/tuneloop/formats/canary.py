"""The canary: a token sequence whose log-probabilities say whether an engine computes a checkpoint.

The writer of a checkpoint computes them in float32 (`make_canary`), and once more in the dtype that
engines serve. The difference of the two is the noise of right weights: an engine is refused only
when its answers are several times as far away (`Canary.tolerance`).

The tokens are natural text. On random tokens the noise of a pretrained model in bfloat16 is nearly
twice as large, and its distributions are those of no text that the model was trained on.

A step of training may move the log-probabilities by far less than the noise. `tell_versions_apart`
measures both, and says whether the answers can show which of two versions an engine serves.

`base_model` and `training/checkpoint.py` write it; `inference/proof.py` compares an engine with it
before each batch, and `extensions/evaluation/evaluate_lm_eval.py` and `extensions/fleets/conformance.py` a server.
Checkpoints of earlier runs have it, so a new field needs a default. docs/weights.md describes the
proof.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from tuneloop.core.processor import check_processor
from tuneloop.core.seeds import derive_seed

if TYPE_CHECKING:
    from torch import Tensor, dtype

FILE = "canary.json"
LENGTH = 128
"""The maximum number of tokens. Their mean noise varies by a tenth from text to text. A run keeps
the tokens of its base model: another length or text takes effect in new runs alone."""
CHARACTERS = 8
"""Characters of text that are taken for a token."""
NOISE_FACTOR = 3.0
"""An engine's mean distance may be this many times the noise: kernels round in different places."""
FLOOR = 0.01
"""The least tolerance, in nats: a float32 model has nearly no noise, but kernels differ."""
SEPARATED = 8.0
"""Answers tell two versions apart that differ by this many standard deviations of the noise.
`inference/proof.py` reads it, too, and manifests state it as ``separation_needed``."""
RESOLUTION = 1e-6
"""The least noise assumed of any engine, in nats: float32 kernels differ this much."""
ENGLISH = (
    "The river rose slowly during the night, and by morning the lower fields were under water. "
    "Nobody in the village was surprised. Every spring, when the snow on the hills melted, the old "
    "people moved their chairs to the upper windows and waited. The teacher let the children go "
    "home early, because the bridge might be closed before noon. A farmer counted his sheep twice, "
    "found that two were missing, and took his dog along the dry side of the valley. At four in "
    "the afternoon the rain stopped. The water stood still for an hour, and then it began to fall. "
    "In the evening there was bread, soup and a little cheese for everyone in the town hall, and "
    "the doctor, who had come by boat, told them what the newspapers in the city had written about "
    "the flood: that it was the third in ten years, that it had cost the county more than the new "
    "road, and that engineers would visit in May to measure how high the dam would have to be."
)
"""The text of models that come without prompts, and what fills up prompts that are too short."""


class Noise(BaseModel, frozen=True):
    """How far the log-probabilities of right weights in `dtype` are from those in float32, in nats:
    the mean and the largest absolute difference, and the root of the mean square."""

    dtype: str
    mean: float
    max: float
    rms: float


class Canary(BaseModel, frozen=True):
    """The contents of ``canary.json``.

    Attributes:
        ids: the tokens, at least two.
        logprobs: of each token but the first, given those before it: natural logarithms, at
            temperature 1, computed in float32 from the weights as they are saved.
        noise: of an engine that computes the same weights in the dtype that it serves.
        text: where the tokens are from: ``prompts``, ``english`` or ``derived``.
        before: `logprobs` of the version before; None for the first version, or after a change of
            the tokens.
        indistinct_since: the first version of the policy that an engine with this noise could not
            tell from the version before it; None while all could be told.
    """

    ids: list[int] = Field(min_length=2)
    logprobs: list[float]
    noise: Noise
    text: str = "derived"
    before: list[float] | None = None
    indistinct_since: int | None = None

    @property
    def tolerance(self) -> float:
        """The mean absolute difference, in nats, up to which an engine's answers are accepted."""
        return FLOOR + NOISE_FACTOR * self.noise.mean

    def write(self, path: Path) -> None:
        # Not `model_dump_json`, which writes the numbers of a model that diverged (NaN) as null.
        path.write_text(json.dumps(self.model_dump(mode="json")))


def read_canary_file(path: Path) -> Canary:
    """Read ``canary.json``. Raises ValueError where it has another form."""
    return Canary.model_validate(json.loads(path.read_text()))


def derive_ids(vocab_size: int, length: int = LENGTH) -> list[int]:
    """Derive `length` token ids, spread over a vocabulary of `vocab_size` by SHA-256.

    >>> derive_ids(512, 4) == derive_ids(512, 4)
    True
    """
    return [
        derive_seed(0, "canary", vocab_size, position) % vocab_size for position in range(length)
    ]


def encode_text(
    tokenizer: Any, prompts: Iterable[str], vocab_size: int, length: int = LENGTH
) -> tuple[list[int], str]:
    """Encode `length` tokens of natural text: of the prompts, then of a text of ours.

    Args:
        tokenizer: a tokenizer of transformers. It adds what it adds to any text, as the BOS token.
        prompts: texts; only the first ones are taken from the iterator.
        vocab_size: ids from here on are left out, since the model has no embeddings for them.
        length: the maximum number of tokens, which is also below the context of the model.

    Returns:
        At least two ids, and their origin as `Canary.text` names it.
    """
    # A token is seldom longer than eight characters, so more text would be encoded for nothing.
    text = _take_characters(prompts, CHARACTERS * length)
    origin = "prompts" if text else "english"
    ids = _encode(tokenizer, text, vocab_size, length)
    if len(ids) < length:
        ids = _encode(tokenizer, f"{text}\n{ENGLISH}".strip(), vocab_size, length)
    if len(ids) < 2:
        return derive_ids(vocab_size, length), "derived"
    return ids, origin


def _encode(tokenizer: Any, text: str, vocab_size: int, length: int) -> list[int]:
    # Without `verbose=False` it warns of texts beyond the context, which are cut here.
    encoded = tokenizer(text, verbose=False)["input_ids"]
    return [token for token in encoded if token < vocab_size][:length]


def _take_characters(texts: Iterable[str], count: int) -> str:
    """Join the first texts that have `count` characters together, or all of them."""
    chosen: list[str] = []
    size = 0
    # A prompt may have no answer, and a message no content.
    for text in filter(None, texts):
        if size >= count:
            break
        chosen.append(text)
        size += len(text)
    return "\n".join(chosen)


def canary_logprobs(model: Any, ids: list[int], dtype: "dtype | None" = None) -> list[float]:
    """Compute the natural log-probability, at temperature 1, of each of `ids` but the first.

    Args:
        model: a causal language model of transformers; it is left in its own mode and dtype.
        ids: at least two tokens.
        dtype: what the model computes in; None: the dtypes that its parameters have.

    Returns:
        ``len(ids) - 1`` floats, in float32 from the logits of `model`.
    """
    import torch

    device = next(model.parameters()).device
    # Also where a GPU trains: the model as written is evaluated on the CPU.
    if device.type == "cpu":
        check_processor()
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), computing_in(model, dtype) if dtype else nullcontext():
            tokens = torch.tensor([ids], device=device)
            output = model(input_ids=tokens, use_cache=False)
            # Of each position but the last: what follows that is no token of ours.
            logits = output.logits[0, :-1].float()
            logprobs = torch.log_softmax(logits, dim=-1)
            chosen = logprobs.gather(1, tokens[0, 1:, None])
    finally:
        model.train(training)
    return [float(value) for value in chosen[:, 0].cpu()]


@contextmanager
def computing_in(model: Any, dtype: "dtype") -> Iterator[None]:
    """Cast the parameters of `model` to `dtype` while the block runs, and then restore them.

    A layer is cast only while it computes, so that a model of 8 billion parameters in bfloat16
    needs 3 GB more, and not 32. Buffers stay as they are: ``Module.to`` would round the rotary
    frequencies, too, which no engine does.
    """
    from torch.nn import ModuleList

    # The layers of a decoder are its largest list of modules; experts are lists inside of them.
    lists = [module for module in model.modules() if isinstance(module, ModuleList)]
    layers: Iterable[Any] = max(lists, key=_count_parameters, default=())
    originals: dict[Any, list[tuple[Tensor, Tensor]]] = {}

    def cast(owner: Any, parameters: Iterable["Tensor"]) -> None:
        pairs: list[tuple[Tensor, Tensor]] = []
        for parameter in parameters:
            if parameter.is_floating_point() and parameter.dtype != dtype:
                pairs.append((parameter, parameter.data))
                parameter.data = parameter.data.to(dtype)
        originals[owner] = pairs

    def restore(owner: Any) -> None:
        for parameter, data in originals.pop(owner, []):
            parameter.data = data

    def cast_layer(layer: Any, _: Any) -> None:
        cast(layer, layer.parameters())

    def restore_layer(layer: Any, *_: Any) -> None:
        restore(layer)

    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    hooks: list[Any] = []
    try:
        # Embeddings and the head are cast for as long as the block runs.
        cast(model, [item for item in model.parameters() if id(item) not in in_layers])
        for layer in layers:
            hooks.append(layer.register_forward_pre_hook(cast_layer))
            hooks.append(layer.register_forward_hook(restore_layer))
        yield
    finally:
        # A forward pass that failed has not restored its layer.
        for hook in hooks:
            hook.remove()
        for owner in list(originals):
            restore(owner)


def _count_parameters(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def make_canary(
    model: Any,
    ids: list[int],
    text: str = "derived",
    *,
    version: int = 0,
    previous: Canary | None = None,
) -> Canary:
    """Compute the canary of a model, loaded from the files that are served.

    Args:
        model: neither the float32 parameters of a trainer nor a model that was cast in memory.
        ids: the tokens, equal for all versions of a policy.
        text: the origin of the tokens.
        version: the version of the model.
        previous: the canary of the version before, with the same tokens.
    """
    import torch

    # vLLM serves a float32 model in bfloat16, unless it is told otherwise.
    rounded = torch.bfloat16 if model.dtype == torch.float32 else None
    served = str(rounded or model.dtype).removeprefix("torch.")
    logprobs = canary_logprobs(model, ids, torch.float32)
    served_logprobs = canary_logprobs(model, ids, rounded)
    noise = measure_noise(served_logprobs, logprobs, served)
    # Of other tokens the numbers of the version before cannot be compared.
    before = previous.logprobs if previous and previous.ids == ids else None
    canary = Canary(ids=ids, logprobs=logprobs, noise=noise, text=text, before=before)
    indistinct_since = previous.indistinct_since if previous else None
    if indistinct_since is None and 0 < estimate_separation(canary) < SEPARATED:
        indistinct_since = version
    return canary.model_copy(update={"indistinct_since": indistinct_since})


def write_canary(model: Any, path: Path, ids: list[int] | None = None) -> None:
    """Write the canary of a first version; without `ids`, of tokens derived from the vocabulary."""
    vocab_size = model.config.get_text_config().vocab_size
    make_canary(model, ids or derive_ids(vocab_size)).write(path)


def measure_noise(answers: Sequence[float], reference: Sequence[float], dtype: str) -> Noise:
    """Measure the differences between two computations of the same weights."""
    gaps = [abs(difference) for difference in _subtract(answers, reference)]
    return Noise(
        dtype=dtype,
        mean=sum(gaps) / len(gaps),
        max=max(gaps),
        rms=math.hypot(*gaps) / math.sqrt(len(gaps)),
    )


def estimate_separation(canary: Canary) -> float:
    """Estimate how far this version is from the one before, in standard deviations of the noise of
    an engine that serves it; 0 where they are equal, or where there is none before."""
    if canary.before is None:
        return 0.0
    step = _subtract(canary.logprobs, canary.before)
    return math.hypot(*step) / max(canary.noise.rms, RESOLUTION)


def _subtract(numbers: Sequence[float], others: Sequence[float]) -> list[float]:
    return [number - other for number, other in zip(numbers, others, strict=True)]


def tell_versions_apart(
    answers: Sequence[float], claimed: Sequence[float], before: Sequence[float]
) -> dict[str, float]:
    """Measure which of two versions an engine's log-probabilities belong to.

    The noise of the engine is taken as Gaussian and equal at all positions. Its standard deviation
    is estimated from the distance of the answers to the line between the numbers of the versions;
    only their position along the line decides. This is the discriminant of R. A. Fisher, "The use
    of multiple measurements in taxonomic problems" (1936).

    Args:
        answers: of the engine.
        claimed: of the trainer, for the version that the engine says it serves.
        before: of the trainer, for the version before.

    Returns:
        The ``separation`` of the versions in standard deviations of the noise, 0 where they are the
        same; and the ``log_likelihood_ratio`` (nats) of `claimed` against `before`, positive
        where `claimed` is nearer.
    """
    step = _subtract(claimed, before)
    length = math.hypot(*step)
    if not length:
        return {"separation": 0.0, "log_likelihood_ratio": 0.0}
    moves = _subtract(answers, before)
    # The position is 0 at the version before, and 1 at the one that is claimed.
    products = [move * part for move, part in zip(moves, step)]
    position = sum(products) / length**2
    across = _subtract(moves, [position * part for part in step])
    # The position took one of the degrees of freedom.
    noise = math.hypot(*across) / math.sqrt(len(step) - 1)
    separation = length / max(noise, RESOLUTION)
    return {"separation": separation, "log_likelihood_ratio": (position - 0.5) * separation**2}
