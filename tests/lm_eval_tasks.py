"""Tasks of lm-eval's own form, with their data in files, for tests."""

import json
from pathlib import Path

import yaml

from tuneloop.core.artifacts import Artifact
from tuneloop.formats.rollouts import Request
from tuneloop.formats.tokens import load_tokenizer, stop_ids
from tuneloop.inference.engines import Sampling
from tuneloop.inference.engines.transformers import Transformers

TEXTS = [f"reverse {i} =" for i in range(10, 22)]
CHOICES = ["12", "345", "6789"]


def write_tasks(folder: Path, policy: Artifact) -> str:
    """Write the group ``digits`` of ``digits_choose``, three quarters of whose answers are those that `policy` finds
    likeliest, and of ``digits_say``, whose answers are what it says, where that is text. Returns the folder."""
    words, engine = load_tokenizer(policy.path / "model"), Transformers()
    engine.load(policy)
    asked = [Request(text, words.encode(text), [0]) for text in TEXTS]
    greedy = Sampling(0.0, 2, stop_ids(words, policy.path / "model"))
    said = [group[0].ids for group in engine.generate(asked, greedy, lambda done: None)]
    rows = []
    for place, request in enumerate(asked):
        tried = [words.encode(f"{request.id} {choice}") for choice in CHOICES]
        sums = [sum(engine.score(ids)[len(request.prompt_ids) - 1 :]) for ids in tried]
        gold = sums.index(max(sums)) if place % 4 else (sums.index(max(sums)) + 1) % 3
        own = words.decode(said[place], skip_special_tokens=True).split("\n")[0]
        told = own if own.isprintable() and "\ufffd" not in own else "nothing"
        rows.append({"question": request.id, "choices": CHOICES, "gold": gold, "said": told})
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {
        "data_files": {"test": str(folder / "rows.jsonl")},
        "cache_dir": str(folder.with_name("cache")),
    }
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": data,
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choose = {
        "task": "digits_choose",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
    }
    choose |= {"doc_to_target": "gold", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
    say = {"task": "digits_say", "output_type": "generate_until", "doc_to_target": "{{said}}"}
    say |= {
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 2},
        "metric_list": [{"metric": "exact_match"}],
    }
    both = {"group": "digits", "task": ["digits_choose", "digits_say"]}
    for name, about in (
        ("choose", {**shared, **choose}),
        ("say", {**shared, **say}),
        ("both", both),
    ):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(about))
    return str(folder)


def count_said(folder: str) -> float:
    """Return the share of the rows whose answer is what the policy says: what it earns in ``digits_say``."""
    rows = [json.loads(line) for line in (Path(folder) / "rows.jsonl").read_text().splitlines()]
    share = sum(row["said"] != "nothing" for row in rows) / len(rows)
    assert 0 < share < 1, "some tell it apart from a policy that says something else"
    return share
