"""Sample completions from the policy, with the log-probabilities that training needs."""

import itertools
from functools import partial
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, ValidationInfo

from tuneloop.core.component import Input, Results, Stage
from tuneloop.core.seeds import derive_seed, draw_indices
from tuneloop.formats import rollouts
from tuneloop.inference import generate
from tuneloop.inference.generate import SamplingOptions


def _check_oversampling(asked: int | None, info: ValidationInfo) -> int | None:
    wanted, n = info.data.get("prompts_per_iteration"), info.data.get("n")
    if asked and wanted and asked < wanted:
        raise ValueError(f"must be at least prompts_per_iteration ({wanted}), the groups that the update takes")
    if asked and n == 1:
        remedy = "set n to 2 or more, or leave this out"
        raise ValueError(f"no group would be kept, as a single reward does not differ: {remedy}")
    return asked


class RolloutOptions(SamplingOptions):
    """What is sampled: never from a cut distribution, whose log-probabilities would bias the importance ratios."""

    flags: ClassVar[tuple[str, ...]] = (
        *("engine", "endpoint", "iteration", "prompts_per_iteration", "n", "oversampled_prompts", "temperature"),
        *generate.SHARED_FLAGS,
    )

    iteration: int = Field(0, ge=0, description="which batch of prompts")
    prompts_per_iteration: int = Field(16, ge=1, description="prompts in a batch")
    n: int = Field(8, ge=1, le=100, description="completions a prompt")
    oversampled_prompts: Annotated[int | None, AfterValidator(_check_oversampling)] = Field(
        None,
        ge=1,
        description="prompts sampled instead; the update takes the first prompts_per_iteration whose rewards differ",
    )
    temperature: float = Field(1.0, ge=0.01, description="of the sampled distribution")


@generate.sampling_stage("rollouts", "sampler", completions=int, mean_length=float)
def rollout(stage: Stage, policy: Input, prompts: Input, *, options: RolloutOptions) -> Results:
    """Generate `n` completions for each prompt of the iteration's batch; with an environment, `n` episodes.

    The batch is a function of (seed, iteration): prompts come from a permutation of ``train.parquet`` for each epoch.
    With `oversampled_prompts` it has so many, and ``facts.groups`` tells the update how many of their groups to keep.
    It counts only if the engine proves that it serves `policy`: by the digest it echoes, by the canary's
    log-probabilities, and by the version on every completion.

    Raises:
        UserError: data or options that cannot work.
        Retryable: the server is away, breaks off or keeps silent.
        StaleWeights: the engine serves other weights.
    """
    train = rollouts.open_rows(prompts, "train.parquet", generate.COLUMNS, "--prompts", "data_prep")
    total, iteration = train.metadata.num_rows, options.iteration
    size = options.oversampled_prompts or options.prompts_per_iteration
    places = draw_indices(total, iteration * size, size, partial(derive_seed, options.seed, "prompts"))
    chosen = rollouts.read_rows(train, places, generate.COLUMNS)
    groups = [f"i{iteration:06d}-p{p:05d}" for p in range(len(chosen))]
    with generate.open_engine(options) as engine:
        job = generate.Job(chosen, groups, options.n, options)
        tokenizer, requests, completions = generate.generate_completions(stage, policy, job, engine)
    rows = (rollouts.make_rows(tokenizer, *each) for each in zip(chosen, requests, completions))
    rollouts.write_rollouts(stage.out, itertools.chain.from_iterable(rows))
    if options.oversampled_prompts:
        stage.facts["groups"] = {"asked": size, "wanted": options.prompts_per_iteration}
    made = [said for group in completions for said in group]
    mean = sum(len(said.ids) for said in made) / len(made)
    cut = sum(said.finish_reason == "length" for said in made) / len(made)
    stage.metric(iteration, completions=len(made), mean_length=mean, cut=cut, **stage.facts["canary"])
    return {"completions": len(made), "mean_length": mean}


if __name__ == "__main__":
    rollout.main()
