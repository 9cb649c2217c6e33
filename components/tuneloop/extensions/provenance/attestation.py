"""Statements of what a version was made from: SLSA provenance, signed beside its files, and a
model card.

`commands.py` calls it for ``attest`` and ``push``, after the audit of the run. What is stated is
read from manifests; nothing is computed again.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuneloop.core.artifacts import Artifact, dump_canonical_json
from tuneloop.core.errors import Unavailable, UserError
from tuneloop.core.http import is_transient
from tuneloop.extensions.provenance.signatures import CARD, SIGNATURE, check_files, sign_model
from tuneloop.runs.audit import compute_root, prove_chain
from tuneloop.runs.committed import Entry
from tuneloop.runs.run_record import Run
from tuneloop.runs.summary import describe_score
from tuneloop.runs.verification import find_state_entry
from tuneloop.stages.export import write_adapter
from tuneloop.training.fetch import fetch_artifact

PROGRAM = ("tuneloop", "code", "image", "packages", "device")
"""The entries of a manifest's provenance (`core/provenance.py`) that a statement has for each
artifact; null for one that an artifact lacks. docs/signing.md names them.
"""
BUILD_TYPE = "https://github.com/tuneloop/tuneloop/blob/main/docs/signing.md#build-type-v1"
"""The type of the statement. Signed statements have it: another meaning is another type
(`_describe_build`)."""
STALE_FILES = [
    "model.safetensors",
    "model.safetensors.index.json",
    f"model-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors",
    "adapter_model.safetensors",
    "adapter_config.json",
]
"""Files that an earlier push wrote at the top of a repository: a loader would prefer them to the
new weights. If weights or adapters are written under another name (`stages/export.py:
write_adapter`), it is added here.
"""
CARD_HEAD = Path(__file__).with_name("model_card.md").read_text()
CARD_BODY = Path(__file__).with_name("run_card.md").read_text()
"""Templates of `str.format`: a brace in their text is written twice. Their values are the arguments
in `_write_card`."""
CARD_SIGNATURES = """- `provenance.sigstore.json` names all that the model was made from; `model.sig` signs all files
  here. `tuneloop verify-model DIR --public-key FILE` proves both; `model_signing verify key` proves the files. After a
  change of this card sign again with `tuneloop attest`.
"""


def attest_version(
    run: Run,
    entry: Entry,
    output: Path | None,
    signer: Any,
    builder: str,
) -> Path:
    """Sign a checkpoint's files and a statement of their sources, and add a model card if there
    is none.

    Args:
        run: the run that made the checkpoint.
        entry: the checkpoint.
        output: the directory of the signed files, which may have them already; None:
            ``<run>-v<version>``.
        signer: from `tuneloop.extensions.provenance.signatures.open_signer`.
        builder: a URI that identifies who signs.

    Returns:
        The directory.

    Raises:
        UserError: the audit fails, or the directory has files besides the checkpoint's, a card and
            a license.
    """
    version = entry.version
    directory = (output or Path(f"{run.name}-v{version}")).absolute()
    evaluations = run.list_evaluations(entry)
    chain = prove_chain(run, version, entry, evaluations)
    # Files that are there already are only checked: a checkpoint may be large.
    if not directory.exists():
        fetch_artifact(f"{run.reference(entry)}#model", directory)
    digests: dict[str, str] = {}
    for name, file in entry.manifest.files.items():
        if name.startswith("model/"):
            digests[name.removeprefix("model/")] = file.sha256
    source = f"{entry.key} of {run.name}; name a directory that is not there yet"
    check_files(directory, digests, source, allow_unstated=True)
    # No signature exists until all files are signed.
    (directory / SIGNATURE).unlink(missing_ok=True)
    card = directory / CARD
    # A card that somebody has completed stays.
    if not card.exists():
        head = CARD_HEAD.format(title=directory.name)
        card.write_text(_write_card(run, entry, chain, head, CARD_SIGNATURES))
    predicate = _describe_build(run, entry, chain, evaluations, builder)
    sign_model(directory, digests, predicate, signer)
    return directory


def push_version(
    run: Run,
    entry: Entry,
    repo: str,
    private: bool | None,
    adapter: bool = False,
) -> str:
    """Upload a checkpoint's model and a card to a Hugging Face repository, in place of earlier
    weights.

    Args:
        run: the run that made the checkpoint.
        entry: the checkpoint.
        repo: the repository, ``OWNER/NAME``; it is made if missing.
        private: whether a new repository is private; None: as the owner's are.
        adapter: upload only its LoRA adapters, in peft's format.

    Returns:
        The URL of the commit.

    Raises:
        UserError: the audit fails, or the hub refuses.
        Unavailable: the hub is down.
    """
    try:
        from huggingface_hub import HfApi, errors
        from huggingface_hub.utils import validate_repo_id
    except ImportError as error:
        remedy = "is not installed: pip install 'tuneloop[train]'"
        raise UserError("push", error.name, remedy) from None
    try:
        validate_repo_id(repo)
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch) / "model"
            _write_push(run, entry, repo, directory, adapter=adapter)
            hub = HfApi()
            hub.create_repo(repo, private=private, exist_ok=True)
            commit = hub.upload_folder(
                repo_id=repo,
                folder_path=directory,
                delete_patterns=STALE_FILES,
                commit_message=f"Version {entry.version} of {run.name}",
            )
        return str(commit.commit_url)
    except Exception as error:
        message = " ".join(str(error).split())
        answer = getattr(error, "response", None)
        is_refused = answer is not None and not is_transient(answer.status_code)
        if is_refused or isinstance(error, errors.HFValidationError):
            remedy = f"{message}; write OWNER/NAME, and log in (`hf auth login`, or HF_TOKEN)"
            raise UserError("REPO", repo, remedy) from error
        # The hub's errors derive from httpx's or httpx2's, by its release.
        if any(parent.__name__ == "HTTPError" for parent in type(error).__mro__):
            raise Unavailable(f"hub: {repo}: {message}") from error
        raise


def _write_push(
    run: Run,
    entry: Entry,
    repo: str,
    directory: Path,
    *,
    adapter: bool,
) -> None:
    """Write what is uploaded to `repo` into a new directory, once the audit has passed."""
    audited = run.list_evaluations(entry)
    if adapter:
        # An adapter is computed from the trainer's state.
        state = find_state_entry(run, entry)
        audited += [state] if state else []
    chain = prove_chain(run, entry.version, entry, audited)
    if adapter:
        write_adapter(Artifact(run.reference(entry)), directory, repo)
        head = (directory / CARD).read_text()
    else:
        fetch_artifact(f"{run.reference(entry)}#model", directory)
        head = CARD_HEAD.format(title=repo)
    (directory / CARD).write_text(_write_card(run, entry, chain, head, ""))


def _describe_build(
    run: Run,
    entry: Entry,
    chain: Sequence[Entry],
    evaluations: Sequence[Entry],
    builder: str,
) -> dict[str, Any]:
    """Return the predicate of SLSA's provenance, version 1 (slsa.dev/spec/v1.0/provenance).

    `BUILD_TYPE` says what it means: a change of the meaning is a new type, with a section in
    docs/signing.md. `signatures.py: verify_model` reads the run, the version, the builder and the
    first of ``byproducts``, the root.

    Args:
        run: the run that made the checkpoint.
        entry: the checkpoint.
        chain: the checkpoint, its evaluations, and all that they were made from in the run.
        evaluations: those of the chain that are products of the build, not sources.
        builder: a URI that identifies who signs.
    """
    # An evaluation is made from the model, not the model from it.
    sources = [source for source in chain if source not in evaluations]
    dependencies = [
        _describe_reference(name, reference)
        for reference, name in _find_outside_inputs(run, sources).items()
    ]
    dependencies += [_describe_entry(run, source) for source in sources]
    parameters = {
        "run": run.name,
        "version": f"{entry.version}",
        # As text: a statement's numbers are doubles, which not all parameters are.
        "stages": {source.stage: dump_canonical_json(source.manifest.params) for source in sources},
    }
    root = compute_root(run).partition(":")[2]
    products: list[dict[str, Any]] = [{"name": "root", "digest": {"tuneloopRoot": root}}]
    products += [_describe_entry(run, evaluation) for evaluation in evaluations]
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": parameters,
            "resolvedDependencies": dependencies,
        },
        "runDetails": {
            "builder": {"id": builder},
            "byproducts": products,
        },
    }


def _find_outside_inputs(run: Run, entries: Sequence[Entry]) -> dict[str, str]:
    """Return reference → name of the inputs of these artifacts that the run does not hold."""
    # Each is listed once, also where several artifacts were made from it.
    names: dict[str, str] = {}
    for entry in entries:
        for name, reference in entry.manifest.inputs.items():
            if not run.find_entry(reference):
                names[reference] = name
    return names


def _describe_entry(run: Run, entry: Entry) -> dict[str, Any]:
    """Describe an artifact of the run as in-toto's ResourceDescriptor, with its results and its
    program.
    """
    descriptor = _describe_reference(entry.key, run.reference(entry))
    annotations: dict[str, Any] = {"results": entry.manifest.results}
    for name in PROGRAM:
        annotations[name] = entry.manifest.provenance.get(name)
    descriptor["annotations"] = annotations
    return descriptor


def _describe_reference(name: str, reference: str) -> dict[str, Any]:
    """Describe an artifact; its digest covers what its manifest states, while in-toto's `sha256`
    covers a file.
    """
    url, _, digest = reference.rpartition("@sha256:")
    return {
        "name": name,
        "uri": url,
        "digest": {"tuneloopArtifact": digest},
        "annotations": {},
    }


def _write_card(
    run: Run,
    entry: Entry,
    chain: Sequence[Entry],
    head: str,
    signatures: str,
) -> str:
    """Return a model card: a head, and what the run has committed of the model's making.

    Args:
        run: the run that made the model.
        entry: its checkpoint.
        chain: the artifacts that it was made from, and its evaluations.
        head: the beginning of the card, Markdown.
        signatures: what to say of signatures, Markdown; empty if there are none.
    """
    evaluations = ""
    for score in run.evaluations():
        if score.entry in chain:
            method = describe_score(run, score)
            evaluations += f"| {score.version} | {score.value:.4g} | {method} |\n"
    # A checkpoint of an older release may lack one.
    provenance = entry.manifest.provenance
    program = {name: provenance.get(name, "not stated") for name in PROGRAM}
    body = CARD_BODY.format(
        run=run,
        version=entry.version,
        made=entry.manifest,
        program=program,
        root=compute_root(run),
        prompts=_list_stage_parameters(chain, "prompts"),
        checkpoint=_list_stage_parameters(chain, "checkpoint"),
        evaluation=evaluations or "| none | | |\n",
        signatures=signatures,
    )
    return head + body


def _list_stage_parameters(chain: Sequence[Entry], kind: str) -> str:
    """Return a Markdown list of the stages that made artifacts of this kind, with their last
    parameters.
    """
    # A stage of the loop has an artifact in each iteration: the last one counts.
    last_entries = {entry.stage: entry for entry in chain if entry.manifest.kind == kind}
    lines = ""
    for entry in last_entries.values():
        values = {"rows": entry.manifest.facts.get("rows")} | entry.manifest.params
        texts = [
            f"{name} `{dump_canonical_json(value)}`"
            for name, value in values.items()
            if value is not None
        ]
        lines += f"- `{entry.stage}`: {', '.join(texts)}\n"
    return lines
