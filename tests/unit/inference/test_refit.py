"""A fleet is brought to a version whatever happens to it meanwhile, or it is said that it was not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.making import checkpoint_artifact
from tests.unit.inference.crew import Crew
from tuneloop.cli import run_cli
from tuneloop.core.errors import Retryable, UserError
from tuneloop.inference.fleet import Worker, dns, dynamo, open_fleet, urls
from tuneloop.inference.fleet.refit import Target, make_target, refit_fleet
from tuneloop.inference.fleet.service import Service

NEW = Target("7@sha256:0123", "/store/v7/model")
CHANGED = [
    *(
        "get_weight_version",
        "pause_generation",
        "update_weights_from_disk",
        "flush_cache",
        "resume_generation",
    ),
    "get_weight_version",
]


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew()
    yield made
    for name in list(made.servers):
        made.lose(name)


@dataclass
class Listed:
    """The fleet of a crew, through what a frontend would say; `looks` happen at each look, one after the other."""

    crew: Crew
    looks: list[Callable[[], object]] = field(default_factory=list)
    endpoint = None

    def discover(self) -> list[Worker]:
        if self.looks:
            self.looks.pop(0)()
        return dynamo.read_workers(self.crew.listed())


def test_each_worker_is_paused_updated_flushed_resumed_and_asked(crew: Crew) -> None:
    members = [crew.hire("a"), crew.hire("b")]
    done = refit_fleet(Listed(crew), NEW)
    assert (done.passes, set(done.workers)) == (2, {"backend/a", "backend/b"})
    assert done.urls == [crew.url("a"), crew.url("b")]
    assert all(m.calls == CHANGED and m.version == NEW.label and not m.paused for m in members)
    assert all(0 < paused <= done.seconds for paused in done.workers.values())


def test_who_has_the_version_is_left_alone_but_never_paused(crew: Crew) -> None:
    """A refit that was killed leaves a worker paused; the next one resumes it."""
    member = crew.hire("a")
    refit_fleet(Listed(crew), NEW)
    member.calls.clear()
    member.paused = True
    assert refit_fleet(Listed(crew), NEW).workers == {"backend/a": 0.0}
    assert not member.paused and member.calls == ["get_weight_version", "resume_generation"]
    refit_fleet(Listed(crew), NEW, force=True)
    assert "update_weights_from_disk" in member.calls


def test_a_fleet_that_grows_and_shrinks_meanwhile(crew: Crew) -> None:
    crew.hire("a").on_update = lambda: crew.hire("late")
    crew.hire("b")
    done = refit_fleet(Listed(crew, [lambda: None, lambda: crew.fire("b")]), NEW)
    assert set(done.workers) == {"backend/a", "backend/late"} and done.passes == 3
    assert crew.members["late"].version == NEW.label


def test_a_fleet_that_does_not_come_to_rest(crew: Crew) -> None:
    fleet = Listed(crew, [lambda: crew.hire(f"w{len(crew.members)}")] * 9)  # type: ignore[list-item]
    with pytest.raises(Retryable, match="5 passes found 5 workers, and new ones each time"):
        refit_fleet(fleet, NEW)
    assert len(fleet.looks) == 4


@pytest.mark.parametrize("fault", ["pause_generation", "update_weights_from_disk", "flush_cache"])
def test_a_worker_that_fails_is_resumed_and_told_of(crew: Crew, fault: str) -> None:
    bad, good = crew.hire("bad", fault), crew.hire("good")
    with pytest.raises(
        Retryable, match=f"worker backend/bad at http.*: {fault}: answers 200: .*failed"
    ):
        refit_fleet(Listed(crew), NEW)
    assert bad.calls[-1] == "resume_generation" and not bad.paused
    assert good.version == NEW.label and not good.paused
    bad.fault = ""
    assert refit_fleet(Listed(crew), NEW).workers["backend/good"] == 0.0


def test_a_worker_that_says_done_and_is_not(crew: Crew) -> None:
    crew.hire("a", "forgets")
    with pytest.raises(Retryable, match="serves nothing after an update to 7@"):
        refit_fleet(Listed(crew), NEW)


def test_a_worker_that_is_gone_counts_no_more_one_that_is_only_silent_does(crew: Crew) -> None:
    crew.hire("a")
    crew.hire("b")
    crew.lose("b")
    with pytest.raises(Retryable, match=r"worker backend/b at .*ConnectionRefused"):
        refit_fleet(Listed(crew), NEW, timeout_s=20)
    assert set(refit_fleet(Listed(crew, [lambda: None, lambda: crew.fire("b")]), NEW).workers) == {
        "backend/a"
    }


def test_no_worker(crew: Crew) -> None:
    with pytest.raises(Retryable, match="1 passes found no worker"):
        refit_fleet(Listed(crew), NEW, passes=1)


def test_command(crew: Crew, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = checkpoint_artifact(tmp_path / "policy", version=7)
    for name in ("a", "b"):
        crew.hire(name)
    fleet = ",".join(crew.url(name) for name in crew.servers)
    assert run_cli(["fleet", "status", fleet]) == 1, "nobody serves anything"
    assert run_cli(["fleet", "refit", fleet, policy.ref]) == 0
    assert "served by 2 workers, 2 got it now, paused for" in capsys.readouterr().out
    assert run_cli(["fleet", "status", fleet]) == 0
    assert capsys.readouterr().out.count(f"7@{policy.manifest.digest}") == 2


def test_backends(crew: Crew) -> None:
    crew.hire("a")
    port = crew.servers["a"].server_address[1]
    written = open_fleet(f"http://127.0.0.1:{port}/, http://127.0.0.1:9")
    assert isinstance(written, urls.Urls) and written.endpoint is None
    assert [w.url for w in written.discover()] == [crew.url("a")], "the other does not listen"
    named = open_fleet(f"dns://localhost:{port}")
    assert isinstance(named, dns.Dns) and named.endpoint is None
    assert f"http://127.0.0.1:{port}" in [w.url for w in named.discover()]
    graph = open_fleet("dynamo://graph.ours")
    assert isinstance(graph, dynamo.Dynamo) and (graph.name, graph.namespace, graph.port) == (
        "graph",
        "ours",
        8000,
    )


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("graph", "must be a URL"),
        ("ftp://a", "schemes: dns, dynamo, http"),
        ("http://a,b", "'b' must be an absolute URL"),
        ("dns://a", "must be dns://name:port"),
        ("service://a", "must be service://name.namespace"),
        ("dynamo://a.b.c", "must be dynamo://name.namespace"),
        ("dynamo://a.b:port", "must be dynamo://name.namespace"),
    ],
)
def test_a_fleet_that_is_none(url: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_fleet(url)


def test_a_graph_is_found_by_name_in_pods_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UserError, match="only pods can find a graph"):
        open_fleet("dynamo://graph.ours").discover()


def test_a_frontend_that_says_something_else(crew: Crew) -> None:
    crew.hire("a")
    said = crew.listed()
    with pytest.raises(UserError, match="protocol_version: 2"):
        dynamo.read_workers({**said, "protocol_version": 2})
    with pytest.raises(
        UserError, match="lacks pause_generation, system_url; start it with --enable-rl"
    ):
        routes = [name for name in said["workers"][0]["routes"] if name != "pause_generation"]
        dynamo.read_workers(
            {**said, "workers": [{**said["workers"][0], "routes": routes, "system_url": None}]}
        )
    with pytest.raises(Retryable, match="worker backend/a: timed out"):
        dynamo.read_workers({**said, "workers": [{**said["workers"][0], "error": "timed out"}]})


def test_what_workers_are_told(tmp_path: Path) -> None:
    policy = checkpoint_artifact(tmp_path / "policy", version=7)
    told = make_target(policy)
    assert told.label == f"7@{policy.manifest.digest}"
    assert Path(told.model) == policy.path / "model"


@pytest.mark.parametrize(
    ("status", "content"), [(503, b'{"message": "no healthy upstream"}'), (200, b"5")]
)
def test_an_answer_of_somebody_else_may_be_another_one_later(status: int, content: bytes) -> None:
    with pytest.raises(ValueError, match=f"answers {status}: "):
        dynamo.parse_answer(status, content)


def test_a_slice_without_ports_needs_one_in_the_url() -> None:
    endpoints = [{"addresses": ["10.0.0.1"]}]
    portless = {"addressType": "IPv4", "ports": None, "endpoints": endpoints}
    with pytest.raises(UserError, match=r"vllm\.ours': has no port; add the one"):
        list(Service("vllm", "ours", None)._list_workers(portless))
    (worker,) = Service("vllm", "ours", 8000)._list_workers(portless)
    assert worker.url == "http://10.0.0.1:8000"
    assert not list(Service("vllm", "ours", None)._list_workers({**portless, "endpoints": None}))
