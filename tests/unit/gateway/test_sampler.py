"""When the sampler of a namespace is started, and when it is given back; and what a worker and a Job are told of it."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import until
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.server_token import VARIABLE
from tuneloop.gateway import sampler
from tuneloop.gateway.jobs import Jobs
from tuneloop.gateway.sampler import SamplerUse
from tuneloop.gateway.sessions import Wanted, read_settings
from tuneloop.inference.refusals import Refused


class Scale:
    """Takes note of what is asked of it, and fails as often as it is told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.failures: list[Exception] = []
        self.lock = threading.Lock()

    def __call__(self, namespace: str, replicas: int) -> None:
        with self.lock:
            self.asked.append((namespace, replicas))
            if self.failures:
                raise self.failures.pop()


def test_a_sampler_is_started_once_and_given_back_when_nobody_uses_it() -> None:
    use = SamplerUse(scale := Scale(), [], idle_s=0.5)
    for _ in range(3):
        use.note("a")
    assert scale.asked == [("a", 1)]
    until(lambda: ("a", 0) in scale.asked)
    use.note("a")
    assert scale.asked == [("a", 1), ("a", 0), ("a", 1)]


def test_a_sampler_of_a_gateway_before_this_one_is_given_back(caplog: pytest.LogCaptureFixture) -> None:
    scale = Scale()
    scale.failures = [Retryable("the API server does not answer")]
    SamplerUse(scale, ["a"], idle_s=0.2)
    until(lambda: scale.asked == [("a", 0), ("a", 0)])
    assert "the sampler of a is not given back: the API server does not answer" in caplog.text


def test_who_samples_is_told_that_it_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    use = SamplerUse(scale := Scale(), [], idle_s=60)
    scale.failures = [Refused(422, "no such Deployment")]
    with pytest.raises(Refused, match="no such Deployment"):
        use.note("a")
    use.note("a")
    assert scale.asked == [("a", 1), ("a", 1)], "it is tried again"
    monkeypatch.setattr(sampler, "LOOK_S", 0.0)
    use.note("a")
    assert len(scale.asked) == 3, "somebody else may have scaled it down"


def test_a_job_knows_the_sampler_and_its_token(tmp_path: Path) -> None:
    (config := tmp_path / "gateway.yaml").write_text("sampler: {deployment: shared}")
    jobs, told = Jobs.__new__(Jobs), list[Any]()
    jobs.config = config
    jobs.apps = SimpleNamespace(patch_namespaced_deployment_scale=lambda *given, **_: told.append(given))
    pod = jobs._job("session-1", Wanted(namespace="a"), "me", "s3://b/sessions/a/session-1")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][-2:] == ["--sampler", "http://shared:8000"]
    assert {"name": VARIABLE, "value": "/sampler/token"} in container["env"]
    assert {"name": "token", "secret": {"secretName": "shared", "optional": True}} in pod["volumes"]
    jobs.scale_sampler("a", 1)
    assert told == [("shared", "a", {"spec": {"replicas": 1}})]


def test_a_sampler_is_not_given_back_between_two_polls_of_a_result(tmp_path: Path) -> None:
    (config := tmp_path / "gateway.yaml").write_text("sampler: {idle: 30}")
    with pytest.raises(UserError, match=r"sampler.idle.*greater than or equal to 60"):
        read_settings(config)
