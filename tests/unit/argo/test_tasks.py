"""References of one template to another's values."""

from hera.expr import g

from tuneloop.argo.tasks import expression_parameter, output_term, tag_parameter, task_tag


def test_an_output_of_a_graph_is_a_tag_or_an_expression() -> None:
    tag = tag_parameter("mean", task_tag("train", "mean"))
    assert tag.value_from is not None and tag.value_from.expression is None
    assert tag.value_from.parameter == "{{tasks.train.outputs.parameters.mean}}"
    choice = g.inputs.parameters.target == output_term("train", "mean")
    expression = expression_parameter("is-done", choice)
    assert expression.value_from is not None and expression.value_from.parameter is None
    assert expression.value_from.expression == (
        "inputs.parameters.target == tasks.train.outputs.parameters.mean"
    )
