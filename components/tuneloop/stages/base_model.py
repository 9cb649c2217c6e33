"""The policy to start from: a Hugging Face model, one of a store or of another run, or a tiny one
made here with a tokenizer for the prompts.

`training/pretrained.py` reads a model that is not made here. Parameters are read by name elsewhere:
`config/rules.py: read_base_model` chooses settings by them, `planning/limits.py` refuses wrong ones
before a run, and `cluster/schedule.py: take_base_model` replaces `model` in a schedule's pods.

Tests: `tests/unit/stages/test_base_model.py`; for each kind of model `test_pretrained.py`,
`test_stored_models.py`, `test_hub_names.py`, `test_adapter_base.py`, `test_multimodal.py`; for
templates `test_template_date.py`.
"""

import datetime
import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pyarrow.parquet as pq
from pydantic import AfterValidator, BeforeValidator, Field

from tuneloop.core.artifacts import DIGEST, Artifact, split_ref
from tuneloop.core.component import (
    UNTRACKED,
    OptionalInput,
    Results,
    Stage,
    component,
    note_replay_params,
)
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.store import normalize_url
from tuneloop.formats.architectures import UNBOUNDED, get_context
from tuneloop.formats.canary import FILE, LENGTH, encode_text, make_canary
from tuneloop.formats.model_files import (
    DEFAULT_SHARD_BYTES,
    choose_shard_bytes,
    copy_companions,
)
from tuneloop.formats.prompt_lengths import check_prompts
from tuneloop.formats.stored_models import (
    EXPORT,
    ITERATION,
    RUN,
    SCHEMES,
    find_run_store,
    is_reference,
    open_model,
)
from tuneloop.formats.template_settings import (
    find_turn_end,
    fix_date,
    read_template,
    set_chat_template,
)
from tuneloop.training.pretrained import Pretrained, load_pretrained
from tuneloop.weights.codec import Encoding
from tuneloop.weights.publication import Weights, publish_checkpoint

TINY = ("tiny-qwen3", "tiny-llama")
"""Models that are made here. Few settings follow them (`config/followed.py: Rule.for_demo`), and
they are no path and no name of the hub (`config/model_facts.py`, `planning/limits.py`). The first
is the default, as in `config/pipeline.py: PipelineConfig`. `_make_tiny_model` makes each by its
name.
"""
TINY_SHAPE: JsonObject = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
"""Keys of transformers' configurations; `config/model_facts.py` computes memory from them."""
PAD = "<|endoftext|>"
EOS = "<|im_end|>"
START = "<|im_start|>"
CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def template_digest(params: Any) -> dict[str, str]:
    """Return the SHA-256 of the chat template's file, to identify its contents; empty if there is
    none.
    """
    if params.chat_template is None:
        return {}
    try:
        template = read_template(params.chat_template)
    except UserError:
        # The stage says so, if it runs.
        return {}
    return {"chat_template_digest": hashlib.sha256(template.encode()).hexdigest()}


def resolve_model(params: Any, output: str, committed: JsonMapping) -> dict[str, str]:
    """Pin a reference to a model in a store to the bytes that it names now; other models have none.

    A committed output has these bytes: its source may have been deleted since.

    Args:
        params: of the stage.
        output: the URL of its output, in whose store runs are looked for.
        committed: the parameters of the output that is committed there; empty: none is.
    """
    store = find_run_store(output)
    earlier = str(committed.get("model", ""))
    digest = params.model.rpartition(f"@{DIGEST}:")[2]
    # A name without a digest is no end of a pinned reference.
    if earlier.endswith(f"@{DIGEST}:{digest}"):
        return {"model": earlier}
    is_same = bool(earlier) and names_committed(params.model, earlier, store)
    # The directory of an artifact is no reference any more once it is deleted.
    if not is_same and not is_reference(params.model):
        return {}
    try:
        return {"model": open_model(params.model, store).reference}
    except UserError as error:
        if not is_same:
            raise
        print(f"base_model: goes on with what is committed, as {error}", file=sys.stderr)
        return {"model": earlier}


def names_committed(reference: str, earlier: str, store: str | None) -> bool:
    """Return whether a reference without a digest has the address of the pinned one `earlier`.

    Args:
        reference: as a user gives it.
        earlier: the parameter of a committed output.
        store: where ``run://`` looks for runs; None: not known.
    """
    address, digest = split_ref(earlier)
    if digest is None:
        return False
    scheme, mark, _ = reference.partition("://")
    if mark and scheme.lower() not in SCHEMES:
        return False
    if not reference.startswith(RUN):
        return normalize_url(reference) == address
    name = reference.removeprefix(RUN)
    if store is None or "@" in name:
        return False
    # An iteration names the artifact of one of its stages.
    if ITERATION.search(name):
        return address.rpartition("/")[0] == f"{store}/{name}"
    key = name if "/" in name else f"{name}/{EXPORT}"
    return address == f"{store}/{key}"


def write_day(value: Any) -> Any:
    """Return a day that YAML has read as such as its text; anything else as it is."""
    return value.isoformat() if isinstance(value, datetime.date) else value


def check_date(text: str | None) -> str | None:
    """Refuse what is no date of the calendar."""
    if text is not None:
        datetime.date.fromisoformat(text)
    return text


ModelName = Annotated[
    str,
    Field(
        description="tiny-qwen3, tiny-llama, a directory of a model or of adapters (s3://…, too), "
        "hf://owner/name@revision, or run://NAME/export"
    ),
]
Revision = Annotated[str | None, Field(description="branch, tag or commit on the hub")]
AdapterBase = Annotated[
    str | None,
    Field(
        description="model under adapters (peft) that `model` names: a directory or a hub "
        "name; none: as their adapter_config.json says"
    ),
]
TrustRemoteCode = Annotated[bool, Field(description="run Python code that the model brings")]
ChatTemplate = Annotated[
    str | None,
    Field(description="file with the chat template to use; none: the model's own"),
]
TemplateArgs = Annotated[
    JsonObject,
    Field(description="arguments of the chat template, such as enable_thinking, for every stage"),
]
TemplateDate = Annotated[
    str | None,
    BeforeValidator(write_day),
    AfterValidator(check_date),
    Field(
        description="day that a chat template shows as today, YYYY-MM-DD; none: the day on "
        "which the base model is written"
    ),
]
VocabSize = Annotated[int, Field(ge=260, description="maximum vocabulary of a tiny model")]
ContextLength = Annotated[int, Field(ge=16, description="context length of a tiny model")]
SaveDtype = Annotated[
    Literal["auto", "bfloat16", "float16", "float32"],
    Field(description="dtype of the saved weights; auto: the model's own"),
]
# `weights`, `publish_weights` and `weight_encoding` are read by name by
# `weights/publication.py: publish_checkpoint`, which runs after the stage's commit.
PublishWeights = Annotated[
    bool, Field(description="false: replicas have them", json_schema_extra=UNTRACKED)
]
WeightEncoding = Annotated[Encoding, Field(description="of deltas", json_schema_extra=UNTRACKED)]
CompletionTokens = Annotated[
    dict[str, int],
    Field(
        description=(
            "split of prompts → tokens of a completion: check that its prompts leave this room"
        ),
        json_schema_extra=UNTRACKED,
    ),
]
EngineContext = Annotated[
    int | None,
    Field(
        ge=1,
        description="context of the engine that will sample; none: the model's",
        json_schema_extra=UNTRACKED,
    ),
]


@component(
    "checkpoint",
    image="trainer",
    results={"parameters": int},
    after=publish_checkpoint,
    identity=template_digest,
    resolve=resolve_model,
)
def base_model(
    stage: Stage,
    prompts: OptionalInput,
    *,
    model: ModelName = "tiny-qwen3",
    revision: Revision = None,
    adapter_base: AdapterBase = None,
    trust_remote_code: TrustRemoteCode = False,
    chat_template: ChatTemplate = None,
    template_args: TemplateArgs = {},  # noqa: B006
    template_date: TemplateDate = None,
    vocab_size: VocabSize = 512,
    max_position_embeddings: ContextLength = 1024,
    save_dtype: SaveDtype = "auto",
    weights: Weights = None,
    publish_weights: PublishWeights = True,
    weight_encoding: WeightEncoding = "gap8-xor",
    completion_tokens: CompletionTokens = {},  # noqa: B006
    engine_context: EngineContext = None,
    seed: int = 0,
) -> Results:
    """Write version 0 of the policy: weights, configuration, tokenizer and canary.

    Tiny models have about 0.8 million parameters, random from the seed, and a byte-level BPE
    tokenizer trained on the text of the prompts (never the held-out ones), in which every digit is
    a token of its own.

    With `completion_tokens` every prompt is rendered and counted, before anything is trained:
    ``facts.prompts`` has the longest, and how many leave too little room (``data.too_long``).

    Raises:
        UserError: a prompt that the chat template cannot render, or more that are too long than may
            be dropped; a directory without configuration, tokenizer or weights; adapters without
            their base model; an unknown hub name; a tiny model without prompts; a chat template
            that is none, or arguments that it does not have.
        Retryable: the hub, or the store, does not answer.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    pretrained: Pretrained | None = None
    with stage.timed("load"):
        if model in TINY:
            texts = _iterate_texts(prompts, model)
            tokenizer = train_tokenizer(texts, vocab_size, max_position_embeddings)
            policy = _make_tiny_model(stage, model, tokenizer, max_position_embeddings)
        else:
            pretrained = load_pretrained(model, revision, trust_remote_code, adapter_base)
            note_origin(stage, pretrained)
            policy = pretrained.model
            tokenizer = pretrained.tokenizer
        # They are written with the tokenizer, so that every stage and engine renders alike.
        set_chat_template(tokenizer, chat_template, template_args)
        set_date(stage, tokenizer, template_date)
        set_turn_end(stage, policy, tokenizer)
    if completion_tokens and prompts is not None:
        context = min(get_context(policy.config), engine_context or UNBOUNDED)
        _check_room(stage, tokenizer, prompts, completion_tokens, context)
    dtype = str(policy.dtype).removeprefix("torch.") if save_dtype == "auto" else save_dtype
    with stage.timed("save"):
        write_model(stage, policy, tokenizer, pretrained, dtype)
        # Without these the model would be in memory twice when it is opened again.
        pretrained = None
        del policy
    with stage.timed("canary"):
        policy = reopen_model(stage, trust_remote_code)
        vocabulary = count_served_ids(policy, tokenizer)
        write_canary(stage, policy, tokenizer, prompts, model)
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    # Later versions have those of these facts that `checkpoint.write_checkpoint` copies.
    stage.facts.update(
        version=0,
        model=model,
        parameters=parameters,
        save_dtype=dtype,
        architecture=policy.config.architectures[0],
        vocab_size=vocabulary,
    )
    stage.log(f"{model}: {parameters:,} parameters, vocabulary {vocabulary}")
    return {"parameters": parameters}


def _check_room(
    stage: Stage,
    tokenizer: Any,
    prompts: Artifact,
    completion_tokens: dict[str, int],
    context: int,
) -> None:
    """Check that prompts leave room for completions. Raises as `check_prompts`."""
    # `facts.prompts` follows from these.
    note_replay_params(stage, "completion_tokens", "engine_context")
    with stage.timed("check"):
        check_prompts(stage, tokenizer, prompts, completion_tokens, context)


def write_model(
    stage: Stage,
    policy: Any,
    tokenizer: Any,
    pretrained: Pretrained | None,
    dtype: str,
) -> None:
    """Write a model, cast to `dtype` in place, and its tokenizer to ``model/``.

    With a pretrained one go the files that lay beside it, and its files' size.
    """
    import torch

    target = stage.out / "model"
    shard_bytes = DEFAULT_SHARD_BYTES
    if pretrained:
        shard_bytes = choose_shard_bytes(pretrained.directory, dtype)
    policy.to(getattr(torch, dtype))
    policy.save_pretrained(target, max_shard_size=shard_bytes)
    tokenizer.save_pretrained(target)
    if pretrained:
        copy_companions(pretrained.directory, target)
        note_surplus_tokens(stage, pretrained)


def reopen_model(stage: Stage, trust_remote_code: bool) -> Any:
    """Open the model that was written, as engines will.

    A cast in memory rounds more than the weights, so that the policy in memory may differ.
    """
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        stage.out / "model", dtype="auto", trust_remote_code=trust_remote_code
    )


def write_canary(
    stage: Stage,
    policy: Any,
    tokenizer: Any,
    prompts: Artifact | None,
    name: str,
) -> None:
    """Write the canary of the model called `name`: over tokens of the prompts, or derived ones."""
    texts = _iterate_texts(prompts, name) if prompts else iter(())
    length = min(LENGTH, get_context(policy.config) - 1)
    ids, origin = encode_text(tokenizer, texts, count_served_ids(policy, tokenizer), length)
    make_canary(policy, ids, origin).write(stage.out / FILE)


def note_origin(stage: Stage, pretrained: Pretrained) -> None:
    """Record and say which bytes of a store a model is, and which model adapters were merged into."""
    source = pretrained.source
    if source is not None:
        stage.facts["model_digest"] = source.digest
        stage.log(f"{source.url}: {len(source.files)} files, {source.digest}")
    if pretrained.adapter_base is None:
        return
    stage.facts["adapter_base"] = pretrained.adapter_base
    stage.log(f"an adapter (peft): merged into its base model {pretrained.adapter_base}")
    if pretrained.is_unchanged:
        stage.log("the adapter changes nothing: its matrices B are zero, so the policy is its base")


def note_surplus_tokens(stage: Stage, pretrained: Pretrained) -> None:
    """Record and say which tokens the model has no embeddings for.

    Rows with one of them are refused where they are read.
    """
    tokens = pretrained.surplus_tokens
    if not tokens:
        return
    stage.facts["surplus_tokens"] = len(tokens)
    names = ", ".join(tokens[:3]) + (", …" if len(tokens) > 3 else "")
    stage.log(f"the tokenizer has {len(tokens)} more tokens than the model has embeddings: {names}")


def set_date(stage: Stage, tokenizer: Any, date: str | None) -> None:
    """Write a day into a chat template that shows today's, and record it."""
    today = datetime.datetime.now(tz=datetime.UTC).date()
    day = datetime.date.fromisoformat(date) if date else today
    if fix_date(tokenizer, day):
        stage.facts["template_date"] = day.isoformat()
        stage.log(f"the chat template shows today's date: {day} from here on (model.template_date)")


def count_served_ids(policy: Any, tokenizer: Any) -> int:
    """Count the token ids that both the model and its tokenizer have."""
    # Rows of the embeddings that only pad them to a round number are never served.
    return min(len(tokenizer), policy.config.get_text_config().vocab_size)


def set_turn_end(stage: Stage, policy: Any, tokenizer: Any) -> None:
    """Let generation stop at the token with which the chat template ends a turn, if it does not do
    so already.
    """
    config = policy.generation_config
    # A configuration has no token, one, or a list of them.
    stops: list[int] = []
    if isinstance(config.eos_token_id, int):
        stops.append(config.eos_token_id)
    elif config.eos_token_id is not None:
        stops += config.eos_token_id
    end = find_turn_end(tokenizer, {tokenizer.eos_token_id} | set(stops))
    if end is None:
        return
    config.eos_token_id = (stops or [tokenizer.eos_token_id]) + [end]
    token = tokenizer.convert_ids_to_tokens(end)
    stage.log(f"the chat template ends turns with {token}: generation stops at it, too")


def train_tokenizer(texts: Iterator[str], vocab_size: int, context: int) -> Any:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens; equal texts give equal
    files. Another tokenizer gives other ids to the demo, and to the tests that name some.

    It can spell any text (all 256 bytes are in it), has ``<|im_end|>`` as the end of sequence,
    ``<|endoftext|>`` for padding, and ChatML as its chat template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    # Each digit is a token, so that a sum can be computed digit by digit.
    splitters = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    core.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        clean_up_tokenization_spaces=False,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=context,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [START]})
    tokenizer.chat_template = CHATML
    return tokenizer


def _iterate_texts(prompts: Artifact | None, model: str) -> Iterator[str]:
    """Yield the text to train a tokenizer on: training prompts and answers, demonstrations, the
    contents of chats.
    """
    if prompts is None:
        raise UserError(
            "--prompts", None, f"is required for {model}: its tokenizer is trained on their text"
        )
    for split, target in (("train", "answer"), ("sft", "completion")):
        file = prompts.part(f"{split}.parquet", "--prompts", "give it what data_prep made")
        for row in pq.read_table(file).to_pylist():
            texts = [row["prompt"]]
            if row["chat"]:
                texts = [message.get("content") for message in json.loads(row["prompt"])]
            texts.append(row[target])
            # Messages that only call tools have no text, conversations no completion.
            yield from (text for text in texts if isinstance(text, str))


def _make_tiny_model(stage: Stage, name: str, tokenizer: Any, context: int) -> Any:
    """Make a tiny model for a tokenizer, of weights that are random from the stage's seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = TINY_SHAPE | {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": context,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(stage.seed("init"))
    if name == "tiny-llama":
        return LlamaForCausalLM(LlamaConfig(**shape))
    return Qwen3ForCausalLM(Qwen3Config(**shape))


if __name__ == "__main__":
    base_model.main()
