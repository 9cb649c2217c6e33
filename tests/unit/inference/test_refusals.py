"""How servers refuse a request that cannot be read: one line that names the field."""

import time

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel

from tuneloop.inference.refusals import REFUSAL_S, Refused, create_app


class Body(BaseModel):
    count: int


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[1]", "body"),
        (b"{}", "count"),
        (b'{"count": "x"}', "count"),
    ],
)
def test_a_body_that_cannot_be_read_is_named(sent: bytes, field: str) -> None:
    app = create_app(400)

    @app.post("/take")
    def take(body: Body) -> int:
        return body.count

    answer = TestClient(app).post(
        "/take", content=sent, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(f"{field}: ")


def test_who_is_to_try_again_is_told_when_and_who_is_refused_waits() -> None:
    app = create_app(400)

    @app.get("/refuse/{status}")
    def refuse(status: int) -> None:
        raise Refused(status, "no")

    client = TestClient(app)
    assert client.get("/refuse/503").headers["Retry-After"] == "1"
    assert "Retry-After" not in client.get("/refuse/409").headers
    begun = time.monotonic()
    answer = client.get("/refuse/401")
    assert time.monotonic() - begun >= REFUSAL_S, (
        "else each of many connections asks as often as it can"
    )
    assert (answer.status_code, answer.json(), answer.headers["Connection"]) == (
        401,
        {"error": "no"},
        "close",
    )
