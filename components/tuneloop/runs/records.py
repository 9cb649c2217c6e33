"""The record of a run that was started on this machine, and the rules for the names of runs.

`tuneloop run` and `fork` write a record before they start anything (`cli/execute.py`); all commands
that take the name of a run read it. A run that was submitted to a cluster has none.
"""

import re
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError

import tuneloop
from tuneloop.core.artifacts import dump_canonical_json, dump_checked_json, load_checked_json
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import Conflict, Store, local_path, normalize_url

ROOT = "runs"
RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"
WORKFLOW_FILE = "workflow.yaml"
REPORT_FILE = "report.html"
"""Files in the directory of a run (`get_run_directory`)."""
SCHEDULE_LENGTH = 31
"""The maximum length of a schedule's name; the names of its runs are nine characters longer: a dash
and `DIGITS`. Of a schedule by the time: `cluster/schedule.py: LONGEST_TIMED`."""
DIGITS = 8
"""The length of the prompts' digest in the name of a schedule's run."""
NAME = re.compile(r"^(?!sessions$)[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$")
"""Pattern of a run's name. Below a store's ``sessions`` a gateway keeps the sessions of its
clients. A folder of a store that has another name is no run: `list_runs`, the page and the trackers
pass over it. The maximum of 40 characters is part of `SCHEDULE_LENGTH` and `LONGEST_TIMED`.
"""


class Record(BaseModel, frozen=True):
    """The pipeline, configuration and store with which a run was started on this machine.

    It is a file that later releases read: a field that is added needs a default. The page shows
    `config` (`ui/static/run.js`).
    """

    format: int = 1
    id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    run: str
    pipeline: str
    path: str = Field(description="the pipeline's file")
    config: dict[str, Any]
    store: str = Field(description="URL; artifacts lie at <store>/<run>/…")
    workflow: str = Field("", description="xxh3-128 of workflow.yaml")
    created: float = Field(default_factory=time.time, description="Unix seconds")
    tuneloop: str = tuneloop.__version__


def get_run_directory(name: str, store: str) -> Path:
    """Return the directory of a run's local state: in the store if that is a directory, else in
    ``./runs``.
    """
    # An object store cannot hold the lock and the logs of an executor.
    root = local_path(store) or Path(ROOT).absolute()
    return root / name


def write_record(record: Record, workflow: str, replaced: Record | None = None) -> None:
    """Write configuration, workflow and then the record of a new run.

    Args:
        record: the new run's.
        workflow: the YAML that is executed.
        replaced: the record of a run of the same name that this one takes the place of.

    Raises:
        UserError: the name is bad or taken.
    """
    check_name(record.run)
    directory = Store(str(get_run_directory(record.run, record.store)))
    # Until the new record is written there is none: no reader joins the old one with new files.
    if replaced:
        directory.delete(RUN_FILE)
    config = yaml.safe_dump(record.config, sort_keys=False)
    directory.put(CONFIG_FILE, config.encode())
    directory.put(WORKFLOW_FILE, workflow.encode())
    # The record comes last: a run that has one is whole.
    data = dump_checked_json(
        record.model_dump(mode="json"),
        f"{record.run}/{RUN_FILE}",
    )
    try:
        directory.create(RUN_FILE, data)
    except Conflict:
        remedy = "was started by another process just now; choose another name"
        raise UserError("--run", record.run, remedy) from None


def check_name(name: str, field: str = "--run") -> None:
    """Raise UserError unless `name` can name a run: it becomes part of names in Kubernetes."""
    if not NAME.match(name):
        remedy = (
            "use at most 40 lower-case letters, digits and dashes, "
            "a letter or digit at the ends; not 'sessions'"
        )
        raise UserError(field, name, remedy)


def check_schedule_name(name: str) -> None:
    """Raise UserError unless `name` can name a schedule; the names of its runs are longer."""
    check_name(name, "--name")
    if len(name) > SCHEDULE_LENGTH:
        remedy = (
            "is too long for a schedule, since its runs extend it: "
            f"at most {SCHEDULE_LENGTH} characters"
        )
        raise UserError("--name", name, remedy)


def read_record(name: str, store: str) -> Record | None:
    """Read the record of the run `name`; None if it was not started on this machine.

    Raises:
        UserError: `name` cannot name a run.
        Corrupt: the record is damaged.
    """
    check_name(name)
    directory = get_run_directory(name, store)
    fields = load_checked_json(
        Store(str(directory)).get(RUN_FILE),
        f"{name}/{RUN_FILE}",
        str(directory.parent),
        "restore it",
    )
    if not fields:
        return None
    try:
        return Record.model_validate(fields)
    except ValidationError as error:
        remedy = "is not a run's record; restore it"
        raise Corrupt("run", f"{directory}/{RUN_FILE}", remedy) from error


def list_runs(store: str = ROOT) -> list[str]:
    """List the runs below `store` that were started here, also damaged ones; in an object store,
    everybody's runs.
    """
    directory = get_run_directory("x", store).parent
    names = {
        path.parent.name for path in directory.glob(f"*/{RUN_FILE}") if NAME.match(path.parent.name)
    }
    if local_path(store) is None:
        # The local state of the runs in all object stores is in one folder.
        names = {name for name in names if _lies_in(name, store)}
        names |= {name for name in Store(store).parts() if NAME.match(name)}
    return sorted(names)


def _lies_in(name: str, store: str) -> bool:
    """Return whether a run lies in `store`; a damaged record is taken to, so that somebody sees
    it.
    """
    try:
        record = read_record(name, store)
    except Corrupt:
        return True
    return record is not None and record.store == normalize_url(store)


def list_leaves(
    config: Mapping[str, Any],
    prefix: str = "",
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every setting; an empty section counts as a setting."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from list_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def find_differences(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
) -> list[str]:
    """List the dotted keys in which two configurations differ, sorted."""
    our_settings = dict(list_leaves(ours))
    their_settings = dict(list_leaves(theirs))
    # As JSON, since a configuration that was read from a file has lists where ours has tuples.
    return [
        key
        for key in sorted(our_settings.keys() | their_settings.keys())
        if dump_canonical_json(our_settings.get(key))
        != dump_canonical_json(their_settings.get(key))
    ]
