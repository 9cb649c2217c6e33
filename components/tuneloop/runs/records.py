"""The record of a run that was started on this machine, and the rules for the names of runs."""

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
SCHEDULE_LENGTH = 31
"""The maximum length of a schedule's name; the names of its runs are nine characters longer."""
DIGITS = 8
"""The length of the prompts' digest in the name of a schedule's run."""
NAME = re.compile(r"^(?!sessions$)[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$")
"""Pattern of a run's name. Below a store's ``sessions`` a gateway keeps the sessions of its clients."""


class Record(BaseModel, frozen=True):
    """The pipeline, configuration and store with which a run was started on this machine."""

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
    """Return the directory of a run's local state."""
    return (local_path(store) or Path(ROOT).absolute()) / name


def write_record(record: Record, workflow: str, replaced: Record | None = None) -> None:
    """Write configuration, workflow and then the record of a new run. Raises UserError for a bad or taken name."""
    check_name(record.run)
    place = Store(str(get_run_directory(record.run, record.store)))
    if replaced:
        place.delete("run.json")
    place.put("config.yaml", yaml.safe_dump(record.config, sort_keys=False).encode())
    place.put("workflow.yaml", workflow.encode())
    try:
        place.create(
            "run.json", dump_checked_json(record.model_dump(mode="json"), f"{record.run}/run.json")
        )
    except Conflict:
        raise UserError(
            "--run", record.run, "was started by another process just now; choose another name"
        ) from None


def check_name(name: str, field: str = "--run") -> None:
    """Raise UserError unless `name` can name a run: it becomes part of names in Kubernetes."""
    if not NAME.match(name):
        remedy = "use at most 40 lower-case letters, digits and dashes, a letter or digit at the ends; not 'sessions'"
        raise UserError(field, name, remedy)


def check_schedule_name(name: str) -> None:
    """Raise UserError unless `name` can name a schedule; the names of its runs are longer."""
    check_name(name, "--name")
    if len(name) > SCHEDULE_LENGTH:
        remedy = f"is too long for a schedule, since its runs extend it: at most {SCHEDULE_LENGTH} characters"
        raise UserError("--name", name, remedy)


def read_record(name: str, store: str) -> Record | None:
    """Read the record of the run `name`, if it was started on this machine."""
    check_name(name)
    place = get_run_directory(name, store)
    told = load_checked_json(
        Store(str(place)).get("run.json"), f"{name}/run.json", str(place.parent), "restore it"
    )
    try:
        return Record.model_validate(told) if told else None
    except ValidationError as error:
        raise Corrupt("run", f"{place}/run.json", "is not a run's record; restore it") from error


def list_runs(store: str = ROOT) -> list[str]:
    """List the runs below `store` that were started here, also damaged ones; in an object store, everybody's runs."""
    here = {path.parent.name for path in get_run_directory("x", store).parent.glob("*/run.json")}
    if local_path(store) is None:  # the local state of all object stores' runs is in one folder
        here = {name for name in here if NAME.match(name) and _is_of(name, store)} | {
            *Store(store).parts()
        }
    return sorted(name for name in here if NAME.match(name))


def _is_of(name: str, store: str) -> bool:
    try:
        record = read_record(name, store)
    except Corrupt:
        return True
    return record is not None and record.store == normalize_url(store)


def read_records(store: str = ROOT) -> list[Record]:
    """Read the records of the runs below `store`, oldest first. Raises Corrupt where one is damaged."""
    found = (read_record(name, store) for name in list_runs(store))
    return sorted((record for record in found if record), key=lambda r: r.created)


def list_leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every setting; an empty section counts as a setting."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from list_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def find_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """List the dotted keys in which two configurations differ."""
    a, b = dict(list_leaves(ours)), dict(list_leaves(theirs))
    return sorted(
        key
        for key in {*a, *b}
        if dump_canonical_json(a.get(key)) != dump_canonical_json(b.get(key))
    )
