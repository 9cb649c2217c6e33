"""How new weights reach an engine: the section `weights` of `engine`, of several kinds.

Servers *load* checkpoints, *pull* published versions, or are given each version by a *refit*.

Code outside asks the engine (`config/engines.py`): `Engine.publication` says whether versions are
published, and `EndpointEngine.options` hands a fleet's address to the stages. A further kind is a
class here, a `Tag` in `OwnWeights` or `FleetWeights` below, and whatever `publication`,
`follows_newest` and `options` of the engines say of it; `config/choices.py: choose_colocation` asks
for ``load`` by name.

A field of these classes reaches stages only where somebody passes it on: `encoding` and
`has_base_version` by the file of a pipeline, `url` by `LoopPipelineConfig.published`, `fleet` by
`EndpointEngine.options`. Tests: `tests/unit/config/test_config.py`,
`tests/unit/inference/test_endpoint.py`.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from tuneloop.config.sections import expand_text, make_kind_reader
from tuneloop.inference.fleet import open_fleet
from tuneloop.weights.codec import Encoding


class LoadCheckpoints(BaseModel, frozen=True, extra="forbid"):
    """The servers load each checkpoint from the store, in place."""

    kind: Literal["load"] = Field("load", description="servers load checkpoints from the store")


class PullVersions(BaseModel, frozen=True, extra="forbid"):
    """Each version is published as a delta to the one before, and the servers pull it."""

    kind: Literal["pull"] = Field("pull", description="each version is a delta, which servers pull")
    url: str | None = Field(
        None, description="URL to publish versions below; default: <store>/<run>/weights"
    )
    encoding: Encoding = Field(
        "gap8-xor", description="format of deltas; slime and SGLang read xor and overwrite, too"
    )

    @property
    def has_base_version(self) -> bool:
        """Whether the base model is published, as version 0."""
        return True


class PullByFleet(PullVersions, frozen=True, extra="forbid"):
    """Servers of yours pull the versions, and may have the base model already."""

    fleet_has_base: bool = Field(
        False, description="publish no version 0: replicas start on the base model (--base)"
    )

    @property
    def has_base_version(self) -> bool:
        return not self.fleet_has_base


class RefitFleet(BaseModel, frozen=True, extra="forbid"):
    """Servers that do not pull are given each version before it is sampled from."""

    kind: Literal["refit"] = Field("refit", description="each server is given a version before use")
    fleet: str = Field(
        description="the servers: http://host:port,…, dns://name:port, service://name.namespace, "
        "dynamo://name.namespace"
    )

    @model_validator(mode="after")
    def _check_fleet(self) -> Self:
        open_fleet(self.fleet)
        return self


OwnWeights = Annotated[
    Annotated[LoadCheckpoints, Tag("load")] | Annotated[PullVersions, Tag("pull")],
    Discriminator(make_kind_reader("load", ("load", "pull"))),
    BeforeValidator(expand_text),
]
"""How weights reach servers that the run starts."""
FleetWeights = Annotated[
    Annotated[PullByFleet, Tag("pull")] | Annotated[RefitFleet, Tag("refit")],
    Discriminator(make_kind_reader("pull", ("pull", "refit"))),
    BeforeValidator(expand_text),
]
"""How weights reach servers of yours."""
