"""A pretrained model as it comes: its weights, its tokenizer, and the files beside them.

Only `base_model` reads models from elsewhere. Every later stage opens the checkpoint that it wrote
(`training/fsdp/loading.py: open_model`). Before a run, `config/model_facts.py: read_model_facts`
reads what it can of such a model, and `planning/limits.py: check_base_model` refuses one that is
incomplete: a new kind of address belongs there, too, into `formats/adapter_files.py: is_path` and
`planning/pod_paths.py: check_model_path`, which would refuse it, and into `resolve` of
`stages/base_model.py`, which pins it.

Tests: `tests/unit/stages/test_pretrained.py`, of adapters `test_adapter_base.py`, of the hub
`test_hub_names.py`, of stores `test_stored_models.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.core.hub import explain_failures, split_hub_address
from tuneloop.formats.adapter_files import (
    SETTING,
    STACKED,
    AdapterFiles,
    explain_base,
    is_path,
    read_adapter,
)
from tuneloop.formats.model_files import CARD, WEIGHTS, has_tokenizer, list_missing_parts
from tuneloop.formats.stored_models import StoredModel, is_reference, open_model
from tuneloop.training.merged import find_adapter_on_hub, merge_adapter

FIELD = "base_model.model"
"""The setting that names the model, for messages."""


@dataclass(frozen=True)
class Pretrained:
    """A model of transformers with its tokenizer.

    Attributes:
        directory: holds the files that both were read from; of adapters, those of the base model.
        adapter_base: the model under adapters that were merged; None: there were none.
        is_unchanged: whether there were adapters that change nothing.
        source: the model in a store whose files lie in `directory`, which keeps them there; None:
            it came from elsewhere.
    """

    model: Any
    tokenizer: Any
    directory: Path
    adapter_base: str | None = None
    is_unchanged: bool = False
    source: StoredModel | None = None

    @property
    def surplus_tokens(self) -> list[str]:
        """The tokens whose ids lie beyond the model's embeddings.

        The model can neither read nor produce them.
        """
        size = self.model.config.get_text_config().vocab_size
        vocabulary = self.tokenizer.get_vocab()
        ids = {number: token for token, number in vocabulary.items() if number >= size}
        return [ids[number] for number in sorted(ids)]


def load_pretrained(
    address: str,
    revision: str | None,
    trust_remote_code: bool,
    adapter_base: str | None = None,
) -> Pretrained:
    """Load a model and its tokenizer from a directory, a store or the hub. Adapters of peft are
    merged into their base model, `adapter_base` or the one that they name.

    Raises UserError: a directory that lacks a file, weights or a tokenizer that cannot be loaded or
    do not fit, a name that the hub does not have or give, adapters without a base model.
    Raises Retryable: the hub, or the store, does not answer."""
    if is_reference(address):
        return _load_stored(address, revision, trust_remote_code, adapter_base)
    name, revision = split_hub_address(FIELD, address, revision)
    _check_directory(name)
    with explain_failures(FIELD, name):
        adapter = _find_adapter(name, revision)
    if adapter is not None:
        return _load_adapted(name, adapter, adapter_base, trust_remote_code)
    if adapter_base is not None:
        remedy = f"is for adapters (peft), and {name} is a whole model; leave it out"
        raise UserError(SETTING, adapter_base, remedy)
    return _load_whole(name, revision, trust_remote_code)


def _load_stored(
    address: str,
    revision: str | None,
    trust_remote_code: bool,
    adapter_base: str | None,
) -> Pretrained:
    """Load a model in a store, after its files were brought here; errors have its `address`."""
    if revision is not None:
        remedy = f"is for a name on the hub, and {address} is in a store; leave it out"
        raise UserError("model.revision", revision, remedy)
    source = open_model(address)
    directory = str(source.fetch())
    try:
        pretrained = load_pretrained(directory, None, trust_remote_code, adapter_base)
    except UserError as error:
        value = address if error.value == directory else error.value
        raise UserError(error.field, value, error.remedy) from error
    return replace(pretrained, source=source)


def _find_adapter(name: str, revision: str | None) -> AdapterFiles | None:
    """Find the adapters called `name`, a directory or a name on the hub; None: it is a model."""
    if Path(name).is_dir():
        return read_adapter(Path(name))
    directory = find_adapter_on_hub(name, revision)
    return read_adapter(directory) if directory else None


def _load_adapted(
    name: str,
    adapter: AdapterFiles,
    adapter_base: str | None,
    trust_remote_code: bool,
) -> Pretrained:
    """Load the model under adapters, and merge them into it."""
    chosen, revision = adapter.choose_base(name, adapter_base)
    base, revision = split_hub_address(SETTING, chosen, revision)
    try:
        _check_directory(base)
        # peft loads adapters over a whole model only.
        with explain_failures(FIELD, base):
            if _find_adapter(base, revision):
                raise UserError(FIELD, base, STACKED)
        pretrained = _load_whole(base, revision, trust_remote_code)
    except UserError as error:
        raise UserError(FIELD, name, explain_base(base, error.remedy)) from error
    model, is_changed = merge_adapter(pretrained.model, adapter, name, base)
    tokenizer = pretrained.tokenizer
    # Whoever trained the adapters may have changed the chat template or the special tokens.
    if has_tokenizer(adapter.directory):
        with explain_failures(FIELD, name):
            tokenizer = _load_tokenizer(str(adapter.directory), None, trust_remote_code)
    adapted = Pretrained(
        model=model,
        tokenizer=tokenizer,
        directory=pretrained.directory,
        adapter_base=base,
        is_unchanged=not is_changed,
    )
    _check_special_tokens(name, adapted)
    return adapted


def _load_whole(name: str, revision: str | None, trust_remote_code: bool) -> Pretrained:
    """Load a model without adapters, and its tokenizer."""
    with explain_failures(FIELD, name):
        pretrained = _load(name, revision, trust_remote_code)
    if isinstance(pretrained, list):
        missing = ", ".join(pretrained[:3])
        remedy = f"its weights lack {missing}; use the config.json they came with"
        raise UserError(FIELD, name, remedy)
    _check_special_tokens(name, pretrained)
    _separate_heads(pretrained.model)
    return pretrained


def _load(name: str, revision: str | None, trust_remote_code: bool) -> Pretrained | list[str]:
    """Load what `load_pretrained` returns, or return the names of the weights that are missing."""
    from transformers import AutoModelForCausalLM

    tokenizer = _load_tokenizer(name, revision, trust_remote_code)
    model, information = AutoModelForCausalLM.from_pretrained(
        name,
        dtype="auto",
        output_loading_info=True,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    # transformers fills missing weights with random numbers.
    if information["missing_keys"]:
        return sorted(information["missing_keys"])
    directory = Path(name)
    if not directory.is_dir():
        directory = _fetch_companions(name, revision)
    return Pretrained(model, tokenizer, directory)


def _load_tokenizer(name: str, revision: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        name,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )


def _fetch_companions(name: str, revision: str | None) -> Path:
    """Fetch the files beside the weights of a model on the hub; return its directory in the cache,
    weights included.
    """
    from huggingface_hub import snapshot_download

    # The weights are in the cache already, and need not be looked up. Which of the other files go
    # into the checkpoint is decided by `formats/model_files.py: copy_companions`.
    ignored = [*WEIGHTS, CARD, ".*", "*/*"]
    return Path(snapshot_download(name, revision=revision, ignore_patterns=ignored))


def _check_special_tokens(name: str, pretrained: Pretrained) -> None:
    """Give a tokenizer without padding its end of sequence for that.

    Raises UserError: it has no usable end.
    """
    tokenizer = pretrained.tokenizer
    size = pretrained.model.config.get_text_config().vocab_size
    if tokenizer.eos_token_id is None:
        remedy = "its tokenizer has no eos_token; set one in tokenizer_config.json"
        raise UserError(FIELD, name, remedy)
    if tokenizer.eos_token_id >= size:
        remedy = (
            f"its tokenizer's eos_token {tokenizer.eos_token} has the id "
            f"{tokenizer.eos_token_id}, and its weights have embeddings for {size} ids only; use "
            "its own tokenizer, or add embeddings"
        )
        raise UserError(FIELD, name, remedy)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= size:
        tokenizer.pad_token = tokenizer.eos_token


def _separate_heads(model: Any) -> None:
    """Say in the configuration that the output layer has weights of its own, where it says it
    shares the embeddings'.

    transformers loads both matrices of such a model and uses both. Others would tie them and
    compute otherwise.
    """
    import torch

    head = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    if head is None or head.weight is embeddings.weight:
        return
    for config in (model.config, model.config.get_text_config()):
        if config.tie_word_embeddings and not torch.equal(head.weight, embeddings.weight):
            config.tie_word_embeddings = False


def _check_directory(model: str) -> None:
    """Refuse an incomplete model directory; transformers would look on the hub for missing files."""
    path = Path(model)
    if not path.is_dir():
        if is_path(model):
            raise UserError(FIELD, model, "no such directory")
        return
    # A directory of adapters has no whole model; their base is checked by itself.
    if read_adapter(path):
        return
    missing = list_missing_parts(path)
    if missing:
        raise UserError(FIELD, model, missing[0])
