"""Measure a policy by tasks of lm-eval, EleutherAI's Language Model Evaluation Harness, which runs
as it is.

No shipped pipeline has it; docs/stages.md shows how a pipeline draws it. The tasks decide what is
asked, so that it reads no data of `data_prep`. Its result is `score`, and no `mean_reward`: it is
no point of the curve of rewards (`runs/run_record.py: Run.evaluations`), and `deploy_model` refuses
it.

It relies on parts of lm-eval that are no interface: the hook of the cache, the task manager's
`load`, the keys of results. `tests/extensions/evaluation/test_evaluate_lm_eval.py` runs lm-eval itself.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
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
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.formats.facts import VersionFacts
from tuneloop.formats.rollouts import SAMPLES, SAMPLES_FILE, TEXTS
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
    model_args: JsonObject = Field(
        {}, description="arguments of lm-eval's hf, or local-completions"
    )
    num_fewshot: int | None = Field(
        None, ge=0, description="examples in a prompt; none: as the task says"
    )
    limit: float | None = Field(
        None, gt=0, description="documents of each task; below 1: share of them"
    )
    apply_chat_template: bool = Field(False, description="use the policy's chat template")
    gen_kwargs: JsonObject = Field({}, description="arguments of generation (temperature, …)")
    canary_tolerance: float | None = Field(None, gt=0, description="for a server, as of `rollout`")


def hash_task_files(params: Any) -> JsonObject:
    """Return the digest of the files in `include_path`, to identify their contents."""
    folder = params.include_path
    if not folder:
        return {"task_files": folder}
    if not Path(folder).is_dir():
        raise UserError("--include-path", folder, "is not a directory")
    files = hash_files(Path(folder))
    return {"task_files": {name: file.digest for name, file in files.items()}}


@component(
    "metrics",
    image="rollout",
    accelerator=True,
    role="evaluator",
    results={"score": float},
    identity=hash_task_files,
)
def evaluate_lm_eval(stage: Stage, policy: Input, *, options: LmEvalOptions) -> Results:
    """Run lm-eval's tasks on a checkpoint, with their own prompts and metrics, and lm-eval's own
    seeds.

    `score` is the mean of one metric of each task; a group with metrics of its own counts as one
    task. A server proves by the canary that it has this checkpoint. Raises UserError if lm-eval is
    not installed or refuses a task, metric or argument, or a server refuses or has another model.
    Raises Unavailable if server or hub do not answer.
    """
    if options.endpoint and options.engine != "endpoint":
        raise UserError("--endpoint", options.endpoint, "is for --engine endpoint")
    if find_spec("lm_eval") is None:
        raise UserError("package", "lm_eval", "is not installed; pip install 'tuneloop[lm-eval]'")
    import lm_eval
    from aiohttp import ClientError

    with stage.timed("load"):
        manager, tasks = load_tasks(options)
        with name_errors("model_args", options.model_args, TypeError, ValueError):
            model = open_model(policy, options)
        if options.engine == "endpoint":
            # An answer may lack anything, and lm-eval reads it without a check.
            with name_errors("--endpoint", options.endpoint, Exception):
                stage.facts["canary"] = prove_server(model, policy, options.canary_tolerance)
    # This hook is called after every answer: the only place where a long run can be interrupted.
    model.set_cache_hook(SimpleNamespace(add_partial=lambda *_: stage.check_stop()))
    # lm-eval would load the tasks a second time.
    manager.load = lambda _: tasks
    arguments = options.model_dump(
        include={"num_fewshot", "limit", "apply_chat_template", "gen_kwargs"}
    )
    with (
        stage.timed("evaluate"),
        name_errors("arguments", arguments, ValueError),
        name_errors("--endpoint", options.endpoint, OSError, ClientError),
    ):
        evaluation = lm_eval.simple_evaluate(
            model, tasks=options.tasks, task_manager=manager, **arguments
        )
    results = evaluation["results"]
    metrics_by_task = read_metrics(evaluation, options.metric)
    write_samples(evaluation["samples"], metrics_by_task, stage.out / SAMPLES_FILE)
    version = VersionFacts.read(policy).version
    curves = {
        f"{task}/{name}": value
        for task, metrics in metrics_by_task.items()
        for name, value in metrics.items()
    }
    stage.metric(version, **curves)
    stage.facts.update(
        version=version,
        digest=policy.manifest.digest,
        engine=options.engine,
        lm_eval=lm_eval.__version__,
    )
    stage.facts["tasks"] = {
        task: {"samples": results[task].get("sample_len")} | metrics
        for task, metrics in metrics_by_task.items()
    }
    return {"score": compute_score(evaluation["group_subtasks"], metrics_by_task)}


def load_tasks(options: LmEvalOptions) -> tuple[Any, JsonObject]:
    """Load the tasks, and check that each has the metric that is wanted, before the model is
    loaded.

    Returns:
        lm-eval's task manager, and what it has loaded.

    Raises:
        UserError: a task is unknown, its data or code fail, or it lacks the metric.
        Unavailable: the hub with its data does not answer.
    """
    import lm_eval.tasks

    # The data and the code of a task may raise anything.
    with name_errors("tasks", options.tasks, Exception):
        manager = lm_eval.tasks.TaskManager(include_path=options.include_path)
        tasks: JsonObject = manager.load(options.tasks)
        metric = options.metric and options.metric.partition("/")[0]
        for name, task in tasks["tasks"].items():
            find_metrics(name, {f"{available},none": 0 for available in task.aggregation()}, metric)
    return manager, tasks


def read_metrics(evaluation: JsonMapping, first: str | None) -> dict[str, dict[str, float]]:
    """Read the metrics of each task and group that has numbers, the one called `first` before
    others.

    Raises:
        UserError: a task has none.
    """
    metrics_by_task: dict[str, dict[str, float]] = {}
    for task, result in evaluation["results"].items():
        metrics = find_metrics(task, result, first)
        # A group without metrics of its own has its alias alone.
        if metrics:
            metrics_by_task[task] = metrics
    without = [task for task in evaluation["samples"] if task not in metrics_by_task]
    if without:
        raise UserError("tasks", without, "have no metric that is a number")
    return metrics_by_task


def compute_score(
    subtasks: Mapping[str, list[str]], metrics_by_task: Mapping[str, Mapping[str, float]]
) -> float:
    """Compute the mean of the first metrics; tasks of a group that has metrics count by the group.

    Args:
        subtasks: group → its tasks and groups; a task has none.
    """
    # A group's metric is the mean over its tasks, which would count twice.
    members = {
        child
        for name, children in subtasks.items()
        if name in metrics_by_task
        for child in children
    }
    scores = [
        next(iter(metrics.values()))
        for name, metrics in metrics_by_task.items()
        if name not in members
    ]
    return sum(scores) / len(scores)


def write_samples(
    samples_by_task: Mapping[str, Any],
    metrics_by_task: Mapping[str, Mapping[str, float]],
    path: Path,
) -> None:
    """Write the questions and answers of all tasks as Parquet."""
    rows = [
        row
        for task, samples in samples_by_task.items()
        for row in list_samples(task, samples, metrics_by_task[task])
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SAMPLES), path)


def open_model(policy: Artifact, options: LmEvalOptions) -> Any:
    """Open lm-eval's own model of a checkpoint: in process, or of the server that has it."""
    from lm_eval.api.registry import get_model

    files = policy.part("model", "--policy", "give it a checkpoint")
    if options.engine == "transformers":
        # Without a device lm-eval takes a GPU, if there is one.
        arguments = {"device": ""} | options.model_args
        return get_model("hf")(pretrained=str(files), **arguments)
    if not (options.endpoint or "").startswith("http"):
        raise UserError(
            "--endpoint", options.endpoint, "is required: an OpenAI API, as http://host:8000/v1"
        )
    completions_model = get_model("local-completions")
    plugins.check_variant_args(
        "lm-eval",
        completions_model.__base__.__init__,
        options.model_args,
        first=1,
        prefix="model_args.",
    )
    context = json.loads((files / "config.json").read_text()).get("max_position_embeddings", 2048)
    defaults = {
        "model": "tuneloop",
        "max_length": context,
        "tokenizer_backend": "huggingface",
    }
    return completions_model(
        base_url=f"{options.endpoint}/completions",
        tokenizer=str(files),
        **(defaults | options.model_args),
    )


def prove_server(model: Any, policy: Artifact, tolerance: float | None) -> dict[str, float]:
    """Prove that a server has the policy, by log-probabilities of its canary.

    Its API has no versions, so nothing else can be asked. Raises UserError where it has another.
    """
    canary = read_canary(policy)
    answer = model.model_call([canary.ids], generate=False)["choices"][0]
    # Nothing precedes the first token, so that it has no log-probability; tokens after the canary
    # are the server's own.
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
    """Turn errors of these kinds into Unavailable if a service does not answer, and else into
    UserError.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, UserError) or find_disk_error(error):
            raise
        answer = getattr(error, "response", None)
        status = getattr(error, "status", 0) if answer is None else answer.status_code
        text = " ".join(str(error if answer is None else answer.text).split())[:300]
        # The hub's client in offline mode raises what it raises for a hub that is away.
        is_offline = "offline" in text.lower()
        is_busy = status >= 500 or status in (408, 429)
        if is_busy or (is_unreachable(error) and not is_offline):
            raise Unavailable(f"lm-eval: {field} {value}: {text}") from error
        raise UserError(field, value, f"lm-eval refuses it: {text}") from error


def find_metrics(name: str, result: JsonMapping, first: str | None) -> dict[str, float]:
    """Find lm-eval's metrics of a task or group, the one called `first` before others.

    Args:
        result: lm-eval's, whose metrics have keys as ``acc,none`` or ``exact_match,strict-match``.
        first: a metric as ``acc``, or with its filter as ``exact_match/strict-match``; None: the
            first one that the task has.

    Raises:
        UserError: it has only other metrics.
    """
    metrics = {
        key.removesuffix(",none").replace(",", "/"): float(number)
        for key, number in result.items()
        if "," in key and isinstance(number, int | float)
    }
    matches = [key for key in metrics if first in (None, key, key.partition("/")[0])]
    if metrics and not matches:
        raise UserError("metric", first, f"is none of {name}, which has {', '.join(metrics)}")
    # The key that is inserted first stays first.
    return {key: metrics[key] for key in matches[:1] + list(metrics)}


def list_samples(
    task: str, samples: Sequence[JsonMapping], metrics: Mapping[str, float]
) -> Iterator[JsonObject]:
    """Yield the question and the answer of each document, and its value in the first metric."""
    metric, _, filter_name = next(iter(metrics)).partition("/")
    for sample in samples:
        # Each filter of a task gives every document once more.
        if sample["filter"] != (filter_name or "none"):
            continue
        arguments = sample["arguments"]
        answer = sample["target"]
        response = sample["filtered_resps"][0]
        # Of choices there is one argument each, and its log-probability as response.
        if len(arguments) > 1:
            logprobs = [logprob for logprob, *_ in sample["filtered_resps"]]
            response = arguments[logprobs.index(max(logprobs))][1]
            if isinstance(answer, int) and answer < len(arguments):
                answer = arguments[answer][1]
        texts = (f"{task}/{sample['doc_id']}", arguments[0][0], response, answer)
        row: JsonObject = dict(zip(TEXTS, map(str, texts)))
        value = sample.get(metric)
        score = float(value) if isinstance(value, int | float) else None
        row["score"] = score
        row["outcome"] = "unverifiable" if score is None else "score"
        yield row


if __name__ == "__main__":
    evaluate_lm_eval.main()
