"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PIPELINE = Annotated[
    str, typer.Argument(help="A pipeline's name (in ./pipelines, or shipped), or the path of its file.")
]
CONFIG = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML file with the configuration; what it lacks keeps its default."),
]
SETS = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, as in a.b=1; the value is YAML. Repeatable."),
]
OUTPUT = Annotated[Path | None, typer.Option("--output", "-o", help="Write here, not to standard output.")]
RUN = Annotated[str, typer.Argument(help="The run's name.")]
STORE = Annotated[
    str, typer.Option("--store", help="Where artifacts lie: a path, or file://, s3://, gs://, az:// and a prefix.")
]
JSON = Annotated[bool, typer.Option("--json", help="For programs: nothing is cut; the keys are in docs/commands.md.")]
NAMESPACE = Annotated[str, typer.Option("--namespace", "-n", help="Where the runs live.")]
CONTEXT = Annotated[str | None, typer.Option("--context", help="Of the kubeconfig; default: the current one.")]
