"""Where the loop of a run stands, by what it has committed: the task that runs the rest of it starts there."""

from bisect import bisect_left
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tuneloop.core.artifacts import MANIFEST, Manifest, parse_manifest
from tuneloop.core.store import Store
from tuneloop.kfp.stage import build_handle
from tuneloop.workflow.loop import output_of, step_of
from tuneloop.workflow.pod_loop import PodLoop


@dataclass(frozen=True)
class Position:
    """How far a loop has come.

    Attributes:
        last: number of the last iteration that is committed; 0: none is.
        ended: no iteration follows it, because it is the last or its reward reaches the target.
        carried: value → handle, as the next iteration takes it.
    """

    last: int
    ended: bool
    carried: Mapping[str, Mapping[str, Any]]


def find_position(
    loop: PodLoop,
    run: str,
    start: Mapping[str, Mapping[str, Any]],
    *,
    iterations: int,
    target_reward: float,
    after: int = 0,
) -> Position:
    """Find how far a loop has come. An iteration whose artifacts were deleted is run again, and so are those after it.

    Args:
        start: value → handle, as the iteration behind `after` is carried them.
        after: an iteration that is known to be committed, and not to have ended the loop.
    """
    store = Store(run)

    def read(i: int) -> tuple[dict[str, Any], float] | None:
        made = read_iteration(loop, store, i)
        if any(manifest is None for manifest in made.values()):
            return None
        at = f"{store.url}/iterations/{i}"
        carried = {
            name: build_handle(f"{at}/{step_of(wire)}", made[step_of(wire)])  # type: ignore[arg-type]
            for name, wire in loop.carry.items()
        }
        return carried, read_reward(loop, made)

    left = range(after + 1, iterations + 1)
    committed = bisect_left(left, True, key=lambda i: read(i) is None)
    last, carried = after, {name: dict(start[name]) for name in loop.carry}
    with ThreadPoolExecutor() as pool:
        for i, found in zip(left, pool.map(read, left[:committed])):
            if found is None:
                break
            last, (carried, reward) = i, found
            if reward >= target_reward:
                return Position(last, True, carried)
    return Position(last, last == iterations, carried)


def read_iteration(loop: PodLoop, store: Store, i: int) -> dict[str, Manifest | None]:
    """Return what each step of iteration `i` has committed, and the evaluation if one is due."""
    due = [loop.check] if loop.check and i % loop.evaluate_every == 0 else []
    names = [step.name for step in (*loop.steps, *due)]
    found = {name: store.get(f"iterations/{i}/{name}/{MANIFEST}") for name in names}
    url = f"{store.url}/iterations/{i}"
    return {name: None if data is None else parse_manifest(f"{url}/{name}", data) for name, data in found.items()}


def read_reward(loop: PodLoop, made: Mapping[str, Manifest | None]) -> float:
    """Return the reward that may end the loop, of an iteration that is committed."""
    manifest = made[step_of(loop.reward)]
    assert manifest is not None, "the iteration is committed"
    return float(manifest.results[output_of(loop.reward).replace("-", "_")])
