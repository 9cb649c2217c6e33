"""The settings that the form of Kubeflow Pipelines' UI asks for, each a parameter of the pipeline.

A user may set for each run what decides neither the graph nor its pods, which are fixed when the
pipeline is compiled. The form has the settings that people set first
(`config.commented_yaml.FIRST`), or those of ``kfp.parameters``; KFP sorts it by name. One more
parameter, `OTHERS`, takes all other settings by their keys: each further parameter would make the
object larger in which Argo keeps the state of all tasks.

The first task of a run checks all of them (`tuneloop.kfp.configure`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tuneloop.config.commented_yaml import FIRST
from tuneloop.config.followed import SECTION_SUFFIX
from tuneloop.config.listing import Setting, describe_settings, list_choices, list_types
from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.config.pipeline import RUN_SETTINGS, PipelineConfig
from tuneloop.core.errors import UserError
from tuneloop.kfp.task_plan import is_written_out

OTHERS = "settings"
"""The parameter for the settings that the form does not ask for."""
BASE_MODEL = "base_model"
LOOP = "loop"
"""The section of a loop's settings. Where each stage of each iteration is a task, only its setting
``target_reward`` may differ between runs (`is_open`)."""
SCALARS = (bool, int, float, str)
"""The types of settings that the form can ask for."""
NO_PARAMETER = "cannot be a parameter of Kubeflow Pipelines"


@dataclass(frozen=True)
class Parameter:
    """A setting that is a parameter of the pipeline.

    Attributes:
        key: of the setting, as in ``rollout.max_tokens``.
        type: of its value: bool, int, float or str.
        default: its value when the pipeline is compiled.
        description: what it means.
    """

    key: str
    type: type
    default: Any
    description: str

    @property
    def name(self) -> str:
        """The name in KFP, where it must be one of Python: ``rollout_max_tokens``."""
        return self.key.replace(".", "_")


def list_parameters(config: PipelineConfig) -> list[Parameter]:
    """List the parameters of a pipeline: those of ``kfp.parameters``, or else the settings that
    people set first, as far as each can be one.

    Raises:
        UserError: a setting of ``kfp.parameters`` cannot be a parameter.
    """
    described = describe_settings(type(config))
    parameters: dict[str, Parameter] = {}
    for key in config.kfp.parameters or FIRST:
        setting = described.find(key)
        problem = find_problem(config, key, setting)
        if problem:
            # What people set first is the same list for all pipelines, and not all have all of it.
            if config.kfp.parameters:
                raise UserError("kfp.parameters", key, f"{problem}: leave it out")
            continue
        assert isinstance(setting, Setting), "a section would be a problem"
        value, info = read_setting(config, key)
        kind = find_scalar_type(info)
        assert kind, "any other type would be a problem"
        parameter = Parameter(key, kind, value, setting.meaning)
        parameters[parameter.name] = parameter
    return list(parameters.values())


def find_problem(config: PipelineConfig, key: str, setting: object) -> str:
    """Return why a setting cannot be a parameter; empty if it can.

    Args:
        config: settings of the pipeline.
        key: of the setting.
        setting: what is described under this key.
    """
    if not isinstance(setting, Setting):
        return "is no setting of this pipeline"
    if not is_open(config, key):
        return f"{NO_PARAMETER}: it decides the graph or its pods"
    value, info = read_setting(config, key)
    if find_scalar_type(info) is None:
        return f"{NO_PARAMETER}, which are one number, text or truth value"
    # The form refuses to start a run while a field without a default is empty.
    if value is None:
        return f"{NO_PARAMETER} while it has no value"
    return ""


def is_open(config: PipelineConfig, key: str) -> bool:
    """Return whether a setting may differ between runs of one compiled pipeline.

    It may if it is a parameter of stages, or is of the loop and one task runs the iterations. The
    sections of stages are known by the name of their class, which ends with `SECTION_SUFFIX`
    (`config/followed.py`); no setting of a section of another name gets into the form. What a value
    does to the graph is checked again in the run, by another list: `configure.py: describe_shape`.
    """
    section, _, name = key.partition(".")
    # Settings of no section are of the platform, unless stages take them as their parameters.
    if not name:
        return section == BASE_MODEL or section in RUN_SETTINGS
    if section == LOOP and isinstance(config, LoopPipelineConfig):
        return name == "target_reward" or not is_written_out(config)
    # A section that is left out has no settings.
    return type(dict(config).get(section)).__name__.endswith(SECTION_SUFFIX)


def read_setting(config: BaseModel, key: str) -> tuple[Any, FieldInfo | None]:
    """Return the value of a setting and its field; two times None where its section is left out,
    or is of a kind that lacks it.
    """
    *path, name = key.split(".")
    section: Any = config
    for part in path:
        section = dict(section).get(part)
        if not isinstance(section, BaseModel):
            return None, None
    info = type(section).model_fields.get(name)
    return dict(section).get(name), info


def find_scalar_type(info: FieldInfo | None) -> type | None:
    """Return the one type of a field's values that are not None; None if it has none of `SCALARS`,
    or several.
    """
    if info is None:
        return None
    types = set(list_types(info.annotation))
    types |= {type(choice) for choice in list_choices(info.annotation)}
    kind = types.pop() if len(types) == 1 else None
    return kind if kind in SCALARS else None


def list_fixed(config: PipelineConfig) -> Iterator[str]:
    """Yield the settings that decide the graph or its pods, for the description of a compiled
    pipeline: a section as a whole (``cluster.*``), another setting with its value.
    """
    for name, value in config:
        if isinstance(value, BaseModel):
            is_stage = type(value).__name__.endswith(SECTION_SUFFIX)
            if not is_stage and (name != LOOP or not is_open(config, "loop.iterations")):
                yield f"{name}.*"
        elif value is not None and not is_open(config, name):
            yield f"{name}={value}"
