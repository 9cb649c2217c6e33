"""Episodes of several turns: one growing list of ids, of which the policy learns what it sampled and nothing else."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.guess import Guess
from tests.policies import commit_policy, commit_prompts, tokenizer
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import UserError
from tuneloop.environments import Reply, parse_tool_calls
from tuneloop.environments.calculator import Calculator, evaluate_expression
from tuneloop.environments.python import create_environment as create_python
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.formats.tokens import encode_reply, load_tokenizer
from tuneloop.inference.engines.transformers import Transformers
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.evaluate import evaluate
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.reward import reward
from tuneloop.stages.rollout import rollout
from tuneloop.training.samples import read_samples

SMALL = {
    "engine": "transformers",
    "prompts_per_iteration": 3,
    "n": 2,
    "max_tokens": 24,
    "temperature": 0.8,
}
ASKED: list[list[Request]] = []


class Echo:
    """Says how long the turn was, as often as it is asked to."""

    def __init__(self, replies: int) -> None:
        self.left = replies

    def step(self, said: str) -> Reply:
        self.left -= 1
        return Reply(
            f"you said {len(said)}\n",
            done=self.left < 0,
            role="user",
            reward=min(len(said) / 100, 1.0),
        )


def echo(row: Mapping[str, Any], replies: int = 1) -> Echo:
    return Echo(replies)


class Spy(Transformers):
    """Notes what it is asked for."""

    def generate(self, requests: Any, sampling: Any, done: Any) -> Any:
        ASKED.append(list(requests))
        return super().generate(requests, sampling, done)


def spy(endpoint: str | None, args: Mapping[str, Any], timeout_s: float) -> Spy:
    return Spy(**args)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A random policy that ends a turn at any of the first hundred tokens: its episodes have turns of all lengths."""
    made = commit_policy(tmp_path_factory.mktemp("policy") / "raw", version=2)
    draft = Draft(str(tmp_path_factory.mktemp("policy") / "c"))
    for file in made.path.rglob("*"):
        if file.is_file():
            (draft.path / file.relative_to(made.path)).parent.mkdir(parents=True, exist_ok=True)
            (draft.path / file.relative_to(made.path)).write_bytes(file.read_bytes())
    end = tokenizer().eos_token_id
    config = {"eos_token_id": [end, *range(100)]}
    (draft.path / "model" / "generation_config.json").write_text(json.dumps(config))
    draft.commit(stage="sft", facts={"version": 2})
    return Artifact(draft.url)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "chat"])
def prompts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    texts = [f"reverse {i} =" for i in (1, 22, 333, 4444)]
    if request.param:
        texts = [json.dumps([{"role": "user", "content": text}]) for text in texts]
    path = tmp_path_factory.mktemp("prompts") / "p"
    return commit_prompts(path, texts, chat=request.param, reward='{"environment": 1.0}')


def run(out: Path, policy: Artifact, prompts: Artifact, **params: Any) -> list[dict[str, Any]]:
    ASKED.clear()
    given = {
        "environment": f"{__name__}:echo",
        "environment_args": {"replies": 2},
        "engine": f"{__name__}:spy",
    }
    rollout(out=str(out), policy=policy.ref, prompts=prompts.ref, **{**SMALL, **given, **params})
    rows: list[dict[str, Any]] = pq.read_table(
        Artifact(str(out)).path / "rollouts.parquet"
    ).to_pylist()
    return rows


def test_turns_are_one_list_of_ids(tmp_path: Path, policy: Artifact, prompts: Artifact) -> None:
    """Each turn's prompt begins with all ids before it; one pass gives the log-probabilities of all turns."""
    rows = run(tmp_path / "r", policy, prompts)
    words, chat = load_tokenizer(policy.path / "model"), rows[0]["prompt"].startswith("[")
    turns = [json.loads(row["metadata"])["environment"]["turns"] for row in rows]
    assert max(turns) == 3 == len(ASKED), "nothing has several turns: the test shows nothing"
    whole = {row["request_id"]: row["prompt_ids"] + row["completion_ids"] for row in rows}
    for wave in ASKED[1:]:
        for request in wave:
            assert whole[request.id][: len(request.prompt_ids)] == request.prompt_ids
    assert len({seed for wave in ASKED for r in wave for seed in r.seeds}) == sum(
        len(r.seeds) for w in ASKED for r in w
    )
    plain = AutoModelForCausalLM.from_pretrained(policy.path / "model", dtype=torch.float32)
    for row in rows:
        with torch.no_grad():
            logits = plain(torch.tensor([whole[row["request_id"]]])).logits[0] / 0.8
        start = len(row["prompt_ids"]) - 1
        want = [
            float(logits[start + i].log_softmax(-1)[t]) for i, t in enumerate(row["completion_ids"])
        ]
        mask = row["loss_mask"]
        assert [p for p, m in zip(row["logprobs"], mask) if m] == pytest.approx(
            [p for p, m in zip(want, mask) if m], abs=1e-4
        )
        assert len(row["policy_versions"]) == len(mask) and set(row["policy_versions"]) == {2}
        said = words.decode([t for t, m in zip(row["completion_ids"], mask) if not m])
        turns_, last = json.loads(row["metadata"])["environment"]["turns"], row["finish_reason"]
        assert said.count("you said") == turns_ - 1 and last in ("stop", "length")
        if chat and turns_ > 1:
            assert said.startswith("\n<|im_start|>user\nyou said") and said.endswith(
                "<|im_start|>assistant\n"
            )


def test_the_limits_of_an_episode(tmp_path: Path, policy: Artifact, prompts: Artifact) -> None:
    one = run(tmp_path / "a", policy, prompts, max_turns=1)
    assert all(all(row["loss_mask"]) for row in one) and {row["finish_reason"] for row in one} == {
        "length"
    }
    small = run(
        tmp_path / "b",
        policy,
        prompts,
        engine_args={"max_model_len": 130},
        environment_args={"replies": 99},
    )
    assert max(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in small) <= 130
    assert {row["finish_reason"] for row in small} == {"length"} and len(ASKED) > 1
    assert all(row["loss_mask"][-1] for row in small)  # a reply that nothing follows is left out


def test_the_policy_learns_what_it_sampled(
    tmp_path: Path, policy: Artifact, prompts: Artifact
) -> None:
    rows = run(tmp_path / "r", policy, prompts, environment_args={"replies": 1}, n=4)
    reward(out=str(tmp_path / "w"), rollouts=str(tmp_path / "r"))
    scored = Artifact(str(tmp_path / "w"))
    assert scored.manifest.facts["reward"]["breakdown"].keys() == {"environment"}
    for sample, row in zip(read_samples(scored, 2, 0), rows):
        assert list(sample.document.targets) == [False] * len(row["prompt_ids"]) + row["loss_mask"]
        assert len(sample.engine) == sum(row["loss_mask"]) == sample.length
    update = policy_update(
        out=str(tmp_path / "u"), policy=policy.ref, rewards=scored.ref, dtype="float32"
    )
    assert update.results["version"] == 3
    evaluate(out=str(tmp_path / "e"), policy=policy.ref, prompts=prompts.ref, engine="transformers", max_tokens=24,
             environment=f"{__name__}:echo")  # fmt: skip


STRIPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_strips_reasoning() -> None:
    words = tokenizer()
    stops = [words.eos_token_id]
    whole = encode_reply(words, "12", True, "tool", stops)
    assert words.decode(whole) == "\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"
    words.chat_template = STRIPS
    with pytest.raises(
        UserError, match=r"chat template: 'tool': strips reasoning .*--keep-reasoning true"
    ):
        encode_reply(words, "12", True, "tool", stops)
    assert encode_reply(words, "12", True, "tool", stops, keep_reasoning=True) == whole
    with pytest.raises(UserError, match="ends no turn of the assistant"):
        encode_reply(words, "12", True, "tool", [5])
    words.chat_template = "{{ raise_exception('only users') }}"
    with pytest.raises(UserError, match=r"cannot render a reply of this role .only users"):
        encode_reply(words, "12", True, "tool", stops)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (
            {"environment": "chess"},
            "rollout.environment: 'chess': .*unknown; known: calculator, python",
        ),
        ({"environment_args": {"x": 1}}, "environment_args.x: 1: unknown; .* takes replies"),
        ({"environment_args": {"replies": "many"}}, "environment_args.replies: 'many'"),
        ({"max_turns": 0}, "rollout.max_turns: 0"),
        (
            {"environment": "tests.guess:create_environment", "environment_args": {}},
            "row p.*guess needs a whole",
        ),
    ],
)
def test_bad_parameters(
    tmp_path: Path, policy: Artifact, prompts: Artifact, params: Any, said: str
) -> None:
    with pytest.raises(UserError, match=said) as raised:
        run(tmp_path / "r", policy, prompts, **params)
    assert "\n" not in str(raised.value) and not list(tmp_path.glob("r/*"))


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1e308*1e308*10/3", "error: the value is too large"),
     ("3 * (4 + 5)", "27"), ("-7/2", "-3.5"), ("0.1 + 0.2", "0.3"), ("1/0", "error: divides by zero"),
     ("2**9**9**9", "error: is no"), ("__import__('os')", "error: is no"), ("(" * 150, "error: is no"),
     ("9*" * 200 + "9", "error: is longer"), ("True + 1", "error: is no"), ("9e190 * 9e190", "8"),
     ("1e999", "error: has a number that is too large")],
)  # fmt: skip
def test_calculator(expression: str, value: str) -> None:
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    reply = Calculator().step(f"let me see <tool_call>{call}</tool_call>")
    assert reply.text.startswith(value) and not reply.done and reply.role == "tool"


class Scripted(Transformers):
    """Says what it is told to, turn by turn, whatever the prompt."""

    said: ClassVar[list[list[str]]] = []

    def generate(self, requests: Any, sampling: Any, done: Any) -> Any:
        words = tokenizer()
        texts = [
            [
                self.said[int(r.id.split("-s")[1]) if "-s" in r.id else s].pop(0)
                for s in range(len(r.seeds))
            ]
            for r in requests
        ]
        ids = [
            [[*words.encode(text, add_special_tokens=False), words.eos_token_id] for text in group]
            for group in texts
        ]
        return [[Completion(i, [-1.0] * len(i), "stop", 2, 2) for i in group] for group in ids]


def scripted(endpoint: str | None, args: Mapping[str, Any], timeout_s: float) -> Scripted:
    return Scripted(**args)


def python(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


def test_programs_between_turns(tmp_path: Path, policy: Artifact) -> None:
    """One that calculates by them, one that has an error and gives up, one that reads what is not its own."""
    Scripted.said = [
        [python("print(12 * 34)"), "408"],
        [python("print('a')\n1 / 0"), "7"],
        [python("open('/etc/passwd').read()"), "408"],
    ]
    prompts = commit_prompts(tmp_path / "p", ["408"])
    rows = run(tmp_path / "r", policy, prompts, n=3, prompts_per_iteration=1, environment="python",
               environment_args={"seconds": 20}, engine=f"{__name__}:scripted")  # fmt: skip
    told = [json.loads(row["metadata"])["environment"] for row in rows]
    assert [about["turns"] for about in told] == [2, 2, 1]
    assert "</tool_call>408" in told[0]["transcript"]
    assert "</tool_call>a\nerror: ZeroDivisionError: division by zero7" in told[1]["transcript"]
    assert told[2]["escape"] == "open /etc/passwd" and "escape" not in told[0]
    reward(out=str(tmp_path / "w"), rollouts=str(tmp_path / "r"), error_budget=0.5)
    scored = pq.read_table(Artifact(str(tmp_path / "w")).path / "rewards.parquet")
    assert scored["outcome"].to_pylist() == ["score", "score", "escape"]
    assert scored["score"].to_pylist() == [1.0, 0.0, None]


@pytest.mark.parametrize(
    ("said", "reply"),
    [
        ("it is 408", Reply(done=True)),
        (python("x = 3") + python("print(x)"), Reply("\nerror: NameError: name 'x' is not defined")),
        (python("print('y' * 9999)"), Reply("y" * 1024 + "\nerror: more output than is kept")),
        (python("while True: pass"), Reply("error: it used up its time")),
        ('<tool_call>{"name": "bash", "arguments": {}}</tool_call>',
         Reply('error: there is only python, and it takes {"code": "…"}')),
        (python("print(1)") + python("import os; os.fork()"), Reply("1\n", done=True, escape="os.fork ()")),
    ],
)  # fmt: skip
def test_python(said: str, reply: Reply) -> None:
    assert create_python({}, seconds=2, output_kb=1).step(said) == reply


def test_calls_that_are_none() -> None:
    assert Calculator().step("so it is 27") == Reply(done=True)
    said = (
        '<tool_call>{</tool_call><tool_call>{"name": "shell"}</tool_call><tool_call>[]</tool_call>'
    )
    said += '<tool_call>{"name": "shell", "arguments": []}</tool_call>'
    assert [call.problem for call in parse_tool_calls(said)] == [
        "is not JSON",
        "",
        "has no name",
        "has non-object arguments",
    ]
    assert Calculator().step(said).text.count("error: ") == 4
    assert evaluate_expression("1/3") * 3 == 1


def test_what_only_an_episode_shows_is_not_asked_of_gold_answers(tmp_path: Path) -> None:
    small = {"source_args": {"digits": 2}, "train": 3, "eval": 2, "sft": 2}
    made = data_prep(out=str(tmp_path / "a"), rewards={"environment": 1.0}, **small)
    assert made.facts["unchecked"] == 7
    both = data_prep(out=str(tmp_path / "b"), rewards={"environment": 1.0, "exact": 0.5}, **small)
    assert "unchecked" not in both.facts
    with pytest.raises(UserError, match=r"7 of 7 gold answers'.* less than full marks .*'format'"):
        data_prep(out=str(tmp_path / "c"), rewards={"environment": 1.0, "format": 1.0},
                  reward_args={"format": {"pattern": "x"}}, **small)  # fmt: skip


def test_guess() -> None:
    game = Guess(7)
    assert [game.step(said).text for said in ("5", "9 no, 8", "hm")] == [
        "higher\n",
        "lower\n",
        "say a number\n",
    ]
    assert game.step("7") == Reply(done=True, reward=1.0)
