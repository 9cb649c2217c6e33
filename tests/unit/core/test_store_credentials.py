"""Stores that are opened by a pod's identity, by keys with a session token, and by neither."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.objects import served
from tests.token_services import (
    CLIENT,
    ROLE,
    TENANT,
    VERSITYGW,
    TokenServices,
    serve_real_s3,
    serve_tokens,
)
from tuneloop.cli import run_cli
from tuneloop.core.errors import Unavailable, UserError
from tuneloop.core.store import Conflict, Store
from tuneloop.core.store_credentials import (
    AWS_KEYS,
    AZURE_KEYS,
    GOOGLE_KEYS,
    IDENTITIES,
    has_credentials,
)

KINDS = tuple(IDENTITIES)
STORES = {"irsa": "s3", "eks_pod_identity": "s3", "gke": "gs", "azure": "az"}
MARGIN_S = 300
"""obstore asks for new keys so long before those that it has expire."""
Set = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def cloud(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[TokenServices, str, str, Path]]:
    services = TokenServices()
    directory = tmp_path_factory.mktemp("cloud")
    with serve_tokens(services, directory) as (secure, plain):
        yield services, secure, plain, directory


@pytest.fixture(scope="module")
def s3(
    cloud: tuple[TokenServices, str, str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    if VERSITYGW is None:
        pytest.skip("needs versitygw, an S3 that checks signatures and session tokens")
    with serve_real_s3(cloud[0], tmp_path_factory.mktemp("s3")) as url:
        yield url


@pytest.fixture
def services(
    cloud: tuple[TokenServices, str, str, Path], tmp_path: Path, monkeypatch: Set
) -> TokenServices:
    """The services as they were at first, and a pod's environment without an identity."""
    services, _, _, directory = cloud
    services.__dict__.update(TokenServices().__dict__)
    for names in (AWS_KEYS, GOOGLE_KEYS, AZURE_KEYS):
        for name in names:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(directory / "cert.pem"))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "token").write_text(services.token)
    return services


@pytest.fixture
def set_identity(
    services: TokenServices,
    cloud: tuple[TokenServices, str, str, Path],
    tmp_path: Path,
    monkeypatch: Set,
) -> "SetIdentity":
    _, secure, plain, _ = cloud
    host = plain.removeprefix("http://")
    variables = {
        "irsa": {
            "AWS_ROLE_ARN": ROLE,
            "AWS_WEB_IDENTITY_TOKEN_FILE": f"{tmp_path}/token",
            "AWS_ENDPOINT_URL_STS": secure,
        },
        "eks_pod_identity": {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{plain}/v1/credentials",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": f"{tmp_path}/token",
        },
        "gke": {
            "GCE_METADATA_HOST": host,
            "GCE_METADATA_IP": host,
            "GOOGLE_BASE_URL": secure,
        },
        "azure": {
            "AZURE_CLIENT_ID": CLIENT,
            "AZURE_TENANT_ID": TENANT,
            "AZURE_FEDERATED_TOKEN_FILE": f"{tmp_path}/token",
            # As the webhook sets it, with a slash.
            "AZURE_AUTHORITY_HOST": f"{secure}/",
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_STORAGE_ENDPOINT": secure,
        },
    }
    return SetIdentity(variables, monkeypatch)


class SetIdentity:
    """Sets what a cloud sets in a pod, and returns the URL of a store that opens by it."""

    def __init__(self, variables: dict[str, dict[str, str]], monkeypatch: Set) -> None:
        self.variables = variables
        self.monkeypatch = monkeypatch

    def __call__(self, kind: str) -> str:
        self.monkeypatch.setenv("TUNELOOP_CREDENTIALS", kind)
        for name, value in self.variables[kind].items():
            self.monkeypatch.setenv(name, value)
        return f"{STORES[kind]}://{'container' if kind == 'azure' else 'bucket'}/runs"


def wait_for_next_fetch() -> None:
    """Wait longer than obstore leaves between two requests for keys that expire soon."""
    time.sleep(0.2)


@pytest.mark.parametrize("kind", ["irsa", "eks_pod_identity"])
def test_a_role_opens_a_real_s3(
    kind: str, s3: str, services: TokenServices, set_identity: SetIdentity, monkeypatch: Set
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    store = Store(f"{set_identity(kind)}-{kind}")
    store.check_writable()
    store.create("key", b"1")
    with pytest.raises(Conflict):
        store.create("key", b"2")
    store.swap("key", b"1", b"3")
    assert store.get("key") == b"3"
    assert store.keys() == ["key"]
    assert services.issued == 1, "keys that last are asked for once"
    # The S3 takes no others: neither of somebody else, nor these without their session token.
    keys = next(iter(services.sessions.values()))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys["SecretAccessKey"])
    monkeypatch.delenv("TUNELOOP_CREDENTIALS")
    with pytest.raises((UserError, Unavailable), match="InvalidToken"):
        Store(store.url).get("key")


@pytest.mark.parametrize("kind", ["irsa", "eks_pod_identity"])
def test_keys_are_replaced_before_they_expire(
    kind: str,
    s3: str,
    services: TokenServices,
    set_identity: SetIdentity,
    tmp_path: Path,
    monkeypatch: Set,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    services.lifetime_s = MARGIN_S - 100
    store = Store(f"{set_identity(kind)}-{kind}")
    store.put("key", b"1")
    first = set(services.sessions)
    # The kubelet replaces the account's token, too, in the same file.
    services.token = "the next one"
    (tmp_path / "token").write_text(services.token)
    services.sessions.clear()
    wait_for_next_fetch()
    assert store.get("key") == b"1"
    assert not first & set(services.sessions)
    # Keys that last are kept, and an S3 that does not take them anymore says so.
    services.lifetime_s = 2 * MARGIN_S
    wait_for_next_fetch()
    assert store.get("key") == b"1"
    services.sessions.clear()
    wait_for_next_fetch()
    with pytest.raises((UserError, Unavailable), match="InvalidToken"):
        store.get("key")


@pytest.mark.parametrize("kind", ["gke", "azure"])
def test_bearer_tokens_open_a_store_and_are_replaced(
    kind: str, services: TokenServices, set_identity: SetIdentity
) -> None:
    services.lifetime_s = 1
    store = Store(set_identity(kind))
    store.put("key", b"1")
    first = services.bearer
    wait_for_next_fetch()
    assert store.get("key") == b"1"
    assert services.bearer != first
    assert store.get("none") is None
    assert not any("//" in path for path in services.paths), "Entra's address ends with a slash"


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_token_is_one_line_and_exit_code_2(
    kind: str,
    services: TokenServices,
    set_identity: SetIdentity,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = set_identity(kind)
    services.token = "another's"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert run_cli(["store", "put", str(tmp_path / "model"), url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: store: '{url}")
    identity = IDENTITIES[kind]
    assert f"{identity.source} refuses the pod's account (" in line
    assert line.endswith(identity.grant)
    words = {
        "irsa": "InvalidIdentityToken",
        "eks_pod_identity": "AccessDeniedException",
        "gke": "IAM returned 403 Forbidden",
        "azure": "AADSTS70021",
    }
    assert words[kind] in line
    assert "the account's" not in line and "Debug" not in line


@pytest.mark.parametrize("kind", ["irsa", "eks_pod_identity", "azure"])
def test_a_pod_without_a_token_is_told_who_gives_it(
    kind: str, services: TokenServices, set_identity: SetIdentity, monkeypatch: Set, tmp_path: Path
) -> None:
    url = set_identity(kind)
    (tmp_path / "token").unlink()
    with pytest.raises(UserError, match=f"has no token for {IDENTITIES[kind].source}"):
        Store(url).get("key")
    variable = IDENTITIES[kind].variables[-1]
    monkeypatch.delenv(variable)
    with pytest.raises(
        UserError, match=rf"^cluster.credentials: '{kind}': {variable} is not set in the pod"
    ) as missing:
        Store(url)
    assert IDENTITIES[kind].setup in str(missing.value)


def test_a_token_that_is_no_header_is_refused(
    services: TokenServices, set_identity: SetIdentity, tmp_path: Path
) -> None:
    """obstore panics."""
    url = set_identity("eks_pod_identity")
    for text in ("token\n", "a\0b", "tökén"):
        (tmp_path / "token").write_text(text)
        with pytest.raises(UserError, match=r"^AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE: .*no token"):
            Store(url)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_beside_an_identity_are_refused(
    kind: str, services: TokenServices, set_identity: SetIdentity, monkeypatch: Set
) -> None:
    """obstore would take them, and nobody would notice until they expire."""
    url = set_identity(kind)
    variable = IDENTITIES[kind].keys[0]
    monkeypatch.setenv(variable, "hidden")
    with pytest.raises(UserError, match=f"{variable} is set in the pod, and would be used") as both:
        Store(url)
    assert "hidden" not in str(both.value)
    # A store of another cloud, such as one with the base model, has keys of its own.
    Store("memory:///x")


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_that_is_away_is_waited_for(
    kind: str, services: TokenServices, set_identity: SetIdentity, monkeypatch: Set
) -> None:
    url = set_identity(kind)
    services.is_away = True
    with pytest.raises(Unavailable, match=f"{IDENTITIES[kind].source} gives no credentials"):
        Store(url).get("key")


def test_session_tokens_open_a_real_s3_until_they_expire(
    s3: str, services: TokenServices, monkeypatch: Set
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    keys = services.issue_keys()
    for name, key in zip(AWS_KEYS, ("AccessKeyId", "SecretAccessKey", "Token")):
        monkeypatch.setenv(name, keys[key])
    store = Store("s3://bucket/session")
    store.check_writable()
    keys["Expiration"] = "2026-01-01T00:00:00Z"
    with pytest.raises(UserError, match="AWS_SESSION_TOKEN has expired, or is none of"):
        store.get("key")


def test_a_session_token_that_has_expired_is_named(monkeypatch: Set) -> None:
    """S3's own word for it."""
    monkeypatch.delenv("TUNELOOP_CREDENTIALS", raising=False)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t")
    answer = "<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"
    with served({}, monkeypatch, missing=(400, answer)):
        for work in (lambda s: s.get("k"), lambda s: s.keys(), lambda s: s.check_writable()):
            with pytest.raises(
                UserError, match=r"session token AWS_SESSION_TOKEN has expired.*\(ExpiredToken\)"
            ):
                work(Store("s3://b/x"))


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "file"])
def test_a_machine_has_credentials(
    scheme: str,
    services: TokenServices,
    set_identity: SetIdentity,
    monkeypatch: Set,
    tmp_path: Path,
) -> None:
    with contextlib.suppress(KeyError):
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    assert has_credentials(scheme) == (scheme == "file")
    if scheme == "s3":
        set_identity("eks_pod_identity")
    elif scheme == "gs":
        path = tmp_path / ".config/gcloud/application_default_credentials.json"
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    elif scheme == "az":
        set_identity("azure")
    assert has_credentials(scheme)
