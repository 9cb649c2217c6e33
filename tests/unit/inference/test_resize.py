"""A server whose pod requests less while it sleeps, beside an API server of the test's own, over HTTPS."""

import base64
import datetime
import http.server
import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.unit.inference.rollout_server import BODY, ask, serving
from tests.waiting import until

ASLEEP = {"cpu": "100m", "memory": "1Gi"}
AWAKE = {"cpu": "2", "memory": "4352Mi"}
PATH = "/api/v1/namespaces/tuneloop/pods/a-run-serve-1/resize"
FLAGS = ("--asleep", json.dumps(ASLEEP))


class Api(http.server.ThreadingHTTPServer):
    """An API server with one pod, which its kubelet has resized by the second look; `trouble`: status and message."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.actual = dict(AWAKE), dict(AWAKE)
        self.trouble: tuple[int, str] | None = None
        self.pending = ""
        self.bodies: list[dict[str, Any]] = []

    @property
    def pod(self) -> dict[str, Any]:
        def container(requests: dict[str, str]) -> list[dict[str, Any]]:
            about = {"limits": {"memory": "4352Mi"}, "requests": dict(requests)}
            return [{"name": "wait", "resources": {}}, {"name": "main", "resources": about}]

        conditions = [
            {"type": "PodResizePending", "reason": self.pending, "message": "too little cpu"}
        ]
        status = {
            "containerStatuses": container(self.actual),
            "conditions": conditions if self.pending else [],
        }
        return {"spec": {"containers": container(self.requests)}, "status": status}


class Handler(http.server.BaseHTTPRequestHandler):
    server: Api

    def do_PATCH(self) -> None:
        api, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Content-Type"] == "application/strategic-merge-patch+json"
        assert self.path == PATH and self.headers["Authorization"].startswith("Bearer h.")
        (container,) = body["spec"]["containers"]
        assert container["name"] == "main" and [*container["resources"]] == ["requests"], (
            "limits stay"
        )
        api.bodies.append(container["resources"]["requests"])
        if api.trouble and api.bodies[-1]:
            return self.answer(api.trouble[0], {"kind": "Status", "message": api.trouble[1]})
        if not api.pending:
            api.actual = dict(api.requests)
        api.requests |= api.bodies[-1]
        self.answer(200, api.pod)

    def answer(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


def make_certificate(files: Path) -> ssl.SSLContext:
    """What proves that the server is 127.0.0.1, and in `files` what a pod knows it by."""
    key, name = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "api")]),
    )
    now, address = (
        datetime.datetime.now(datetime.UTC),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    )
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    )
    made = (
        made.serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
    )
    made = made.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    signed = made.add_extension(x509.BasicConstraints(True, None), critical=True).sign(
        key, hashes.SHA256()
    )
    (files / "ca.crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    how = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (files / "api.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *how))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files / "ca.crt", files / "api.key")
    return context


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    said = {
        "kubernetes.io": {"namespace": "tuneloop", "pod": {"name": "a-run-serve-1", "uid": "1"}}
    }
    claims = base64.urlsafe_b64encode(json.dumps(said).encode()).decode().rstrip("=")
    (tmp_path / "token").write_text(f"h.{claims}.s")
    with Api() as server:
        server.socket = make_certificate(tmp_path).wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        monkeypatch.setenv("ACCOUNT_FILES", str(tmp_path))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_address[1]))
        yield server
        server.shutdown()


def sleep(address: str, asleep: bool = True) -> None:
    assert ask(address, "POST", "/sleep" if asleep else "/wake_up")[0] == 200


def read_until(child: Any, words: str) -> list[str]:
    """Lines that the server wrote, up to that with these words."""
    lines: list[str] = []
    while not lines or words not in lines[-1]:
        lines.append(child.stderr.readline())
        assert lines[-1], lines
    return lines


def test_a_pod_requests_less_while_its_server_sleeps_and_then_what_it_was_made_with(
    api: Api,
) -> None:
    with serving(*FLAGS) as (child, address):
        for _ in range(2):
            sleep(address)
            read_until(child, "its pod requests cpu 100m, memory 1Gi while it sleeps, after ")
            assert api.actual == ASLEEP
            sleep(address, False)
            sleep(address, False)  # as a client does with each version that it loads
            read_until(child, "its pod requests cpu 2, memory 4352Mi awake, after ")
            assert api.actual == AWAKE
        assert ask(address, "POST", "/generate", BODY)[0] == 200
    assert [body for body in api.bodies if body] == [ASLEEP, AWAKE] * 2
    assert api.bodies[0] == {}, "it first looks at what it was made with"


def test_what_is_refused_is_said_once_and_the_server_serves(api: Api) -> None:
    api.trouble = 403, 'pods "a-run-serve-1" is forbidden: cannot patch resource "pods/resize"'
    with serving(*FLAGS) as (child, address):
        for count in (1, 2):
            sleep(address)
            until(lambda count=count: api.bodies.count(ASLEEP) == count, child=child)
            sleep(address, False)
        api.trouble = None
        sleep(address)
        lines = read_until(child, "while it sleeps")
        sleep(address, False)
        assert ask(address, "POST", "/generate", BODY)[0] == 200
    refused = [line for line in lines if "its pod's requests do not change" in line]
    assert len(refused) == 1 and 'refused (403): pods "a-run-serve-1" is forbidden' in refused[0], (
        lines
    )


@pytest.mark.parametrize("reason", ["Deferred", "Infeasible"])
def test_a_pod_that_cannot_grow_at_once_serves_with_what_it_has(api: Api, reason: str) -> None:
    with serving(*FLAGS) as (child, address):
        sleep(address)
        read_until(child, "while it sleeps")
        api.pending = reason
        sleep(address, False)
        said = f"its pod cannot request cpu 2, memory 4352Mi awake ({reason}: too little cpu); the server continues"
        read_until(child, said)
        assert ask(address, "POST", "/generate", BODY)[0] == 200
        assert api.requests == AWAKE and api.actual == ASLEEP


def test_an_api_server_in_trouble_is_asked_again(api: Api) -> None:
    api.trouble = 503, "etcd is away"
    with serving(*FLAGS) as (child, address):
        sleep(address)
        until(lambda: ASLEEP in api.bodies, child=child)
        api.trouble = None
        read_until(child, "while it sleeps")
        assert api.actual == ASLEEP


def test_outside_of_a_pod_it_does_nothing_and_says_so(tmp_path: Path) -> None:
    with serving(*FLAGS, ACCOUNT_FILES=str(tmp_path / "none")) as (child, address):
        sleep(address)
        sleep(address, False)
        assert ask(address, "POST", "/generate", BODY)[0] == 200
        assert child.poll() is None
