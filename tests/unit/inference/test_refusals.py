"""How servers refuse a request that cannot be read: one line that names the field."""

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel

from tuneloop.inference.refusals import create_app


class Body(BaseModel):
    count: int


@pytest.mark.parametrize(
    ("sent", "field"), [(b"", "body"), (b"{", "body"), (b"[1]", "body"), (b"{}", "count"), (b'{"count": "x"}', "count")]
)
def test_a_body_that_cannot_be_read_is_named(sent: bytes, field: str) -> None:
    app = create_app(400)

    @app.post("/take")
    def take(body: Body) -> int:
        return body.count

    answer = TestClient(app).post("/take", content=sent, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(f"{field}: ")
