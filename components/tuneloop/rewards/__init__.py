"""Reward functions: one file a reward, with ``score(completion, answer, metadata) -> float``.

`scoring` runs them with a time limit, `sandbox` confines the code that a policy writes. No reward
imports another. A reward of yours whose judge is away raises `RewardUnavailable`.

A file here is a reward that users may name, unless its name begins with an underscore or is in
`NOT_VARIANTS`: a module of helpers has to be added there. What a reward's module may declare
besides `score` (``RANGE``, ``TRUSTED``, ``NEEDS_EPISODE``, ``write_answers``) is listed by
`rewards/registry.py: Reward`; ``COSTLY`` is read by `data/tables.py: is_costly`.

A reward that ships is tried by every test and command that lists rewards. So it also needs a judge
in `tests/unit/rewards/test_fuzz.py`, what it judges by in ``rewards/attacks/row.json`` (for
`tuneloop probe` and `tests/unit/local/test_probe.py`), a row in docs/rewards.md, and its place in
the import rules of ``pyproject.toml``. A library whose version changes scores belongs into the
extra ``rewards`` there, and into `core/provenance.py: LIBRARIES`.
"""

from tuneloop.rewards.outages import RewardUnavailable

NOT_VARIANTS = (
    "answers",
    "error_budget",
    "evaluated_text",
    "judging",
    "outages",
    "outcomes",
    "programs",
    "proof",
    "registry",
    "sandbox",
    "score_record",
    "scoring",
    "stage_scoring",
    "structures",
    "workers",
)

__all__ = ["NOT_VARIANTS", "RewardUnavailable"]
