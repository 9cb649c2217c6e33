"""Arguments and options that several commands have; extensions use them, too
(`extensions/*/command.py`).

An option with a default has it where it is used: ``store: STORE = "runs"``. That default is also
written in `runs/records.py: ROOT`, `cli/show.py: format_store_option`, `cli/author.py:
plan_pipeline` and `argo/template.py`. `doctor.py`, `kfp.py` and the extension `fleets` have
arguments of their own under some of these names.
"""

from pathlib import Path
from typing import Annotated

import typer

PIPELINE = Annotated[
    str, typer.Argument(help="A pipeline's name (in ./pipelines or shipped), or its file's path.")
]
CONFIG = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        "-c",
        help="YAML file with the configuration; other keys keep their defaults. Repeatable: later "
        "files win, key by key.",
    ),
]
# Texts, as the value is YAML: its type is known only when the pipeline is.
SETS = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one key, as in a.b=1; the value is YAML. Repeatable.",
    ),
]
OUTPUT = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write here, not to standard output.")
]
RUN = Annotated[str, typer.Argument(help="The run's name.")]
STORE = Annotated[
    str,
    typer.Option(help="Where artifacts are stored: a path, or a prefix in s3://, gs:// or az://."),
]
REMOTE_STORE = Annotated[
    str, typer.Option("--store", help="Where pods store artifacts: s3://bucket/runs.")
]
# Unlike a run on this machine it has no default name: that would start a run at each call.
SUBMITTED = Annotated[
    str, typer.Option("--run", help="Name of the run; the same name again resumes an ended run.")
]
SCHEDULE = Annotated[str, typer.Argument(help="Of the schedule.")]
STAGE = Annotated[
    str | None, typer.Argument(help="A stage's name in the graph, as `status` shows it.")
]
FOLLOW = Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run ends.")]
# Not the default: what was deleted cannot be made again without the devices of the run.
DELETE = Annotated[
    bool, typer.Option("--delete", help="Delete; without it, only list what would be deleted.")
]
DRY_RUN = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be created, as YAML, without a cluster.")
]
PRIORITY = Annotated[
    str | None, typer.Option("--priority", help="WorkloadPriorityClass of queued stages.")
]
# Only estimates are ignored: what is certain to fail is refused all the same.
IGNORE_LIMITS = Annotated[
    bool,
    typer.Option(
        "--ignore-limits",
        help="Start although an estimate says that memory or the store's room is too small.",
    ),
]
# Tables are for people: their columns may change, and messages in them are cut.
JSON = Annotated[
    bool,
    typer.Option("--json", help="For programs: nothing is cut; the keys are in docs/commands.md."),
]
# Without a default here, as the one for Argo and the one for KFP differ.
NAMESPACE = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the runs.")]
# For commands that read a store: without it they ask no cluster.
CLUSTER_NAMESPACE = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Namespace of runs on a cluster; default: none."),
]
CONTEXT = Annotated[
    str | None,
    typer.Option("--context", help="Context of the kubeconfig; default: the current one."),
]
# Without an environment variable: it would make every run one of KFP.
KFP = Annotated[
    str | None,
    typer.Option("--kfp", metavar="URL", help="URL of Kubeflow Pipelines' API for runs on it."),
]
