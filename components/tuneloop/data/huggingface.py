"""Data sets of the Hugging Face hub by name or ``hf://``, or a local folder: files, or as ``save_to_disk`` wrote it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import xxhash

from tuneloop.core.artifacts import file_digest
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.hub import split_hub_address
from tuneloop.core.seeds import derive_seed
from tuneloop.data import Columns, Example, Splits


def load_splits(
    n: int,
    seed: int,
    *,
    path: str,
    name: str | None = None,
    revision: str | None = None,
    train_split: str = "train",
    eval_split: str | None = None,
    sft_split: str | None = None,
    preference_split: str | None = None,
    columns: Columns = Columns(),  # noqa: B008
    sft_columns: Columns | None = None,
    preference_columns: Columns | None = None,
    shuffle: bool = True,
) -> Splits:
    """Load rows of a data set; without splits of their own, `eval` and `sft` are cut from `train_split`. Raises
    UserError: no such data set, split or column, or no rows; Retryable: the hub does not answer.

    Args:
        name: its configuration, as ``datasets.load_dataset`` calls it.
        revision: branch, tag or commit on the hub.
        train_split: split of the training prompts; slices such as ``train[:1000]`` work for what is loaded by name.
        sft_columns, preference_columns: the same for demonstrations and pairs; None: as `columns`.
    """
    own = {"sft": sft_columns or columns, "preference": preference_columns or columns}

    def stream(part: str, split: str) -> Iterator[Example]:
        rows, order = (
            load_split(path, name, revision, split),
            derive_seed(seed, split) if shuffle else None,
        )
        return own.get(part, columns).examples(rows, f"{path}[{split}]", order)

    places = {
        "train": train_split,
        "eval": eval_split,
        "sft": sft_split,
        "preference": preference_split,
    }
    return Splits.of_tables(places, stream)


def digest_source(arguments: Mapping[str, Any]) -> str | None:
    """Digest the names and bytes of all files in a local folder; None for a name on the hub, which `revision` pins."""
    folder = Path(str(arguments.get("path")))
    if not folder.is_dir():
        return None
    state = xxhash.xxh3_128()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        state.update(f"{file.relative_to(folder)}:{file_digest(file)}\n".encode())
    return state.hexdigest()


def load_split(path: str, name: str | None, revision: str | None, split: str) -> Any:
    """Load one split as a ``datasets.Dataset``. Raises as `load_splits`."""
    path, revision = split_hub_address("source_args.path", path, revision)
    try:
        if not any(
            (Path(path) / marker).exists() for marker in ("dataset_info.json", "dataset_dict.json")
        ):
            return datasets.load_dataset(path, name, revision=revision, split=split)
        saved = datasets.load_from_disk(path)
    except (FileNotFoundError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).split("\n")[0]
        if isinstance(error.__cause__, ConnectionError) or "reach" in reason:
            raise Retryable(f"data: {path}: the hub does not answer ({reason})") from error
        raise UserError(
            "source_args.path", path, f"cannot be loaded ({reason}); check name and split"
        ) from error
    except (ConnectionError, TimeoutError) as error:
        raise Retryable(f"data: {path}: the hub does not answer ({str(error)[:200]})") from error
    if isinstance(saved, datasets.Dataset):
        return saved
    if split not in saved:
        raise UserError(
            "source_args.train_split", split, f"no such split in {path}; it has: {', '.join(saved)}"
        )
    return saved[split]
