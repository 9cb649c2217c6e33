"""Verifiers of other libraries that evaluate the text they judge, and the text that they may get.

Python's `eval`, and sympy's `parse_expr`, which calls it, run any code in a text. The author of a
completion could run code in the judge's process by them, or read the gold answer from a variable.
The verifiers that evaluate are recognized by the names in their code, so a new task of a library is
covered without a change here, unless it evaluates by a function that `EVALUATORS` does not have.

`rewards/reasoning_gym.py` is the only user; `tests/unit/rewards/test_evaluated_text.py` runs
attacks on each of its tasks that evaluates.
"""

import ast
import builtins
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Literal

Language = Literal["python", "sympy"]

EVALUATORS: dict[str, Language] = {
    "eval": "python",
    "exec": "python",
    "compile": "python",
    "parse_expr": "sympy",
    "sympify": "sympy",
    "nsimplify": "sympy",
    "parse_latex": "sympy",
}
"""Function that evaluates text, by its bare name as code calls it → the language of the text.
Another language needs a rule in `Evaluation.keep_harmless`, which takes what is not ``python`` for
sympy."""
UNREADABLE = ")"
"""A text that is an expression in neither language."""
EXPRESSION = re.compile(r"[0-9A-Za-z\s+\-*/^().,!]*")
"""The characters of a formula. Neither quotes nor underscores are among them."""
WORD = re.compile(r"[A-Za-z][0-9A-Za-z]*")
ATTRIBUTE = re.compile(r"\.\s*[A-Za-z(.]")
"""A dot that is not in a number."""
SYMBOL = re.compile(r"[A-Za-z][0-9]*")
FORMULA_WORDS = """
    sin cos tan sec csc cot asin acos atan acot atan2
    sinh cosh tanh sech csch coth asinh acosh atanh
    exp log ln sqrt cbrt root abs Abs sign factorial
    erf erfc erfi Ei Si Ci li gamma binomial Integral
    floor ceiling min max Min Max Integer Rational Float
    pi oo alpha beta theta phi mu omega
"""
WORDS = frozenset(FORMULA_WORDS.split())
"""The words of a formula: functions of sympy that compute from numbers and symbols alone. One that
is added must not evaluate text, open a file or start a program, whatever its arguments."""


@dataclass(frozen=True)
class Evaluation:
    """How a verifier evaluates text.

    Attributes:
        language: of the text.
        names: the variables that a text in Python could read.
    """

    language: Language
    names: frozenset[str]

    def keep_harmless(self, text: str) -> str:
        """Return `text` if evaluating it runs no code but arithmetic, else a text that cannot be
        evaluated: the verifier then gives what it gives to any text that it cannot read."""
        is_python = self.language == "python"
        is_harmless = is_literal(text, self.names) if is_python else is_formula(text)
        return text if is_harmless else UNREADABLE


def find_evaluations(function: Callable[..., Any], owner: type | None = None) -> list[Evaluation]:
    """Find how a verifier evaluates text, one entry a language; empty: it does not.

    Args:
        function: the verifier, or a method of `owner`.
        owner: the class whose methods it may call.
    """
    functions = list_functions(function, owner)
    # `eval` sees what its caller does. Which function calls it is not known, so all of them count.
    names = set(vars(builtins))
    languages: set[Language] = set()
    for called in functions:
        names.update(called.__globals__)
        for code in list_code(called):
            names.update(code.co_varnames, code.co_cellvars, code.co_freevars)
            languages.update(EVALUATORS[name] for name in code.co_names if name in EVALUATORS)
    return [Evaluation(language, frozenset(names)) for language in sorted(languages)]


def list_functions(function: Callable[..., Any], owner: type | None = None) -> list[FunctionType]:
    """List a function, and all of its own library that it may call."""
    first = get_function(function)
    functions = [first] if first else []
    # The list grows while it is read, until no function calls a further one.
    for caller in functions:
        # Other libraries are trusted with what the verifier hands them.
        library = caller.__module__.partition(".")[0]
        for name in {name for code in list_code(caller) for name in code.co_names}:
            for value in (getattr(owner, name, None), caller.__globals__.get(name)):
                called = get_function(value)
                is_own = called is not None and called.__module__.partition(".")[0] == library
                if called and is_own and called not in functions:
                    functions.append(called)
    return functions


def get_function(value: Any) -> FunctionType | None:
    """Return the function of a method, or a function itself; None for anything else."""
    function = getattr(value, "__func__", value)
    return function if isinstance(function, FunctionType) else None


def list_code(function: FunctionType) -> list[CodeType]:
    """List the code of a function and of the functions written inside it."""
    codes = [function.__code__]
    for code in codes:
        codes.extend(part for part in code.co_consts if isinstance(part, CodeType))
    return codes


def is_literal(text: str, names: frozenset[str]) -> bool:
    """Return whether Python finds in a text a literal, an unknown name, or no expression at all."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        # Nothing is evaluated: boards and rows of numbers, which are right answers, are so.
        return True
    except (MemoryError, RecursionError):
        return False
    # A row of letters is a name to Python. Only one that has a value could say what it does not.
    if isinstance(tree.body, ast.Name):
        return tree.body.id not in names
    try:
        ast.literal_eval(tree)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def is_formula(text: str) -> bool:
    """Return whether a text has only numbers, variables of one letter, and functions of
    mathematics."""
    # sympy knows hundreds of names, and some of them start programs or evaluate text again.
    if not EXPRESSION.fullmatch(text) or ATTRIBUTE.search(text):
        return False
    return all(word in WORDS or SYMBOL.fullmatch(word) for word in WORD.findall(text))
