from typing import Any

import pytest

from tuneloop.workflow.expression_values import ExpressionError, format_value
from tuneloop.workflow.expressions import evaluate_expression, evaluate_when, substitute_tags

SCOPE = {
    "inputs.parameters.iteration": "3",
    "inputs.parameters.new-policy": "p@sha256:1",
    "workflow.parameters.iterations": "10",
    "tasks.next.status": "Skipped",
    "tasks.reward.outputs.parameters.mean-reward": "0.25",
    "item": '{"a":"1"}',
    "item.a": "1",
    "lastRetry.in": "x",
}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("asInt(inputs.parameters.iteration) + 1 < asInt(workflow.parameters.iterations)", True),
        ("asFloat(tasks.reward.outputs.parameters['mean-reward']) >= 0.25", True),
        ("inputs.parameters['new-policy']", "p@sha256:1"),
        ("tasks.next.status == 'Succeeded' ? tasks.next.outputs.x : 'kept'", "kept"),
        ("true || unknown", True),
        ("item.a", "1"),
        ("1 + 2 * 3 - 4", 3),
        ("(1 + 2) * 3", 9),
        ("7 / 2", 3.5),
        ("7 % 3", 1),
        ("-7 % 3", -1),
        ("'3' == 3", False),
        ("1 == true", False),
        ("2 in [1, 2]", True),
        ("2 not in [1, 2]", False),
        ("'v12' matches '^v[0-9]+$'", True),
        ("!(1 > 2) and not false", True),
        ("[1, 'a', nil][1]", "a"),
        ("int('4') + len('ab')", 6),
        ('"tab\\t" + \'it\\\'s "quoted"\'', 'tab\tit\'s "quoted"'),
        ("!true == false && false ? 1 : 2 > 1 ? 'b' : 'c'", "b"),
        ("lastRetry.in", "x"),
        ("1e3 > 999.5", True),
    ],
)
def test_value(expression: str, value: Any) -> None:
    assert evaluate_expression(expression, SCOPE) == value
    assert type(evaluate_expression(expression, SCOPE)) is type(value)


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("unknown.name", "unknown name 'unknown'"),
        ("sprig.upper('a')", "the function sprig.upper is not supported"),
        ("jsonpath('{}', '$.a')", "the function jsonpath is not supported"),
        ("filter([1], 2)", "the function filter is not supported"),
        ("filter([1], {# > 0})", "unexpected '{'"),
        ("1..3", "unexpected '..'"),
        ("[1, 2][0:1]", "slices"),
        ("1 |  2", r"unexpected '\|'"),
        ("'3' + 1", "asInt"),
        ("'3' < 4", "cannot compare"),
        ("asInt('3.5')", "not an integer"),
        ("asInt('')", "not an integer"),
        ("tasks.next.outputs.parameters.x", "cannot take 'parameters' of null"),
        ("1 / 0", "division by zero"),
        ("[1][3]", "out of range"),
        ("nil ?? 1", r"unexpected '\?\?'"),
        ("tasks?.next", r"unexpected '\?\.'"),
        ("2 ** 3", r"unexpected '\*\*'"),
        ("{'a': 1}", "unexpected '{'"),
        ("'abc' contains 'b'", "unexpected 'contains'"),
        ("1 if true else 2", "unexpected 'if'"),
        ("1 < 2 < 3", "needs parentheses"),
        ("(1, 2)", "unexpected"),
        ("`raw`", "unexpected '`'"),
        ("'\\d'", "is not text"),
        ("1 +", "unexpected"),
        ("(1", "unexpected"),
        ("'a' 'b'", "unexpected"),
        ("1 && true", "needs true or false"),
        ("@", "unexpected '@'"),
    ],
)
def test_refused(expression: str, told: str) -> None:
    with pytest.raises(ExpressionError, match=told.replace("(", r"\(")) as caught:
        evaluate_expression(expression, SCOPE)
    assert expression in str(caught.value)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.5, "0.5"),
        (3.0, "3"),
        (1e-7, "1e-7"),
        (1e-6, "0.000001"),
        (1e21, "1e+21"),
        (0.1 + 0.2, "0.30000000000000004"),
        (True, "true"),
        ("a", "a"),
        ([1, "a"], '[1,"a"]'),
        ({"b": 1, "a": 2.5}, '{"a":2.5,"b":1}'),
        ({"größe": "größer"}, '{"größe":"größer"}'),
    ],
)
def test_text_is_what_go_writes(value: Any, written: str) -> None:
    assert format_value(value) == written


def test_tags_in_nested_values() -> None:
    value = {
        "args": ["--n={{ inputs.parameters.iteration }}", 3],
        "next": "{{=asInt(inputs.parameters.iteration) + 1}}",
    }
    assert substitute_tags(value, SCOPE) == {"args": ["--n=3", 3], "next": "4"}


@pytest.mark.parametrize(
    "tag", ["{{tasks.other.outputs.parameters.x}}", "{{=tasks.next.outputs}}", "{{inputs}}"]
)
def test_tags_without_value_are_errors(tag: str) -> None:
    with pytest.raises(ExpressionError):
        substitute_tags(tag, SCOPE)


def test_an_artifact_is_no_text() -> None:
    with pytest.raises(ExpressionError, match="failed to resolve"):
        substitute_tags("{{x}}", {"x": object()})


@pytest.mark.parametrize(
    ("when", "holds"),
    [
        ("", True),
        ("true", True),
        ("3 < 10", True),
        ("10 < 9", False),
        ("a == b", False),
        ("Succeeded == Succeeded && 3 >= 2", True),
        ("'two words' == \"two words\"", True),
        ("'' != ''", False),
        ("x in (x, y)", True),
        ("!(a == b) || false", True),
        ("'v3' =~ '^v'", True),
    ],
)
def test_when(when: str, holds: bool) -> None:
    assert evaluate_when(when) is holds


@pytest.mark.parametrize("when", ["a-b == c", "== x", "two words == x", "3", "'3' > 2", "{{=x}}"])
def test_faulty_when(when: str) -> None:
    with pytest.raises(ExpressionError, match="'when' expression"):
        evaluate_when(when)
