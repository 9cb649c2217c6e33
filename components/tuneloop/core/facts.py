"""Typed facts: what the manifests of one kind of artifact state, validated where they are read.

A stage leaves facts in `Stage.facts`, and the manifest keeps them as JSON. A reader names the facts
that it needs by a dataclass, and reads them by attribute::

    version = VersionFacts.read(policy).version
"""

from dataclasses import dataclass, fields
from typing import ClassVar, Self

from pydantic import ValidationError

from tuneloop.core.artifacts import Artifact, Manifest, dump_canonical_json, get_adapter
from tuneloop.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of one kind of artifact; a field without a default must be stated by the manifest.

    The classes are those of `formats/facts.py`, and `runs/prepared_data.py: PreparedData`. Types
    are strict: a whole number where a float is declared is accepted, a text where a number is
    declared is not. Facts that are no field are ignored: other readers, and other versions of
    tuneloop, have more.
    """

    source: ClassVar[str] = "the output of another stage"
    """What the user should give instead of an artifact that does not state these facts."""

    @classmethod
    def read(cls, artifact: Artifact | Manifest, flag: str = "artifact") -> Self:
        """Read the facts of an artifact.

        Args:
            artifact: an opened artifact, or its manifest.
            flag: how the user gave the artifact, for the error.

        Raises:
            UserError: a fact is missing, or is of another type. It names the artifact and the fact.
        """
        if isinstance(artifact, Manifest):
            manifest = artifact
            place = manifest.place or manifest.stage
        else:
            manifest = artifact.manifest
            place = artifact.url
        names = [field.name for field in fields(cls)]
        stated = {name: manifest.facts[name] for name in names if name in manifest.facts}
        try:
            # Only from JSON do strict types admit dictionaries for dataclasses.
            facts: Self = get_adapter(cls).validate_json(dump_canonical_json(stated), strict=True)
        except ValidationError as error:
            raise UserError(flag, place, f"{_describe(error)}; give {cls.source}") from None
        return facts


def _describe(error: ValidationError) -> str:
    """Describe the first wrong fact of a manifest."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"does not state its {name}"
    reason = first["msg"][:1].lower() + first["msg"][1:]
    return f"states {first['input']!r:.60} as its {name}, and {reason}"
