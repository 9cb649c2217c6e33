"""``tuneloop store``: directories in a store, such as base models and data.

`formats/uploads.py` sends the files; `formats/stored_models.py` reads those of a base model.
"""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Directories in a store: base models, data.")


@app.command("put")
def put_directory(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="A model's directory, or any other.")
    ],
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="Where its files go: a path, or a prefix in s3://, gs:// or az://."
        ),
    ],
) -> None:
    """Put a directory into a store. The same again goes on after an interruption.

    Files are compared by their SHA-256: what is there is not sent again, and other content is never
    overwritten. `SHA256SUMS` is written last; whoever reads the directory verifies it by that.
    """
    from tuneloop.formats.stored_models import CONFIGS, open_model
    from tuneloop.formats.uploads import open_upload
    from tuneloop.runs.summary import format_size

    upload = open_upload(directory, url)
    upload.run()
    address = upload.store.url
    count = len(upload.files)
    size = format_size(upload.size)
    sent = len(upload.sent)
    outcome = f"{sent} sent, {count - sent} were there" if sent else "all were there"
    typer.echo(f"{address}: {count} files, {size}: {outcome}")
    if not upload.files.keys().isdisjoint(CONFIGS):
        model = open_model(address)
        typer.echo(f"base_model={model.reference}")
