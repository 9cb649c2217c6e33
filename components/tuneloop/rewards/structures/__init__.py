"""Structured output: `json_text` reads JSON that a policy writes, `schemas` validates it, `calls`
reads tool calls in the formats that models have, `call_answers` compares them with gold calls. The
rewards `tool_calls` and `json_schema` use them."""
