"""What is read of a base model in a store before a run: the configuration files, and the headers of
the weights.

They are written to a directory that looks like the model's to whoever reads names, sizes, JSON and
headers. Weights and tokenizers in it are holes of the right size: a reader of anything else in them
gets zeros and no error. `config/model_facts.py` and `planning/` read the directory.

`tests/unit/planning/test_model_references.py` tests it.
"""

import contextlib
import functools
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tuneloop.core import cache
from tuneloop.core.artifacts import DIGEST
from tuneloop.core.errors import NoKeys, Retryable, UserError
from tuneloop.core.store import local_path
from tuneloop.formats.stored_models import FIELD, RUN, StoredModel, open_model
from tuneloop.weights.layout import build_blame, parse_header

PREVIEWS = "previews"
"""The directory of previews below the cache (`core/cache.py`). A preview is made once for a digest:
after a change of what is read, those of earlier releases are still used, so give it another name
then."""
KEPT = 64
"""The previews that are kept, those used last. The limit of the cache does not count them: a file of
weights is a hole that is as long as the weights."""
READ = (".json", ".jinja")
"""Ends of the names of files that are copied whole. Of ``.safetensors`` the header is copied; of
all other files only the name and the size."""
LARGEST = 1 << 20
"""Bytes of the largest file that is copied. A larger one, mostly ``tokenizer.json``, is a hole."""
READERS = 8
"""Files that are read at a time."""


ADDRESSES: dict[str, str] = {}
"""Reference ``run://…`` that settings keep as it is → what it names now (`remember_address`)."""


@dataclass(frozen=True)
class Preview:
    """What is known of a base model in a store.

    Attributes:
        directory: has what is read of it; None: it cannot be read.
        problem: why it cannot be read.
        holds_in_pods: whether `problem` is the same for pods. It is not where this machine lacks
            keys or a network, or the model is a file of this machine.
    """

    directory: Path | None
    problem: UserError | None = None
    holds_in_pods: bool = False


# A command reads the facts of its model several times, and asks the store once. A failure is
# remembered, too, for as long as the process lives.
@functools.lru_cache(maxsize=16)
def preview_model(reference: str) -> Preview:
    """Read what is known of the base model in a store that `reference` names."""
    address = ADDRESSES.get(reference, reference)
    if address.startswith(RUN):
        remedy = "is read where the store is known: by `plan --store` and whatever starts runs"
        return Preview(None, UserError(FIELD, reference, remedy))
    try:
        model = open_model(address)
        return Preview(write_preview(model))
    except NoKeys as error:
        return Preview(None, UserError(FIELD, reference, error.mistake.remedy))
    except Retryable as error:
        return Preview(None, UserError(FIELD, reference, f"cannot be read from here ({error})"))
    except UserError as error:
        # The store refuses these keys or this network; there may be others where the run will be.
        is_refusal = error.field == "store" and "NoSuchBucket" not in error.remedy
        is_local = reference.startswith("file:")
        problem = error
        if error.field == "store":
            problem = UserError(FIELD, reference, error.remedy)
        return Preview(None, problem, holds_in_pods=not (is_refusal or is_local))


def remember_address(reference: str, address: str) -> None:
    """Let `preview_model` read a reference ``run://…`` at the address that it has in the store of
    the run."""
    if ADDRESSES.get(reference) != address:
        ADDRESSES[reference] = address
        preview_model.cache_clear()


def write_preview(model: StoredModel) -> Path:
    """Write the preview of a model into the cache, and return its directory.

    Raises Corrupt: a file with weights has no header, or another one than its size says.
    """
    root = local_path(model.url)
    if root is not None:
        return root / model.folder
    name = model.digest.removeprefix(f"{DIGEST}:")
    directory = cache.open_directory(PREVIEWS) / name
    if directory.is_dir():
        # From now on it is the most recently used one.
        os.utime(directory)
        return directory
    directory.parent.mkdir(exist_ok=True)
    _delete_old_previews(directory.parent)
    partial = Path(tempfile.mkdtemp(prefix=f".{name[:8]}-", dir=directory.parent))
    write = functools.partial(_write_file, model, partial)
    try:
        with ThreadPoolExecutor(READERS) as pool:
            # The list raises what a thread has raised.
            list(pool.map(write, model.files))
        partial.rename(directory)
    except OSError:
        # Another process was faster.
        if not directory.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def _delete_old_previews(directory: Path) -> None:
    """Delete all previews but those used last, with what killed processes have left."""
    by_use: list[tuple[float, Path]] = []
    for preview in directory.iterdir():
        # Another process may delete it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            by_use.append((preview.stat().st_mtime, preview))
    # The one that is written next makes the number whole.
    for _, preview in sorted(by_use)[: 1 - KEPT]:
        shutil.rmtree(preview, ignore_errors=True)


def _write_file(model: StoredModel, directory: Path, name: str) -> None:
    """Write what is read of one file of a model; the other bytes are a hole."""
    size = model.files[name].size
    data = b""
    if name.endswith(".safetensors"):
        with model.open(name) as file:
            blame = build_blame(f"{model.url}/{name}")
            parse_header(file, name, blame)
            file.seek(0)
            # Eight bytes have the length of the header that follows them.
            length = file.read(8)
            data = length + file.read(int.from_bytes(length, "little"))
    elif name.endswith(READ) and size <= LARGEST:
        with model.open(name) as file:
            data = file.read()
    path = directory / name
    path.write_bytes(data)
    os.truncate(path, size)
