"""Measure a policy by tasks of lm-eval, EleutherAI's Language Model Evaluation Harness, which runs as it is."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from tuneloop.core import plugins
from tuneloop.core.artifacts import Artifact, hash_files
from tuneloop.core.component import UNTRACKED, Input, Options, Results, Stage, component
from tuneloop.core.errors import Unavailable, UserError, find_disk_error
from tuneloop.core.hub import is_unreachable
from tuneloop.formats.facts import VersionFacts
from tuneloop.formats.rollouts import SAMPLES, TEXTS
from tuneloop.inference.proof import (
    WrongWeights,
    check_nearest_version,
    compare_with_canary,
    read_canary,
)


class LmEvalOptions(Options):
    """The tasks and how they are run; options that lm-eval has, too, have lm-eval's names."""

    tasks: list[str] = Field(
        min_length=1, description="names of tasks, groups or tags, of lm-eval or your own"
    )
    include_path: str | None = Field(
        None, description="folder of your tasks", json_schema_extra=UNTRACKED
    )
    metric: str | None = Field(
        None, description="metric of each task, as acc_norm; none: its first"
    )
    engine: Literal["transformers", "endpoint"] = Field(
        "transformers", description="in process, or an OpenAI API"
    )
    endpoint: str | None = Field(
        None, description="URL: http://host:8000/v1", json_schema_extra=UNTRACKED
    )
    model_args: dict[str, Any] = Field(
        {}, description="arguments of lm-eval's hf, or local-completions"
    )
    num_fewshot: int | None = Field(
        None, ge=0, description="examples in a prompt; none: as the task says"
    )
    limit: float | None = Field(
        None, gt=0, description="documents of each task; below 1: share of them"
    )
    apply_chat_template: bool = Field(False, description="use the policy's chat template")
    gen_kwargs: dict[str, Any] = Field({}, description="arguments of generation (temperature, …)")
    canary_tolerance: float | None = Field(None, gt=0, description="for a server, as of `rollout`")


def hash_own(params: Any) -> dict[str, Any]:
    """Return the digest of the files in `include_path`, to identify their contents."""
    if (own := params.include_path) and not Path(own).is_dir():
        raise UserError("--include-path", own, "is not a directory")
    return {"task_files": own and {k: f.digest for k, f in hash_files(Path(own)).items()}}


@component(
    "metrics",
    image="rollout",
    accelerator=True,
    role="evaluator",
    results={"score": float},
    identity=hash_own,
)
def evaluate_lm_eval(stage: Stage, policy: Input, *, options: LmEvalOptions) -> Results:
    """Run lm-eval's tasks on a checkpoint, with their own prompts and metrics, and lm-eval's own seeds.

    `score` is the mean of one metric of each task; a group with metrics of its own counts as one task. A server proves
    by the canary that it has this checkpoint. Raises UserError if lm-eval is not installed or refuses a task, metric or
    argument, or a server refuses or has another model. Raises Unavailable if server or hub do not answer."""
    if options.endpoint and options.engine != "endpoint":
        raise UserError("--endpoint", options.endpoint, "is for --engine endpoint")
    if find_spec("lm_eval") is None:
        raise UserError("package", "lm_eval", "is not installed; pip install 'tuneloop[lm-eval]'")
    import lm_eval.tasks
    from aiohttp import ClientError

    with (
        stage.timed("load"),
        name_errors("tasks", options.tasks, Exception),
    ):  # whatever their data and code raise
        loaded = (manager := lm_eval.tasks.TaskManager(include_path=options.include_path)).load(
            options.tasks
        )
        for name, task in loaded["tasks"].items():
            metrics = {f"{metric},none": 0 for metric in task.aggregation()}
            find_metrics(name, metrics, options.metric and options.metric.partition("/")[0])
    with stage.timed("load"), name_errors("model_args", options.model_args, TypeError, ValueError):
        model = open_model(policy, options)
    if options.engine == "endpoint":
        with (
            stage.timed("load"),
            name_errors("--endpoint", options.endpoint, Exception),
        ):  # whatever its answers lack
            stage.facts["canary"] = prove_server(model, policy, options.canary_tolerance)
    model.set_cache_hook(
        SimpleNamespace(add_partial=lambda *_: stage.check_stop())
    )  # called after every answer
    manager.load = lambda _: loaded  # once is enough
    how = options.model_dump(include={"num_fewshot", "limit", "apply_chat_template", "gen_kwargs"})
    away = name_errors("--endpoint", options.endpoint, OSError, ClientError)
    with stage.timed("evaluate"), name_errors("arguments", how, ValueError), away:
        told = lm_eval.simple_evaluate(model, tasks=options.tasks, task_manager=manager, **how)
    found = {
        name: each
        for name, said in told["results"].items()
        if (each := find_metrics(name, said, options.metric))
    }
    if others := [name for name in told["samples"] if name not in found]:
        raise UserError("tasks", others, "have no metric that is a number")
    inside = {
        child
        for name, children in told["group_subtasks"].items()
        if name in found
        for child in children
    }
    scores = [next(iter(found[name].values())) for name in found if name not in inside]
    rows = [
        row
        for name, samples in told["samples"].items()
        for row in list_samples(name, samples, found[name])
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SAMPLES), stage.out / "samples.parquet")
    at = VersionFacts.read(policy).version
    stage.metric(
        at, **{f"{name}/{key}": value for name in found for key, value in found[name].items()}
    )
    stage.facts.update(
        version=at,
        digest=policy.manifest.digest,
        engine=options.engine,
        lm_eval=lm_eval.__version__,
    )
    stage.facts["tasks"] = {
        name: {"samples": told["results"][name].get("sample_len"), **found[name]} for name in found
    }
    return {"score": sum(scores) / len(scores)}


def open_model(policy: Artifact, options: LmEvalOptions) -> Any:
    """Open lm-eval's own model of a checkpoint: in process, or of the server that has it."""
    from lm_eval.api.registry import get_model

    files = policy.part("model", "--policy", "give it a checkpoint")
    if options.engine == "transformers":
        return get_model("hf")(
            pretrained=str(files), **{"device": "", **options.model_args}
        )  # "": a GPU, if any
    if not (options.endpoint or "").startswith("http"):
        raise UserError(
            "--endpoint", options.endpoint, "is required: an OpenAI API, as http://host:8000/v1"
        )
    made = get_model("local-completions")
    plugins.check_variant_args(
        "lm-eval", made.__base__.__init__, options.model_args, first=1, prefix="model_args."
    )
    context = json.loads((files / "config.json").read_text()).get("max_position_embeddings", 2048)
    given = {
        "model": "tuneloop",
        "max_length": context,
        "tokenizer_backend": "huggingface",
        **options.model_args,
    }
    return made(base_url=f"{options.endpoint}/completions", tokenizer=str(files), **given)


def prove_server(model: Any, policy: Artifact, tolerance: float | None) -> dict[str, float]:
    """Prove that a server has the policy, by log-probabilities of its canary.

    Its API has no versions, so nothing else can be asked. Raises UserError where it has another.
    """
    canary = read_canary(policy)
    answer = model.model_call([canary.ids], generate=False)["choices"][0]
    logprobs = answer["logprobs"]["token_logprobs"][1 : len(canary.ids)]
    version = VersionFacts.read(policy).version
    try:
        proof = compare_with_canary("endpoint", version, logprobs, canary, tolerance)
        check_nearest_version("endpoint", version, proof)
    except WrongWeights as error:
        remedy = f"serves something else than {policy.url}: {error}"
        raise UserError("--endpoint", model.base_url, remedy) from error
    return proof.distances


@contextmanager
def name_errors(field: str, value: object, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into Unavailable if a service does not answer, and else into UserError."""
    try:
        yield
    except kinds as error:
        if isinstance(error, UserError) or find_disk_error(error):
            raise
        answer = getattr(error, "response", None)
        status = getattr(error, "status", 0) if answer is None else answer.status_code
        said = " ".join(str(error if answer is None else answer.text).split())[:300]
        if (
            status >= 500
            or status in (408, 429)
            or (is_unreachable(error) and "offline" not in said.lower())
        ):
            raise Unavailable(f"lm-eval: {field} {value}: {said}") from error
        raise UserError(field, value, f"lm-eval refuses it: {said}") from error


def find_metrics(name: str, said: Mapping[str, Any], wanted: str | None) -> dict[str, float]:
    """Find lm-eval's metrics of a task or group, as ``acc``, ``acc_stderr``, ``exact_match/strict-match``, the `wanted`
    one first. Raises UserError if it has only other metrics."""
    numbers = {
        key: float(number)
        for key, number in said.items()
        if "," in key and isinstance(number, int | float)
    }
    found = {key.removesuffix(",none").replace(",", "/"): number for key, number in numbers.items()}
    first = [key for key in found if wanted in (None, key, key.partition("/")[0])][:1]
    if found and not first:
        raise UserError("metric", wanted, f"is none of {name}, which has {', '.join(found)}")
    return {key: found[key] for key in [*first, *found]}


def list_samples(task: str, samples: Any, metrics: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Yield the question and the answer of each document, and its value in the first metric."""
    metric, _, kept = next(iter(metrics)).partition("/")
    for sample in (each for each in samples if each["filter"] == (kept or "none")):
        asked, said, answer = sample["arguments"], sample["filtered_resps"], sample["target"]
        if len(asked) > 1:  # choices, each with its log-probability
            answer = asked[answer][1] if isinstance(answer, int) and answer < len(asked) else answer
            said = [asked[max(range(len(asked)), key=lambda i: said[i][0])][1]]
        texts = map(str, (f"{task}/{sample['doc_id']}", asked[0][0], said[0], answer))
        score = float(sample[metric]) if isinstance(sample.get(metric), int | float) else None
        yield {
            **dict(zip(TEXTS, texts)),
            "score": score,
            "outcome": "unverifiable" if score is None else "score",
        }


if __name__ == "__main__":
    evaluate_lm_eval.main()
