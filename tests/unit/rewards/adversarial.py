"""Completions that a policy may write to end, confuse or dodge its judge, made from a seed."""

import json
import random
import string
from collections.abc import Callable, Iterator

FRAGMENTS = [
    "{[1]}",
    "{{}}",
    "[[]]",
    "9" * 5000,
    "-" * 5000 + "1",
    "1" + "+1j" * 3000,
    "(" * 300,
    "[" * 3000,
    "{" * 3000,
    ")" * 300,
    '{"a":' * 3000,
    "\x00",
    "\x1b[2J",
    "\ud800",
    "\udfff\ud83d",
    "\ufeff",
    "\u202e42\u202c",
    "４２",
    "½",
    "\u0301" * 500,
    "a" * 30_000,
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!",
    "<think>" * 200,
    "</think>",
    "<tool_call>" * 200,
    "</tool_call>",
    "```",
    "```python\n",
    "```json\n",
    "\\boxed{",
    "\\boxed{}",
    "\\boxed{\\boxed{42}}",
    "}",
    "{",
    "$",
    "$$",
    "\\(",
    "\\)",
    "\\[",
    "\\]",
    "\\frac{",
    "\\frac{1}{0}",
    "\\sqrt{",
    "\\sqrt[0]{1}",
    "\\begin{pmatrix}",
    "\\end{pmatrix}",
    "\\text{",
    "\\infty",
    "-\\infty",
    "\\pm",
    "\\cup",
    "\\approx",
    "\\%",
    "%",
    "^\\circ",
    "_8",
    "42_0",
    "9^{9^{9^9}}",
    "(10^9)!",
    "\\binom{10^9}{5}",
    "1e999999999",
    "1e-999999999",
    "inf",
    "nan",
    "NaN",
    "Infinity",
    "-0.0",
    "0/0",
    "1/0",
    "\\int_0^1 x",
    "\\sum_{n=1}^{\\infty}",
    "\\lim",
    "x^{x^{x}}",
    "x=",
    "=42",
    "<",
    "\\le",
    "|x|" * 20,
    "||||||||",
    "!" * 50,
    "The answer is ",
    "Answer: ",
    "#### ",
    "Final answer:",
    "or",
    " and ",
    ",",
    ";",
    ":",
    ".",
    "A",
    "B",
    "(B)",
    "42",
    "43",
    "null",
    "true",
    "None",
    "True",
    '"',
    "'",
    "'''",
    "\\",
    "\\\\",
    "\n",
    "\r\n",
    "\t",
    " ",
    "\u2028",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<|im_end|>",
    "<function=add>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    '{"name": "add", "arguments": {"a": 20, "b": 22}}',
    '{"name": "add", "arguments": "{"}',
    '{"name": 7}',
    '{"sum": 42}',
    '{"sum": 42, "sum": 42}',
    "add(a=20, b=22)",
    "add(*[20, 22])",
    "add(**{})",
    "add(a=20, b={[1]})",
    "lambda: 0",
    "def add(a, b): return a + b\n",
    "def add(",
    "return a + b\n",
    "    return a + b\n",
    "raise SystemExit\n",
    "1 / 0\n",
    "import os; os._exit(0)\n",
    "f'{' * 50",
    "@" * 200,
    "async " * 100,
    "print(" * 200,
    "x = [0] * 10**9\n",
    "class Y(int):\n    def __repr__(s): return '{[1]}'\n    def __eq__(s, o): raise MemoryError\n",
]
REPRS = [
    "{[1]}",
    "{{}: 1}",
    "9" * 5000,
    "9" * 60_000,
    "[" * 5000,
    "-" * 60_000 + "1",
    "1" + "+1j" * 15_000,
    "1e999",
    "-1e999",
    "1e999-1e999",
    "\x00",
    "\ud800",
    "'\ud800'",
    "",
    " ",
    "(",
    "3 or True",
    "()",
    "[3]",
    "b'3'",
    "...",
    "3j",
    "3_0",
    "0x3",
    "{3: {3}}",
    "{(): [()]}",
    "'" * 3,
    "\\",
    "\n3",
    "3\n",
    "lambda: 3",
    "[*[3]]",
    "{**{}}",
    "(3,)" * 3000,
    "f'{3}'",
    "None",
    "[('returned', '3')]",
    "[['returned', '{[1]}']]",
    "set()",
    "{1, 2, {3}}",
    "1" * 4301,
    "0" * 5000,
    "[" + "1," * 9999 + "]",
]
PROGRAM = """class Y:
    def __repr__(self): return {text!r}
def add(a, b): return Y()
"""
RAISES = """class E(Exception):
    def __str__(self): return {text!r}
def add(a, b): raise E({text!r})
"""


def generate_completions(seed: int) -> Iterator[str]:
    """Generate completions without an end; the same for the same seed."""
    rng = random.Random(seed)
    makers: list[Callable[[random.Random], str]] = [
        _join_fragments,
        _join_fragments,
        _box_fragments,
        _mutate_answer,
        _write_program,
        _write_program,
        _write_json,
        _write_noise,
    ]
    while True:
        yield rng.choice(makers)(rng)


def _join_fragments(rng: random.Random) -> str:
    return "".join(rng.choice(FRAGMENTS) for _ in range(rng.randint(0, 8)))


def _box_fragments(rng: random.Random) -> str:
    inside = "".join(rng.choice(FRAGMENTS) for _ in range(rng.randint(1, 4)))
    opening = rng.choice(["\\boxed{", "The answer is $", "Answer: ", "#### ", "$", "\\text{"])
    closing = rng.choice(["}", "$.", "", "\n"])
    return opening + inside + closing


def _mutate_answer(rng: random.Random) -> str:
    """Change some characters of a right answer."""
    answers = [
        "\\boxed{42}",
        "The answer is (B).",
        '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>',
        '{"sum": 42}',
        "```python\ndef add(a, b):\n    return a + b\n```",
        "\\boxed{\\frac{84}{2} = \\sqrt{1764}}",
        "[add(a=20, b=22)]",
    ]
    text = list(rng.choice(answers))
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(len(text))
        text[position] = rng.choice([*string.printable, "", "\x00", "\ud800", "((", "{{", "\\"])
    return "".join(text)


def _write_program(rng: random.Random) -> str:
    """Write a program whose results lie, are no literals, or cannot be built."""
    text = rng.choice([*REPRS, *FRAGMENTS])
    program = rng.choice([PROGRAM, RAISES]).format(text=text)
    values = [
        "float('nan')",
        "float('inf')",
        "range(3)",
        "[[]] * 3",
        "{1: {2: [3]}}",
        "'\\ud800'",
        "10**5000",
        "add",
    ]
    plain = f"def add(a, b): return {rng.choice(values)}\n"
    return rng.choice(
        [program, program, plain, f"```python\n{program}```", program[: rng.randint(1, 40)]]
    )


def _write_json(rng: random.Random) -> str:
    values = [
        None,
        True,
        42,
        -1.5,
        "42",
        [],
        {},
        [42],
        {"sum": 42},
        {"sum": [42]},
        {"name": "add"},
        "9" * 500,
    ]
    value: object = rng.choice(values)
    for _ in range(rng.randint(0, 30)):
        value = (
            [value]
            if rng.random() < 0.5
            else {rng.choice(["name", "arguments", "sum", "function"]): value}
        )
    text = json.dumps(value)
    return text if rng.random() < 0.5 else f"<tool_call>{text}</tool_call>"


def _write_noise(rng: random.Random) -> str:
    """Write any characters, also those that are no characters."""
    return "".join(
        chr(rng.choice([rng.randrange(128), rng.randrange(0x11_0000)]))
        for _ in range(rng.randint(1, 120))
    )
