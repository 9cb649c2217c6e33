"""Sessions as the gateway sees them, and how many a namespace may have.

The gateway reads and counts these (`app.py`), `jobs.py` and `processes.py` make them; workers know
their own session alone.
"""

import hashlib
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, Field, ValidationError

from tuneloop.core.artifacts import dump_canonical_json
from tuneloop.core.component import convert_validation_error
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.inference.refusals import Refused
from tuneloop.sharing.lease_storage import STORED_LEASES

Phase = Literal["queued", "starting", "running", "ending", "ended", "failed"]
"""How a session stands, as `jobs.py: _phase` and `processes.py: Processes._look` find it. Requests
to a session in a phase that is not in `ALIVE` are refused with 410, and a phase that uses no quota
is named in `Quota.check`."""
ALIVE = ("queued", "starting", "running")
"""Phases in which a session exists. One that is ``ending`` accepts no requests, but uses quota
until it is gone."""
LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
"""Matches a name that Kubernetes accepts for a label (RFC 1123)."""
DAY_S = 86400
"""Seconds of a day: quotas are counted from midnight UTC on (`Meter`)."""


class SessionRequest(BaseModel, frozen=True, extra="forbid"):
    """The request for a session.

    It is also stored, as an annotation of the session's Job (`jobs.py`), and read back with an
    unknown field refused: fields may be added with a default, and none may be removed while Jobs
    of an earlier release run. What Tinker's client may set is listed in `app.py`
    (`tinker_session`). Requests of one caller with the same idempotency key and equal bodies refer
    to one session.
    """

    namespace: str = Field("", pattern=rf"^({LABEL})?$", description="empty: the caller's own")
    accelerators: int = Field(0, ge=0, le=1024)
    display_name: str = Field("", max_length=200)
    lease_group: str = Field(
        "",
        pattern=rf"^({LABEL})?$",
        description="a group that shares devices, one at a time; empty: none",
    )
    policy: Literal["fifo", "lrs"] = Field("fifo", description="which waiter of the group is next")
    patience: float = Field(30.0, ge=1, le=86400, description="the group's patience, in seconds")

    def flags(self, folder: str) -> list[str]:
        """Return the flags of a worker that leases the devices of a group below `folder`, a URL.

        `worker.py: _parse` reads them. Fields without a flag here are unknown to the worker.
        """
        if not self.lease_group:
            return []
        group = f"{folder}/{STORED_LEASES}/{self.lease_group}"
        return ["--lease", group, "--policy", self.policy, "--patience", f"{self.patience:g}"]

    def name(self, caller: str, key: str) -> str:
        """Return the session's name, by SHA-256 over namespace, caller and key."""
        # The name of a Job has at most 63 characters, so the key is not part of it.
        identity = dump_canonical_json([self.namespace, caller, key]).encode()
        return f"session-{hashlib.sha256(identity).hexdigest()[:10]}"


@dataclass(frozen=True)
class Session:
    """An existing session.

    Attributes:
        creator: the user who created it.
        created: when, in ISO 8601.
        artifacts: the URL that its checkpoints lie below.
        secret: what its worker requires of callers.
        address: ``host:port`` of its worker, once it runs.
        reason: why it ended, or does not run yet.
    """

    name: str
    request: SessionRequest
    creator: str
    created: str
    phase: Phase
    artifacts: str
    secret: str
    address: str | None = None
    reason: str = ""

    @property
    def id(self) -> str:
        return f"{self.request.namespace}.{self.name}"

    def public(self) -> JsonObject:
        """Return the fields that users see."""
        fields = {
            "id": self.id,
            "phase": self.phase,
            "reason": self.reason,
            "creator": self.creator,
            "created": self.created,
            "artifacts": self.artifacts,
        }
        return fields | self.request.model_dump()


class Quota(BaseModel, frozen=True, extra="forbid"):
    """The limits of a namespace: what it may have at a time, and use on one day (UTC)."""

    sessions: int = Field(4, ge=0)
    accelerators: int = Field(0, ge=0)
    bytes_per_day: int = Field(
        10**11,
        ge=0,
        description="bytes of bodies, for each caller of the namespace",
    )
    tokens_per_day: int = Field(
        10**9,
        ge=0,
        description="tokens that its sessions train on, read and sample",
    )
    store: str = Field("", description="URL that artifacts lie below; empty: --store")

    def check(self, request: SessionRequest, sessions: list[Session]) -> None:
        """Refuse another session that exceeds the quota, as `check_quota` does."""
        # A session that is ending has its devices until its pod is gone.
        existing = [session for session in sessions if session.phase not in ("ended", "failed")]
        accelerators = sum(session.request.accelerators for session in existing)
        owner = f"namespace {request.namespace!r}"
        check_quota(owner, "sessions", len(existing), 1, self.sessions)
        check_quota(owner, "accelerators", accelerators, request.accelerators, self.accelerators)


def check_quota(owner: str, resource: str, used: int, requested: int, limit: float) -> None:
    """Refuse with 429 what would exceed the `limit` of a resource."""
    if requested and used + requested > limit:
        remedy = "wait for tomorrow (UTC)" if resource.endswith("_per_day") else "end a session"
        use = f"{owner} has {used} of {limit:.0f} {resource}, and {requested:d} more requested"
        raise Refused(429, f"quota: {use}; {remedy}, or ask for a larger quota")


class Meter(Counter[str]):
    """Counts what each of several names has used today (UTC)."""

    day = 0

    def count(self, name: str, amount: int = 0) -> int:
        """Add `amount` to the use of `name`, and return its total."""
        today = int(time.time() // DAY_S)
        if self.day != today:
            self.day = today
            self.clear()
        # Without an amount no use is written, as other threads read; but also a read begins a new
        # day, on which `app.py` relies.
        if amount:
            # A refund may belong to yesterday.
            self[name] = max(0, self[name] + amount)
        return self[name]


# Read by `jobs.py: Jobs._job`; with ``--local`` only `idle` and `grace` have an effect.
class WorkerPod(BaseModel, frozen=True, extra="forbid"):
    """The settings of a session's pod."""

    image: str = "tuneloop/rollout:dev"
    cpu: str = "500m"
    memory: str = "4Gi"
    request: str = Field(
        "", description="memory request, less than `memory`, the limit; empty: the same"
    )
    accelerator: str = Field("nvidia.com/gpu", description="the resource name of accelerators")
    queue: str = Field(
        "tuneloop", description="Kueue LocalQueue of sessions with accelerators; empty: not queued"
    )
    idle: int = Field(
        3600,
        ge=1,
        description="seconds without a request after which a session ends itself",
    )
    grace: int = Field(
        120,
        ge=20,
        description="seconds for its accepted requests when its pod is told to end",
    )


class SamplerServer(BaseModel, frozen=True, extra="forbid"):
    """The vLLM server from which all sessions of a namespace sample: a Deployment of
    manifests/components/sampler.
    """

    deployment: str = Field(
        "tuneloop-sampler", description="in the session's namespace, with a Service of its name"
    )
    idle: int = Field(
        600,
        ge=60,
        description="seconds without a request until it is scaled to zero",
    )
    engine_args: JsonObject = Field(
        {}, description="vLLM's options, with --local; else the Deployment has them"
    )


class Settings(BaseModel, frozen=True, extra="forbid"):
    """The gateway's settings, from a file that is read again for each new session.

    On a cluster the file is in the ConfigMap of `manifests/components/gateway/gateway.yaml`. An
    unknown key is refused: a gateway whose file has a key that is removed here does not start.
    """

    default: Quota = Quota()
    namespaces: dict[str, Quota] = {}
    worker: WorkerPod = WorkerPod()
    sampler: SamplerServer | None = Field(
        None,
        description="read when the gateway starts; none: each session samples in its own process",
    )

    def quota(self, namespace: str) -> Quota:
        return self.namespaces.get(namespace, self.default)


def read_settings(path: Path | None) -> Settings:
    """Read settings from a YAML file, or return the defaults.

    Raises UserError if the file is unreadable or invalid.
    """
    if path is None:
        return Settings()
    try:
        # An empty file has no mapping, and no settings.
        return Settings.model_validate(yaml.safe_load(path.read_text()) or {})
    except ValidationError as error:
        raise convert_validation_error(error, prefix=f"{path}: ") from None
    except (OSError, yaml.YAMLError) as error:
        raise UserError("--config", str(path), f"cannot be read ({error})") from error
