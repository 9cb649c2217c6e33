"""What clouds give to pods in exchange for the token of their account, and stores that open with nothing else.

STS and EKS' agent give out temporary keys of S3, and versitygw, a real S3, asks the same service for what it checks
signatures and session tokens with. Google's metadata server and Microsoft Entra give out bearer tokens, and the store
beside them takes the newest one alone.
"""

import base64
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import shutil
import socket
import socketserver
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.waiting import until

ROLE = "arn:aws:iam::123456789012:role/tuneloop"
CLIENT, TENANT = "11111111-2222-3333-4444-555555555555", "99999999-8888-7777-6666-555555555555"
PROTOCOL = "X-Vgw-Private-Protocol"
STORES = ("/bucket/", "/container/")
VERSITYGW = shutil.which(
    "versitygw",
    path=f"{os.environ.get('RIG_HOME', '/var/lib/rig')}/bin:{os.environ.get('PATH', '')}",
)
STS_ANSWER = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><SessionToken>{Token}</SessionToken>
<SecretAccessKey>{SecretAccessKey}</SecretAccessKey><Expiration>{Expiration}</Expiration>
<AccessKeyId>{AccessKeyId}</AccessKeyId></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""
STS_REFUSAL = """<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><Error><Type>Sender</Type>
<Code>InvalidIdentityToken</Code><Message>Incorrect token audience</Message></Error></ErrorResponse>"""


@dataclass
class TokenServices:
    """The services of all clouds.

    Attributes:
        token: of the pod's account, which they take.
        lifetime_s: of the keys and tokens that they give out.
        sessions: access key → the keys that S3 takes.
        bearer: the token that the other stores take.
        issued: how many keys and tokens were given out.
        is_away: they answer with 503.
        paths: of the requests for keys and tokens.
    """

    token: str = "the account's"
    lifetime_s: int = 3600
    sessions: dict[str, dict[str, str]] = field(default_factory=dict)
    bearer: str = ""
    issued: int = 0
    is_away: bool = False
    paths: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)

    def issue_keys(self) -> dict[str, str]:
        expiry = datetime.now(UTC) + timedelta(seconds=self.lifetime_s)
        keys = {
            "AccessKeyId": f"ASIA{secrets.token_hex(8).upper()}",
            "SecretAccessKey": secrets.token_hex(20),
            "Token": secrets.token_hex(30),
            "Expiration": expiry.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        self.issued += 1
        self.sessions[keys["AccessKeyId"]] = keys
        return keys

    def issue_bearer(self) -> bytes:
        self.issued += 1
        self.bearer = secrets.token_hex(20)
        answer = {
            "access_token": self.bearer,
            "expires_in": self.lifetime_s,
            "token_type": "Bearer",
        }
        return json.dumps(answer).encode()

    def answer(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the answer to a request for keys or tokens."""
        url = urlsplit(handler.path)
        self.paths.append(url.path)
        if self.is_away:
            return 503, b"away"
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if query.get("Action") == "AssumeRoleWithWebIdentity":
            if query["WebIdentityToken"] != self.token or query["RoleArn"] != ROLE:
                return 400, STS_REFUSAL.encode()
            return 200, STS_ANSWER.format(**self.issue_keys()).encode()
        if url.path == "/v1/credentials":
            if handler.headers["Authorization"] != self.token:
                return (
                    400,
                    b"(AccessDeniedException): Unauthorized Exception! EKS does not have permissions",
                )
            return 200, json.dumps(self.issue_keys()).encode()
        if url.path.startswith("/computeMetadata/v1/instance/service-accounts/default/"):
            # The metadata server knows the pod by its address: the test says by the token who it is.
            if handler.headers["Metadata-Flavor"] != "Google" or self.token != "the account's":
                return 403, b"Unable to generate access token; IAM returned 403 Forbidden"
            return 200, self.issue_bearer()
        assert url.path == f"/{TENANT}/oauth2/v2.0/token", url.path
        form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        if (form["client_assertion"], form["client_id"]) != (self.token, CLIENT):
            error = {
                "error": "invalid_client",
                "error_description": "AADSTS70021: No matching record",
            }
            return 401, json.dumps(error).encode()
        return 200, self.issue_bearer()

    def find_signing_key(self, query: dict[str, str]) -> tuple[int, Any]:
        """Answer versitygw, which never sees a secret itself."""
        session = self.sessions.get(query["accessKeyId"])
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if session is None or session["Expiration"] < now:
            return 403, {"error": "no such keys", "code": "InvalidToken"}
        if query.get("sessionToken") != session["Token"]:
            return 403, {"error": "another token", "code": "InvalidToken"}
        key = f"AWS4{session['SecretAccessKey']}".encode()
        for part in (query["date"], query["region"], query["service"], "aws4_request"):
            key = hmac.digest(key, part.encode(), hashlib.sha256)
        return 200, {"derivedKey": base64.b64encode(key).decode(), "roleArn": ROLE}


class Handler(BaseHTTPRequestHandler):
    """Answers for the services, and for stores that take their bearer tokens."""

    services: TokenServices

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        if not path.startswith(STORES):
            return self.reply(*self.services.answer(self, body))
        if self.headers["Authorization"] != f"Bearer {self.services.bearer}":
            return self.reply(401, b"")
        objects = self.services.objects
        if self.command == "PUT":
            objects[path] = body
            return self.reply(201, b"")
        self.reply(200 if path in objects else 404, objects.get(path, b""))

    do_POST = do_PUT = do_GET

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(body)),
            "ETag": '"1"',
            "x-goog-generation": "1",
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


class PrivateHandler(BaseHTTPRequestHandler):
    """Answers versitygw by the private protocol of its IAM service."""

    services: TokenServices

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = 200, dict[str, Any](protocol=1, minClient=1, accountId="123456789012")
        if self.path == "/private/derive-signing-key":
            status, answer = self.services.find_signing_key(query)
        elif self.path == "/private/evaluate-policy":
            row = ["allow"] * len(query["actions"])
            answer = {"decisions": [row] * len(query["resources"])}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header(PROTOCOL, "1")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@contextlib.contextmanager
def run_server(server: socketserver.BaseServer) -> Iterator[None]:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def make_certificate(directory: Path) -> ssl.SSLContext:
    """Write ``cert.pem``, for which SSL_CERT_FILE is to stand, and return what a server needs of it."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=here"
    extensions = ("subjectAltName=IP:127.0.0.1", "basicConstraints=critical,CA:FALSE")
    arguments = [*command.split(), "-keyout", "key.pem", "-out", "cert.pem"]
    for extension in extensions:
        arguments += ["-addext", extension]
    subprocess.run(arguments, cwd=directory, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
    return context


@contextlib.contextmanager
def serve_tokens(services: TokenServices, directory: Path) -> Iterator[tuple[str, str]]:
    """Serve the services; yield their URLs with and without TLS."""
    kind = type("Handler", (Handler,), {"services": services})
    secure = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    secure.socket = make_certificate(directory).wrap_socket(secure.socket, server_side=True)
    plain = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    with run_server(secure), run_server(plain):
        yield f"https://127.0.0.1:{secure.server_port}", f"http://127.0.0.1:{plain.server_port}"


@contextlib.contextmanager
def serve_real_s3(services: TokenServices, directory: Path) -> Iterator[str]:
    """Run versitygw, which takes the sessions of `services` alone; yield its URL."""
    assert VERSITYGW
    (directory / "data" / "bucket").mkdir(parents=True)
    kind = type("PrivateHandler", (PrivateHandler,), {"services": services})
    with contextlib.ExitStack() as stack:
        # A socket's path has at most 108 characters.
        socket_path = f"{stack.enter_context(tempfile.TemporaryDirectory())}/iam"
        private = stack.enter_context(UnixServer(socket_path, kind))
        stack.enter_context(run_server(private))
        with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as free:
            port = free.server_port
        arguments = ["--port", f"127.0.0.1:{port}", "--access", "root", "--secret", "rootroot"]
        arguments += ["--iam-standalone-endpoint", socket_path, "--iam-cache-disable", "--quiet"]
        command = [VERSITYGW, *arguments, "posix", str(directory / "data")]
        with (directory / "log").open("wb") as log:
            gateway = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            until(lambda: is_listening(port), child=gateway)
            yield f"http://127.0.0.1:{port}"
        finally:
            gateway.terminate()
            gateway.wait()


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
