"""A pipeline's settings as YAML with comments: a file to save, edit and give to ``run -c``.

Headings of sections are YAML; each setting is a line that is commented out, with its default. So a
file as printed changes nothing: a default that follows the base model or the machine goes on to
follow it. To set one, delete the ``#`` before its key; its indentation is right then.

`tuneloop schema` prints it, of what `config/listing.py` describes. The tests save such a file,
delete each mark, and limit the number of settings (`tests/unit/config/test_commented_yaml.py`).
"""

import textwrap
from collections.abc import Iterator

from tuneloop.config.listing import Section, Setting

FIRST = (
    "base_model",
    "data.source",
    "data.rewards",
    "sft.learning_rate",
    "sft.epochs",
    "sft.max_length",
    "preference.algorithm.kind",
    "preference.algorithm.beta",
    "preference.learning_rate",
    "preference.epochs",
    "preference.max_length",
    "loop.iterations",
    "loop.target_reward",
    "rollout.prompts_per_iteration",
    "rollout.n",
    "rollout.max_tokens",
    "rollout.environment",
    "update.algorithm.kind",
    "update.algorithm.beta",
    "update.learning_rate",
    "engine.kind",
    "trainer.lora",
    "cluster.trainer.gpus",
    "cluster.sampler.gpus",
    "trainer.per_device_train_batch_size",
    "trainer.gradient_checkpointing",
    "trainer.dtype",
    "evaluate.limit",
    "processes",
    "seed",
    "model.revision",
    "model.chat_template",
    "data.train",
    "data.eval",
    "data.system",
    "cluster.images",
    "cluster.queue",
    "export.adapter",
)
"""The settings that people set first, by rank; a pipeline shows those that it has.

Those that may differ between the runs of a compiled pipeline are also its parameters on KFP
(`kfp/form.py`): an entry changes the form in KFP's UI and each compiled file. A key that no
pipeline has fails a test here, and is left out there.
"""
FIRST_COUNT = 20
"""How many of them are at the top of the file; the form of KFP takes all."""
LAST = ("cluster", "kfp")
"""Sections of the platform, which come after those of the training."""
INDENT = "  "


def format_settings(pipeline: str, described: Section, key: str = "") -> str | None:
    """Format the settings of a pipeline, or of the section or setting `key` alone.

    Returns:
        YAML; None where `key` is none of the pipeline's keys.
    """
    if not key:
        lines = list(format_introduction(pipeline, described))
        lines += format_all(described)
        return "\n".join(lines) + "\n"
    item = described.find(key)
    # The caller refuses the key, as it knows the name of the argument.
    if item is None:
        return None
    parents = key.split(".")[:-1]
    # The headings above make it a part of a file that `run -c` takes.
    lines = [f"{INDENT * depth}{name}:" for depth, name in enumerate(parents)]
    lines += format_item(item, len(parents), is_whole=True)
    return "\n".join(lines) + "\n"


def format_introduction(pipeline: str, described: Section) -> Iterator[str]:
    """Yield the lines at the top: how to use the file, and the settings that people set first."""
    yield f"# Settings of the pipeline {pipeline}: a file for `tuneloop run {pipeline} -c FILE`."
    yield "# Each line that begins with `#` and a key shows a default: delete the `#` to set it."
    yield "# Defaults are the demo's; what a pretrained model has instead is said at the setting."
    yield "#"
    yield "# Set first by most people (as in `--set KEY=VALUE`):"
    settings = {setting.key: setting for setting in described.list_settings()}
    first = [settings[key] for key in FIRST if key in settings][:FIRST_COUNT]
    pairs = [f"{setting.key}={setting.default}" for setting in first]
    width = max(map(len, pairs), default=0)
    for pair, setting in zip(pairs, first, strict=True):
        # The whole text is above the setting itself.
        text = textwrap.shorten(setting.text, 100, placeholder=" …")
        yield f"#   {pair:{width}}  {text}".rstrip()


def format_all(described: Section) -> Iterator[str]:
    """Yield the lines of all settings: those of no section first, those of the platform last."""
    yield ""
    for setting in described.settings:
        yield from format_item(setting, 0)
    # The order is stable: within each rank it is the configuration's own.
    for section in sorted(described.sections, key=lambda section: section.name in LAST):
        yield ""
        yield from format_item(section, 0)


def format_item(
    item: Setting | Section, depth: int, *, is_inactive: bool = False, is_whole: bool = False
) -> Iterator[str]:
    """Yield the lines of a setting, or of a section with all that it has.

    Args:
        item: the setting or the section.
        depth: how many sections it is in.
        is_inactive: whether one of these is left out by default, so that its heading is commented
            out.
        is_whole: whether to write out what a whole file only names: a section with the settings of
            another one (`Section.twin`) or that most people leave out (`is_rare`), and settings
            that have their value from another section (`Setting.origin`).
    """
    margin = INDENT * depth
    if isinstance(item, Setting):
        if item.meaning:
            yield f"{margin}# {item.meaning}"
        yield f"{margin}#{item.name}: {item.default}".rstrip()
        return
    # Below a heading that is left out nothing may be active.
    is_inactive = is_inactive or item.optional_default is not None
    yield f"{margin}# {describe_heading(item)}"
    yield f"{margin}{'#' if is_inactive else ''}{item.name}:"
    if not is_whole and (item.twin or is_rare(item)):
        return
    inherited = [setting.name for setting in item.settings if setting.origin and not is_whole]
    for inner in item.items:
        if inner.name not in inherited:
            yield from format_item(inner, depth + 1, is_inactive=is_inactive)
    if inherited:
        origins = {setting.origin.partition(".")[0]: None for setting in item.settings}
        names = " and ".join(filter(None, origins))
        yield f"{margin}{INDENT}# as in {names}, unless set here: {', '.join(inherited)}"


def is_rare(section: Section) -> bool:
    """Return whether most people leave a section out, so that its settings are printed where they
    are asked for."""
    return section.optional_default == "null" and section.key not in FIRST


def describe_heading(section: Section) -> str:
    """Return the text above a section's heading.

    The last line holds for the only section that may be null and is not by default, `sft` of the
    pipeline ``dpo``, which `config/rules.py: _skip_tuning` leaves out. A second one needs a text of
    its own.
    """
    if section.twin:
        return f"{section.text}; settings and defaults are those of {section.twin}"
    if section.optional_default is None:
        return section.text
    if section.optional_default == "null":
        hint = f"; `tuneloop schema PIPELINE {section.key}` prints its settings"
        return f"{section.text}; left out by default{hint if is_rare(section) else ''}"
    return f"{section.text}; null leaves it out, and so does a pretrained model by default"
