"""Sessions as the gateway sees them, and how many a namespace may have."""

import hashlib
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError

from tuneloop.core.artifacts import dump_canonical_json
from tuneloop.core.component import from_validation
from tuneloop.core.errors import UserError
from tuneloop.inference.refusals import Refused
from tuneloop.sharing.places import STORED

Phase = Literal["queued", "starting", "running", "ending", "ended", "failed"]
ALIVE = ("queued", "starting", "running")
"""What can be asked for something. One that is ``ending`` cannot, yet takes its part of the quota until it is gone."""
LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


class Wanted(BaseModel, frozen=True, extra="forbid"):
    """What a session is to be. Equal keys of one caller with equal bodies are one session."""

    namespace: str = Field("", pattern=rf"^({LABEL})?$", description="empty: the caller's own")
    accelerators: int = Field(0, ge=0, le=1024)
    display_name: str = Field("", max_length=200)
    turns: str = Field("", pattern=rf"^({LABEL})?$", description="a group to take turns with; empty: it takes none")
    policy: Literal["fifo", "lrs"] = Field("fifo", description="of the group's turns")
    patience: float = Field(30.0, ge=1, le=86400, description="of the group's turns, in seconds")

    def flags(self, place: str) -> list[str]:
        """Return the flags of a worker that takes turns with the groups below `place`."""
        if not self.turns:
            return []
        group = f"{place}/{STORED}/{self.turns}"
        return ["--turns", group, "--policy", self.policy, "--patience", f"{self.patience:g}"]

    def name(self, caller: str, key: str) -> str:
        """Return the session's name, by SHA-256 over namespace, caller and key."""
        identity = dump_canonical_json([self.namespace, caller, key]).encode()
        return f"session-{hashlib.sha256(identity).hexdigest()[:10]}"


@dataclass(frozen=True)
class Session:
    """A session that exists. `address` is ``host:port`` of its worker, once there is one; `key` is the secret that the
    worker requires; `reason` says why the session ended, or does not run yet."""

    name: str
    wanted: Wanted
    creator: str
    created: str
    phase: Phase
    artifacts: str
    key: str
    address: str | None = None
    reason: str = ""

    @property
    def id(self) -> str:
        return f"{self.wanted.namespace}.{self.name}"

    def public(self) -> dict[str, Any]:
        """Return what its users see."""
        fields = {name: getattr(self, name) for name in ("id", "phase", "reason", "creator", "created", "artifacts")}
        return {**fields, **self.wanted.model_dump()}


class Quota(BaseModel, frozen=True, extra="forbid"):
    """What a namespace may have at a time, and use on one day (UTC)."""

    sessions: int = Field(4, ge=0)
    accelerators: int = Field(0, ge=0)
    bytes_per_day: int = Field(10**11, ge=0, description="of bodies, for each caller whose token is the namespace's")
    tokens_per_day: int = Field(10**9, ge=0, description="that its sessions train on, read and sample")
    store: str = Field("", description="URL that artifacts lie below; empty: --store")

    def check(self, wanted: Wanted, others: list[Session]) -> None:
        """Refuse one more where it does not fit, as `check_quota`."""
        alive = [session for session in others if session.phase in (*ALIVE, "ending")]
        have, who = sum(session.wanted.accelerators for session in alive), f"namespace {wanted.namespace!r}"
        check_quota(who, "sessions", len(alive), 1, self.sessions)
        check_quota(who, "accelerators", have, wanted.accelerators, self.accelerators)


def check_quota(who: str, what: str, used: int, more: int, limit: float) -> None:
    """Refuse `more` of `what` with 429 where it does not fit."""
    if more and used + more > limit:
        remedy = "wait for tomorrow (UTC)" if what.endswith("_per_day") else "end a session"
        told = f"{who} has {used} of {limit:.0f} {what}, and {more:d} more asked"
        raise Refused(429, f"quota: {told}; {remedy}, or ask for a larger quota")


class Meter(Counter[str]):
    """What each of several has used today (UTC)."""

    day = 0

    def count(self, name: str, more: int = 0) -> int:
        """Count `more` that `name` has used, and return all."""
        if self.day != (today := int(time.time() // 86400)):
            self.day = today
            self.clear()
        if more:  # else nothing is written: other threads only look
            self[name] = max(0, self[name] + more)  # what is given back may be of yesterday
        return self[name]


class WorkerPod(BaseModel, frozen=True, extra="forbid"):
    """What a session's pod is made of."""

    image: str = "tuneloop/rollout:dev"
    cpu: str = "500m"
    memory: str = "4Gi"
    request: str = Field("", description="memory that it requests, less than `memory`, its limit; empty: as much")
    accelerator: str = Field("nvidia.com/gpu", description="the resource that accelerators are counted in")
    queue: str = Field("tuneloop", description="Kueue LocalQueue of sessions with accelerators; empty: not queued")
    idle: int = Field(3600, ge=1, description="seconds without a request after which a session ends itself")
    grace: int = Field(120, ge=20, description="seconds that it has for what it accepted, once its pod is to end")


class Settings(BaseModel, frozen=True, extra="forbid"):
    """The gateway's own, from one file that is read anew at each creation."""

    default: Quota = Quota()
    namespaces: dict[str, Quota] = {}
    worker: WorkerPod = WorkerPod()

    def quota(self, namespace: str) -> Quota:
        return self.namespaces.get(namespace, self.default)


def read_settings(path: Path | None) -> Settings:
    """Read settings from a YAML file, or return the defaults. Raises UserError if it is unreadable or invalid."""
    try:
        return Settings.model_validate(yaml.safe_load(path.read_text()) or {}) if path else Settings()
    except ValidationError as error:
        raise from_validation(error, prefix=f"{path}: ") from None
    except (OSError, yaml.YAMLError) as error:
        raise UserError("--config", str(path), f"cannot be read ({error})") from error
