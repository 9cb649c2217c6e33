"""The algorithm that a training stage is asked for: its class, its options, and what refuses them.

`policy_update` and `preference` declare their parameters by it, `config/algorithms.py` the section
of the settings. Algorithms themselves are in `tuneloop.algorithms`.

A stage calls its two parameters `algorithm` and `algorithm_args`, in this order: the check of the
options reads the name before them, and `training/backends/trl.py` and `argo/memory_estimate.py`
look for these names.
"""

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError, ValidationInfo

from tuneloop.algorithms._objective import PolicyGradient
from tuneloop.algorithms._preference import Preference
from tuneloop.core import plugins
from tuneloop.core.component import convert_validation_error
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject

Kind = TypeVar("Kind", bound=BaseModel)
REMEDIES: dict[type[BaseModel], str] = {
    PolicyGradient: "is not a policy gradient; preferences are for the stage preference",
    Preference: "learns from rewards, not from pairs; that is for the stage policy_update",
}
"""Kind of algorithm that a stage needs → what it says of one that is of another kind. A third kind
needs an entry.
"""


def find_algorithm(name: str, kind: type[Kind]) -> type[Kind]:
    """Find the class of the algorithm called `name`.

    Raises UserError where it is unknown, or of another kind.
    """
    algorithm = plugins.load_variant("algorithms", name, "Algorithm")
    if not (isinstance(algorithm, type) and issubclass(algorithm, kind)):
        raise UserError("algorithm", name, REMEDIES[kind])
    return algorithm


def open_algorithm(
    name: str,
    options: dict[str, Any],
    kind: type[Kind],
    prefix: str = "algorithm_args.",
) -> Kind:
    """Make the algorithm `name`.

    Raises UserError as `find_algorithm`, or with `prefix` before an option it refuses.
    """
    algorithm = find_algorithm(name, kind)
    try:
        return algorithm(**options)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "extra_forbidden":
            remedy = f"{name} has no such option; it has {', '.join(algorithm.model_fields)}"
            raise UserError(f"{prefix}{first['loc'][0]}", first["input"], remedy) from None
        raise convert_validation_error(error, prefix) from None


def list_stage_parameters(algorithm: BaseModel) -> JsonObject:
    """Return the parameters of a stage for a configuration's section `algorithm`
    (`tuneloop.config.algorithms`): the name, and the options that differ from their defaults.

    A default has no part in them: spelled out or not, it is the same parameter of the stage.
    """
    return {
        "algorithm": algorithm.model_dump()["kind"],
        "algorithm_args": algorithm.model_dump(exclude={"kind"}, exclude_defaults=True),
    }


def validate_kind(kind: type[BaseModel]) -> AfterValidator:
    """Return a validator that refuses shipped algorithms of another kind. Any other name passes:
    only the image of the stage need have that algorithm.
    """

    def check(name: str) -> str:
        if name in plugins.list_shipped_variants("algorithms"):
            try:
                find_algorithm(name, kind)
            except UserError as error:
                raise ValueError(error.remedy) from None
        return name

    return AfterValidator(check)


def _check_algorithm_args(options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """Refuse options that a shipped algorithm does not have."""
    # It is None if the name was refused already.
    name = info.data.get("algorithm")
    if name in plugins.list_shipped_variants("algorithms"):
        open_algorithm(name, options, BaseModel, "")
    return options


AlgorithmName = Annotated[str, plugins.validate_variant("algorithms")]
AlgorithmArgs = Annotated[
    dict[str, Any],
    AfterValidator(_check_algorithm_args),
    Field(description="the algorithm's own options", validate_default=True),
]
"""Options of the algorithm that the preceding parameter ``algorithm`` names."""
