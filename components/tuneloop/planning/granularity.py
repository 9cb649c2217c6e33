"""What it costs to give each of the loop's pods several iterations: in overhead, idle accelerators, and recovery.

Argo looks at a workflow again ten seconds after a pod has ended (its controller's ``DEFAULT_REQUEUE_TIME``; measured on
Argo 3.7.6: a chain of empty pods takes 10 s a pod). An admin may lower it; `REQUEUE` is what is counted with here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tuneloop.core.artifacts import Role

REQUEUE = 10.0
"""Seconds between two pods that follow one another."""
BEARABLE = 0.1
"""Share of an iteration that may go to waiting for pods, for a grain to be recommended."""
LOST = (
    f"a lost pod costs the work of its stage and {REQUEUE:g} s; one of several stages, also the start of all libraries"
)


def list_iterations_per_pod(iterations: int, part: int) -> list[int]:
    """List the iterations per pod that divide a workflow's `part` of the loop evenly; 0 is one pod per stage."""
    found = [0]
    for pod in range(1, part + 1):
        if part % pod == 0:
            found.append(pod)
            if pod >= iterations:
                break
    return found


def compare_iterations_per_pod(
    chosen: int,
    grains: Sequence[int],
    loop: Mapping[str, Role],
    idle: Sequence[str],
    seconds: Mapping[str, float] | None,
) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table: choice, overhead per iteration, idle accelerator seconds, remarks.

    Args:
        chosen: iterations a pod; 0 is a pod a stage.
        grains: what `list_iterations_per_pod` gives.
        loop: stage of an iteration → its role.
        idle: those of them that leave the accelerators of a pod idle that they share with others.
        seconds: stage → how long it works in an iteration, of a recorded run.
    """
    best = recommend_iterations_per_pod(grains, loop, seconds)
    some = max(pod for pod in grains if pod <= 10)
    for pod in sorted({0, 1, some, grains[-1], chosen, best if best is not None else chosen}):
        name = {0: "a pod a stage", 1: "a pod an iteration"}.get(pod, f"{pod} iterations a pod")
        marks = [mark for mark, holds in (("this plan", pod == chosen), ("recommended", pod == best)) if holds]
        told = f"{sum(seconds.get(stage, 0.0) for stage in idle):.1f} s" if seconds else f"{' and '.join(idle)}'s"
        held = told if pod and idle else "0 s"
        yield name, f"{compute_overhead(pod, len(loop)):.3g} s", held, ", ".join(marks)


def compute_overhead(pod: int, stages: int) -> float:
    """Compute the seconds per iteration in which no pod of the loop works, with `pod` iterations per pod."""
    return REQUEUE / pod if pod else REQUEUE * stages


def recommend_iterations_per_pod(
    grains: Sequence[int], loop: Mapping[str, Role], seconds: Mapping[str, float] | None
) -> int | None:
    """Recommend the finest of `grains` that spends at most a tenth of its time between pods, else the coarsest; None
    where nothing was measured."""
    if not seconds:
        return None
    work = sum(seconds.get(stage, 0.0) for stage in loop)
    fitting = (
        pod
        for pod in grains
        if compute_overhead(pod, len(loop)) <= BEARABLE * (work + compute_overhead(pod, len(loop)))
    )
    return next(fitting, grains[-1])
