"""Take the program out of a completion: a fenced block, all of it, or what continues the prompt.

`data/layouts/_parts.py: fence_program` writes the solutions of data sets in the form that is read
here.
"""

import ast
import re
import textwrap
import warnings

from tuneloop.rewards.answers.extraction import THOUGHTS_END

BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
"""A fenced block of any language; one that never ends is none."""
INDENT = "    "
UNINDENTED_LINE = re.compile(r"\n(?=\S)")


def extract_code(completion: str, function: str | None = None) -> str:
    """Return the last fenced block of a completion after its thoughts, or of the blocks that define
    `function` the last; all of the completion after its thoughts if it has none.

    >>> extract_code("Sure:\\n```python\\nprint(1)\\n```\\nThat is all.")
    'print(1)\\n'
    """
    answer = completion.rpartition(THOUGHTS_END)[2]
    blocks: list[str] = BLOCK.findall(answer)
    if not blocks:
        return answer
    defining = [block for block in blocks if function is not None and _defines(block, function)]
    return defining[-1] if defining else blocks[-1]


def complete_program(completion: str, prompt: str, function: str | None) -> str:
    """Return the whole program that a completion gives.

    Args:
        completion: what the model wrote.
        prompt: the beginning of a program that the completion may continue; empty if there is none.
        function: the function that the program has to define, if it is known.

    A completion that does not define the function is the rest of its body, up to the first line
    that is not indented.
    """
    code = extract_code(completion, function)
    if not prompt:
        return code
    if function is None or _defines(code, function):
        # The prompt's imports and helpers are needed. The function that it only begins is defined
        # again by the code after it.
        return f"{prompt.rstrip()}\n\n\n{code}" if _compiles(prompt) else code
    bodies = [code, INDENT + code.lstrip(), textwrap.indent(textwrap.dedent(code), INDENT)]
    bodies += [_cut_body(body) for body in bodies]
    for body in bodies:
        if _compiles(f"{prompt.rstrip()}\n{body}"):
            return f"{prompt.rstrip()}\n{body}"
    return prompt + code


def _cut_body(body: str) -> str:
    """Cut what follows the body of a function: the first line that is not indented ends it."""
    return UNINDENTED_LINE.split(body, maxsplit=1)[0] + "\n"


def _compiles(code: str) -> bool:
    # Text may be too deep for the parser, or hold what is no text.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, "<program>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True


def _defines(code: str, function: str) -> bool:
    if not _compiles(code):
        # Code that does not compile may define the function all the same: then it is not the rest of
        # its body.
        return re.search(rf"^\s*(?:async\s+)?def\s+{re.escape(function)}\b", code, re.M) is not None
    for statement in ast.parse(code).body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name == function:
                return True
            case ast.Assign(targets=[ast.Name(id=name)]) if name == function:
                return True
            case ast.ImportFrom(names=names) if function in [a.asname or a.name for a in names]:
                return True
    return False
