"""Tables that are examined by Ray Data, on a cluster or on this machine.

For `data_prep` with ``preparation=ray``; `extensions/trainers/trainjob.py` makes the RayJob. Rows and their bytes
have to be those of ``preparation=here`` (`tests/local/test_preparation.py`): so the order is kept,
and what `data/tables.py: examine_answers` needs has to be picklable.
"""

import itertools
import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import pyarrow as pa

from tuneloop.core.errors import Retryable, UserError
from tuneloop.data.tables import ROWS, Examine

WINDOW = 64
"""Tables of `data/tables.py: ROWS` rows in one Ray Data job; so many are in this process's
memory."""

MapTables = Callable[[Iterable[pa.Table], Examine], Iterator[pa.Table]]
"""Yields what a function makes of each table, in their order."""


@contextmanager
def ray_data() -> Iterator[MapTables]:
    """Yield a `map` of tables, in order, by Ray Data: on the cluster that ``RAY_ADDRESS`` names (in
    a RayJob, its own), else on this machine. Raises UserError: Ray is not installed; Retryable: the
    cluster does not answer, or fails."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        remedy = f"needs {error.name}; pip install 'tuneloop[ray]'"
        raise UserError("data_prep.preparation", "ray", remedy) from error
    address = os.environ.get("RAY_ADDRESS", "local")
    # A cluster has a dashboard already; here it would only take time.
    dashboard = False if address == "local" else None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(address, log_to_driver=False, include_dashboard=dashboard)
    except ConnectionError as error:
        raise Retryable(f"data_prep: Ray at {address} does not answer ({error})") from error
    except Exception as error:
        # Ray raises a bare Exception where its own processes are not up after 30 s.
        if type(error) is not Exception:
            raise
        raise Retryable(f"data_prep: Ray did not start ({error})") from error
    # Ray replaces the handlers of signals, so that a stage that is stopped would not save what
    # resume needs. In a thread other than the main one Ray sets none, and Python allows none
    # (ValueError).
    with suppress(ValueError):
        for number, handler in handlers.items():
            signal.signal(number, handler)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False

    def map_tables(tables: Iterable[pa.Table], function: Examine) -> Iterator[pa.Table]:
        tables = iter(tables)
        while window := list(itertools.islice(tables, WINDOW)):
            data = ray.data.from_arrow(window).map_batches(
                function, batch_size=None, batch_format="pyarrow"
            )
            # Of `ROWS` rows each, whatever blocks Ray makes of them; `SplitWriter` cuts them anew.
            yield from data.iter_batches(batch_size=ROWS, batch_format="pyarrow")

    try:
        yield map_tables
    except ray.exceptions.RayTaskError:
        # The function's own error, which is a RayError, too.
        raise
    except ray.exceptions.RayError as error:
        raise Retryable(f"data_prep: Ray: {str(error).splitlines()[0]}") from error
    finally:
        ray.shutdown()
