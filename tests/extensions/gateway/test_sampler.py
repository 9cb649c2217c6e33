"""When the sampler of a namespace is started, and when it is given back; and what a worker and a Job are told of it."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.making import checkpoint_artifact
from tests.waiting import LIMIT_S, until
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.server_token import VARIABLE
from tuneloop.extensions.gateway import sampler
from tuneloop.extensions.gateway.jobs import Jobs
from tuneloop.extensions.gateway.messages import (
    CreateModel,
    CreateSampling,
    LoraConfig,
    OptimStep,
    Sample,
)
from tuneloop.extensions.gateway.resident import AdamParams
from tuneloop.extensions.gateway.sampler import SamplerUse
from tuneloop.extensions.gateway.session import Session
from tuneloop.extensions.gateway.sessions import SessionRequest, read_settings
from tuneloop.extensions.gateway.wire import Datum, ForwardBackward
from tuneloop.inference.refusals import Refused
from tuneloop.training.fsdp.ranks import Ranks

ID = "local.session-0123456789"


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
        use.start("a")
    assert scale.asked == [("a", 1)]
    until(lambda: ("a", 0) in scale.asked)
    use.start("a")
    assert scale.asked == [("a", 1), ("a", 0), ("a", 1)]


def test_a_sampler_of_a_gateway_before_this_one_is_given_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scale = Scale()
    scale.failures = [
        UserError("--config", "gateway.yaml", "is no YAML"),
        Retryable("the API server does not answer"),
    ]
    SamplerUse(scale, ["a"], idle_s=0.2)
    until(lambda: scale.asked == [("a", 0), ("a", 0), ("a", 0)])
    assert (
        "the sampler of a could not be scaled to 0: the API server does not answer" in caplog.text
    )
    assert "is no YAML" in caplog.text


def test_who_samples_is_told_that_it_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    use = SamplerUse(scale := Scale(), [], idle_s=60)
    scale.failures = [Refused(422, "no such Deployment")]
    for _ in range(2):
        with pytest.raises(Refused, match="no such Deployment"):
            use.start("a")
    assert scale.asked == [("a", 1)], "not asked again at once"
    monkeypatch.setattr(sampler, "LOOK_S", 0.0)
    use.start("a")
    use.start("a")
    assert len(scale.asked) == 3, "somebody else may have scaled it down"


def test_a_session_that_ends_while_its_samples_wait_for_the_sampler_saves_its_models(
    tmp_path: Path,
) -> None:
    base = checkpoint_artifact(tmp_path / "base", version=3)
    session = Session(
        ID,
        f"{tmp_path}/sessions/local/session-0123456789",
        lambda: Ranks("cpu"),
        "http://127.0.0.1:1",
    )
    asked = CreateModel(
        session_id=ID, base_model=base.ref, lora_config=LoraConfig(train_unembed=False, rank=0)
    )
    created = session.create_model(asked)
    inputs = {"target_tokens": np.array([6, 7, 8]), "weights": np.ones(3, np.float32)}
    given = ForwardBackward(
        f"{ID}:train:0", None, [Datum([5, 6, 7], inputs)], "cross_entropy", {}, False
    )
    session.forward_backward(b"a", given)
    stepped = session.optim_step(
        OptimStep(model_id=f"{ID}:train:0", adam_params=AdamParams(learning_rate=0.01))
    )
    session.create_sampling(
        CreateSampling(session_id=ID, sampling_session_seq_id=0, base_model=base.ref)
    )
    about = {
        "sampling_session_id": f"{ID}:sample:0",
        "prompt": {"chunks": [{"tokens": [5]}]},
        "sampling_params": {},
    }
    samples = [session.sample(Sample(seq_id=number, **about)) for number in (1, 2)]

    def work() -> None:
        while not saved.is_set():
            if entries := session.ledger.take(0.1):
                session.do(entries)

    saved = threading.Event()
    (thread := threading.Thread(target=work)).start()
    for request in (created, stepped):
        session.ledger.future(request).result(LIMIT_S)
    session.save_models().result(LIMIT_S)  # while both wait for a server that does not come
    saved.set()
    thread.join()
    assert Artifact(
        f"{tmp_path}/sessions/local/session-0123456789/train-0/weights/drained"
    ).manifest
    for sample in samples:
        with pytest.raises(Refused, match="its session is ending"):
            session.ledger.future(sample).result(0)


def test_a_job_knows_the_sampler_and_its_token(tmp_path: Path) -> None:
    (config := tmp_path / "gateway.yaml").write_text("sampler: {deployment: shared}")
    jobs, told = Jobs.__new__(Jobs), list[Any]()
    jobs.config, jobs.sampler = config, read_settings(config).sampler
    jobs.apps = SimpleNamespace(
        patch_namespaced_deployment_scale=lambda *given, **_: told.append(given)
    )
    pod = jobs._job(
        "session-1", SessionRequest(namespace="a"), "me", "s3://b/sessions/a/session-1"
    )["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][-2:] == ["--sampler", "http://shared:8000"]
    assert {"name": VARIABLE, "value": "/sampler/token"} in container["env"]
    assert {"name": "sampler-token", "secret": {"secretName": "shared"}} in pod["volumes"]
    jobs.scale_sampler("a", 1)
    assert told == [("shared", "a", {"spec": {"replicas": 1}})]


def test_a_sampler_is_not_given_back_between_two_polls_of_a_result(tmp_path: Path) -> None:
    (config := tmp_path / "gateway.yaml").write_text("sampler: {idle: 30}")
    with pytest.raises(UserError, match=r"sampler.idle.*greater than or equal to 60"):
        read_settings(config)
