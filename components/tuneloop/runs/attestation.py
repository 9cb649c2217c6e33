"""Statements of what a version was made from: SLSA provenance, signed beside its files, and a model card."""

import tempfile
from pathlib import Path
from typing import Any

from tuneloop.core.artifacts import Artifact, dump_canonical_json
from tuneloop.core.errors import Unavailable, UserError
from tuneloop.core.http import is_transient
from tuneloop.runs.audit import compute_root, prove_chain
from tuneloop.runs.run_record import Entry, Run
from tuneloop.runs.signatures import CARD, SIGNATURE, check_files, sign_model
from tuneloop.runs.summary import describe_score
from tuneloop.runs.verification import find_state_entry
from tuneloop.stages.export import write_adapter
from tuneloop.training.fetch import fetch_artifact

SAID = ("tuneloop", "code", "image", "packages", "device")
BUILD = "https://github.com/tuneloop/tuneloop/blob/main/docs/signing.md#build-type-v1"
STALE = [
    "model.safetensors",
    "model.safetensors.index.json",
    f"model-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors",
]
STALE += ["adapter_model.safetensors", "adapter_config.json"]
"""Files that an earlier push wrote at the top of a repository: a loader would prefer them to the new weights."""
HEAD = Path(__file__).with_name("model_card.md").read_text()
SIGNATURES = """- `provenance.sigstore.json` names all that the model was made from; `model.sig` signs all files
  here. `tuneloop verify-model DIR --public-key FILE` proves both; `model_signing verify key` proves the files. After a
  change of this card sign again with `tuneloop attest`.
"""


def attest_version(run: Run, entry: Entry, output: Path | None, signer: Any, builder: str) -> Path:
    """Sign a checkpoint's files and a statement of their sources, add a model card if missing; return their directory.
    Raises UserError if the audit fails, or the directory has files besides the checkpoint's, a card and a license."""
    version = entry.manifest.facts["version"]
    directory = (output or Path(f"{run.name}-v{version}")).absolute()
    judged, chain = _prove(run, entry)
    if not directory.exists():
        fetch_artifact(f"{run.url}/{entry.key}@{entry.manifest.digest}#model", directory)
    files = {
        n.removeprefix("model/"): f.sha256
        for n, f in entry.manifest.files.items()
        if n.startswith("model/")
    }
    check_files(
        directory,
        files,
        f"{entry.key} of {run.name}; name a directory that is not there yet",
        beside=True,
    )
    (directory / SIGNATURE).unlink(
        missing_ok=True
    )  # no signature exists until all files are signed
    if not (directory / CARD).exists():
        (directory / CARD).write_text(
            _write_card(run, entry, chain, HEAD.format(title=directory.name), SIGNATURES)
        )
    sign_model(directory, files, _describe_build(run, entry, chain, judged, builder), signer)
    return directory


def push_version(
    run: Run, entry: Entry, repo: str, private: bool | None, adapter: bool = False
) -> str:
    """Upload a checkpoint's model, or its `adapter`, and a card to a Hugging Face repository, made if missing, in place
    of earlier weights; return the commit's URL. Raises UserError if audit or hub refuse, Unavailable if it is down."""
    try:
        from huggingface_hub import HfApi, errors
        from huggingface_hub.utils import validate_repo_id
    except ImportError as error:
        raise UserError(
            "push", error.name, "is not installed: pip install 'tuneloop[train]'"
        ) from None
    try:
        validate_repo_id(repo)
        state = find_state_entry(run, entry) if adapter else None
        _, chain = _prove(run, entry, *([state] if state else []))
        with tempfile.TemporaryDirectory() as place:
            directory, at = Path(place) / "model", f"{run.url}/{entry.key}@{entry.manifest.digest}"
            if adapter:
                write_adapter(Artifact(at), directory, repo)
            else:
                fetch_artifact(f"{at}#model", directory)
            head = (directory / CARD).read_text() if adapter else HEAD.format(title=repo)
            (directory / CARD).write_text(_write_card(run, entry, chain, head, ""))
            hub, said = HfApi(), f"Version {entry.manifest.facts['version']} of {run.name}"
            hub.create_repo(repo, private=private, exist_ok=True)
            done = hub.upload_folder(
                repo_id=repo, folder_path=directory, delete_patterns=STALE, commit_message=said
            )
        return str(done.commit_url)
    except Exception as error:
        answer, why = getattr(error, "response", None), " ".join(str(error).split())
        if isinstance(error, errors.HFValidationError) or (
            answer is not None and not is_transient(answer.status_code)
        ):
            remedy = f"{why}; write OWNER/NAME, and log in (`hf auth login`, or HF_TOKEN)"
            raise UserError("REPO", repo, remedy) from error
        if any(
            each.__name__ == "HTTPError" for each in type(error).__mro__
        ):  # httpx's or httpx2's, by its age
            raise Unavailable(f"hub: {repo}: {why}") from error
        raise


def _prove(run: Run, entry: Entry, *more: Entry) -> tuple[list[Entry], list[Entry]]:
    """Return a checkpoint's evaluations, and these with `more` and everything it was made from; all pass the audit."""
    judged = [each for each in run.with_role("evaluator") if run.policy_of(each) == entry]
    return judged, prove_chain(run, entry.manifest.facts["version"], entry, *judged, *more)


def _describe_build(
    run: Run, entry: Entry, chain: list[Entry], judged: list[Entry], builder: str
) -> dict[str, Any]:
    """Return the predicate of SLSA's provenance, version 1 (slsa.dev/spec/v1.0/provenance)."""
    made = [each for each in chain if each not in judged]
    outside = {
        ref: name
        for each in made
        for name, ref in each.manifest.inputs.items()
        if not run.maker(ref)
    }
    about = {
        each.key: _describe(each.key, f"{run.url}/{each.key}@{each.manifest.digest}", each)
        for each in chain
    }
    sources = [_describe(name, ref) for ref, name in outside.items()] + [
        about[each.key] for each in made
    ]
    # A statement's numbers are doubles, which not all parameters are.
    stages = {each.stage: dump_canonical_json(each.manifest.params) for each in made}
    asked = {"run": run.name, "version": f"{entry.manifest.facts['version']}", "stages": stages}
    root = {"name": "root", "digest": {"tuneloopRoot": compute_root(run).partition(":")[2]}}
    products = [root, *(about[each.key] for each in judged)]
    build = {"buildType": BUILD, "externalParameters": asked, "resolvedDependencies": sources}
    return {
        "buildDefinition": build,
        "runDetails": {"builder": {"id": builder}, "byproducts": products},
    }


def _describe(name: str, ref: str, made: Entry | None = None) -> dict[str, Any]:
    """Describe an artifact; its digest covers what its manifest states, while in-toto's `sha256` covers a file."""
    url, _, digest = ref.rpartition("@sha256:")
    said = (
        {"results": made.manifest.results, **{k: made.manifest.provenance.get(k) for k in SAID}}
        if made
        else {}
    )
    return {"name": name, "uri": url, "digest": {"tuneloopArtifact": digest}, "annotations": said}


def _write_card(run: Run, entry: Entry, chain: list[Entry], head: str, signatures: str) -> str:
    said = {"signatures": signatures, "prompts": "", "checkpoint": "", "root": compute_root(run)}
    for one in {each.stage: each for each in chain if each.manifest.kind in said}.values():
        told = {"rows": one.manifest.facts.get("rows"), **one.manifest.params}
        known = ", ".join(
            f"{name} `{dump_canonical_json(each)}`"
            for name, each in told.items()
            if each is not None
        )
        said[one.manifest.kind] += f"- `{one.stage}`: {known}\n"
    scores = [score for score in run.evaluations() if score.entry in chain]
    rows = [
        f"| {each.version} | {each.value:.4g} | {describe_score(run, each)} |\n" for each in scores
    ]
    card = Path(__file__).with_name("run_card.md").read_text()
    return head + card.format(
        run=run, made=entry.manifest, evaluation="".join(rows) or "| none | | |\n", **said
    )
