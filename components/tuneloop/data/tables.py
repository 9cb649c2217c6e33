"""Rows on their way through `data_prep`: table by table, examined here or by Ray, into Parquet."""

import itertools
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from tuneloop.core.errors import Retryable, UserError
from tuneloop.rewards.proof import prove_answers

Examine = Callable[..., pa.Table]
Preparation = Literal["here", "ray"]
ROWS = 1024
"""Rows in a table, which is a row group of Parquet: this many are in memory at once."""
WINDOW = 64
"""Tables in one Ray Data job."""
TEXTS = (
    "id",
    "prompt",
    "answer",
    "reward",
    "metadata",
    "solution",
    "completion",
    "chosen",
    "rejected",
)
SCHEMA = pa.schema([*((name, pa.string()) for name in TEXTS), ("chat", pa.bool_())])
EXAMINED = pa.schema([*SCHEMA, ("trouble", pa.string()), ("host", pa.string())])


def build_tables(rows: Iterable[Mapping[str, Any]]) -> Iterator[pa.Table]:
    """Yield `rows` as tables of `SCHEMA`."""
    rows = iter(rows)
    while part := list(itertools.islice(rows, ROWS)):
        yield pa.Table.from_pylist(part, schema=SCHEMA)


def examine_answers(
    table: pa.Table,
    rewards: Mapping[str, float],
    timeout_s: float,
    progress: Callable[[int], None] | None = None,
) -> pa.Table:
    """Return `table` with ``host``, where it was examined, and ``trouble``: what is wrong with a gold answer according
    to `rewards` (which may be empty); null if nothing is. `progress`: see `score_all`."""
    rows = table.to_pylist()
    found: list[str | None] = [None] * len(rows)
    if rewards:
        asked = [i for i, row in enumerate(rows) if row["answer"] is not None]
        troubles = prove_answers([rows[i] for i in asked], rewards, timeout_s, progress)
        for i, trouble in zip(asked, troubles):
            found[i] = None if trouble is None else f"{rows[i]['id']}: {trouble}"
    hosts = [socket.gethostname()] * len(rows)
    added = {"trouble": pa.array(found, pa.string()), "host": pa.array(hosts, pa.string())}
    return pa.table({**{name: table[name] for name in SCHEMA.names}, **added}, schema=EXAMINED)


@contextmanager
def ray_data() -> Iterator[Callable[[Iterable[pa.Table], Examine], Iterator[pa.Table]]]:
    """Yield a `map` of tables, in order, by Ray Data: on the cluster that ``RAY_ADDRESS`` names (in a RayJob, its own),
    else on this machine. Raises UserError: Ray is not installed; Retryable: the cluster does not answer, or fails."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UserError(
            "data_prep.preparation", "ray", f"needs {error.name}; pip install 'tuneloop[ray]'"
        ) from error
    address = os.environ.get("RAY_ADDRESS", "local")
    heard = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(
            address, log_to_driver=False, include_dashboard=False if address == "local" else None
        )
    except ConnectionError as error:
        raise Retryable(f"data_prep: Ray at {address} does not answer ({error})") from error
    except Exception as error:
        if (
            type(error) is not Exception
        ):  # which is what Ray raises where its own processes are not up after 30 s
            raise
        raise Retryable(f"data_prep: Ray did not start ({error})") from error
    with suppress(ValueError):  # not the main thread: Ray changed no handlers
        for number, handler in heard.items():
            signal.signal(number, handler)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False

    def mapped(given: Iterable[pa.Table], function: Examine) -> Iterator[pa.Table]:
        given = iter(given)
        while window := list(itertools.islice(given, WINDOW)):
            data = ray.data.from_arrow(window).map_batches(
                function, batch_size=None, batch_format="pyarrow"
            )
            yield from data.iter_batches(
                batch_size=ROWS, batch_format="pyarrow"
            )  # as they came, whatever its blocks

    try:
        yield mapped
    except ray.exceptions.RayTaskError:  # what the function raised
        raise
    except ray.exceptions.RayError as error:
        raise Retryable(f"data_prep: Ray: {str(error).splitlines()[0]}") from error
    finally:
        ray.shutdown()


def write_tables(path: Path, tables: Iterable[pa.Table], schema: pa.Schema, optional: bool) -> None:
    """Write the columns of `schema` to Parquet, a row group a table; if `optional`, no file where there is no table."""
    tables = iter(tables)
    first = next(tables, None if optional else schema.empty_table())
    if first is None:
        return
    with pq.ParquetWriter(path, schema) as out:
        for table in itertools.chain([first] if first.num_rows else [], tables):
            out.write_table(table.select(schema.names).cast(schema).combine_chunks())
