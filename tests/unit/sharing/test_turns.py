"""Turns: one at a time, in order, and none for who is late; by model, by real threads, and by a process that froze."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit import toy
from tests.waiting import LIMIT_S, until
from tuneloop.core import fencing
from tuneloop.core.artifacts import Draft, find_manifest
from tuneloop.core.errors import EXIT_RETRY, EXIT_USER, Retryable, UserError
from tuneloop.core.store import Conflict
from tuneloop.sharing.lease_queue import LeaseQueue, LeaseRefused
from tuneloop.sharing.lease_storage import StoredLease, open_lease_group
from tuneloop.sharing.leases import SAFE, LeaseGroup, SilenceDetector
from tuneloop.sharing.sidecar import hold_lease, parse_arguments, serve_lease
from tuneloop.weights import pointer

PATIENCE = 6.0


class Group(RuleBasedStateMachine):
    """Attempts of several runs that ask, beat, fall silent, come back late, and end, each with a clock of its own."""

    @initialize(policy=st.sampled_from(["fifo", "lrs"]))
    def begin(self, policy: str) -> None:
        self.document = LeaseQueue(policy=policy, patience=PATIENCE)
        self.now = 0.0
        self.skew: dict[str, float] = {}
        self.silence: dict[str, SilenceDetector] = {}
        self.accepted: dict[
            str, float
        ] = {}  # holder's ticket → when it sent the last beat that was accepted
        self.numbers: dict[int, str] = {}
        self.passed: dict[str, list[str]] = {}  # who waits → runs served meanwhile
        self.count = 0

    def look(self, ticket: str) -> set[str]:
        return self.silence[ticket].find_silent(self.document, self.now + self.skew[ticket]) - {
            ticket
        }

    @rule(who=st.sampled_from("abcd"), skew=st.floats(-1e6, 1e6))
    def ask(self, who: str, skew: float) -> None:
        self.count += 1
        ticket = f"{who}.{self.count}"
        self.skew[ticket], self.silence[ticket], self.passed[ticket] = skew, SilenceDetector(), []
        self.document = self.document.add_waiter(ticket, who)
        self.look(ticket)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 7.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.skew)
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.skew)))
        if self.document.find_request(ticket) is None:
            with pytest.raises(LeaseRefused):
                self.document.renew(ticket)  # a late holder, an attempt that was given up
            return
        self.document = self.document.renew(ticket)
        self.accepted[ticket] = self.now

    @precondition(lambda self: self.skew)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.skew)))
        before, silent = self.document, self.look(ticket)
        try:
            after = before.grant(ticket, silent)
        except LeaseRefused:
            return
        assert after.number == before.number + 1 and after.number not in self.numbers
        self.numbers[after.number] = ticket
        if before.holder:  # no longer safe by the clock of who had it
            assert self.now >= self.accepted[before.holder.ticket] + SAFE * PATIENCE
        order = [seat.ticket for seat in before.list_waiters() if seat.ticket not in silent]
        assert order[0] == ticket
        for seat in after.waiting:
            self.passed[seat.ticket].append(after.holder.who)  # type: ignore[union-attr]
        self.accepted[ticket] = self.now
        self.document = after

    @precondition(lambda self: self.skew)
    @rule(data=st.data())
    def quit(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.skew)))
        held = self.document.holder
        self.document = self.document.release(ticket)
        if held and held.ticket != ticket:
            assert self.document.holder == held  # nobody ends another's turn

    @invariant()
    def nobody_starves(self) -> None:
        for seat in getattr(self, "document", LeaseQueue()).waiting:
            passed = self.passed[seat.ticket]
            if (
                self.document.policy == "lrs"
            ):  # under fifo the order of asking is asserted where it is taken
                assert all(passed.count(who) <= 1 for who in set(passed) - {seat.who})


TestGroup = Group.TestCase
TestGroup.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_who_is_next() -> None:
    """A ran before B did; both wait, A asked first. A third run is new."""
    document = LeaseQueue()
    for who in "AB":
        document = document.add_waiter(f"{who}1", who).grant(f"{who}1").release(f"{who}1")
    document = document.add_waiter("B2", "B").add_waiter("A2", "A").add_waiter("C1", "C")
    assert [seat.ticket for seat in document.list_waiters()] == ["B2", "A2", "C1"]
    least = document.model_copy(update={"policy": "lrs"})
    assert [seat.ticket for seat in least.list_waiters()] == ["A2", "B2", "C1"]
    with pytest.raises(LeaseRefused, match="A is to be served before"):
        least.grant("B2")
    assert least.grant("B2", silent={"A2"}).number == 3
    assert document.release_run("A").release_run("B").release_run("C").is_idle


def test_threads_take_turns(tmp_path: Path) -> None:
    """Six attempts of three runs over one file: never two at once, every number once, and yielded when one raises."""
    inside, numbers, lock = [0], [], threading.Lock()

    def run(who: str) -> None:
        for attempt in range(2):
            try:
                with open_lease_group(str(tmp_path), who=who, patience=10).acquire(
                    timeout=LIMIT_S
                ) as held:
                    with lock:
                        inside[0] += 1
                        numbers.append((held.number, inside[0]))
                    held.check()
                    time.sleep(0.01)
                    with lock:
                        inside[0] -= 1
                    if attempt:
                        raise KeyError(who)
            except KeyError:
                pass

    threads = [threading.Thread(target=run, args=(who,)) for who in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [(number, 1) for number in range(1, 7)]
    document = open_lease_group(str(tmp_path), who="a").read()
    assert document.is_idle and document.number == 6


FREEZES = """
import os, sys
from pathlib import Path
from tuneloop.core import fencing
from tuneloop.core.component import component
from tuneloop.sharing.lease_storage import open_lease_group

@component("metrics")
def stage(stage):
    print("began", flush=True)
    sys.stdin.readline()
    (stage.out / "late").write_text("late")

store, watched = Path(sys.argv[1]), sys.argv[2]
file = store / "lease.json"
turns = open_lease_group(str(store / "group"), who="first", patience=5)
with turns.acquire(file=file):
    os.environ[fencing.VARIABLE] = str(file)
    if not watched:  # only what is asked before a commit
        fencing._watch = lambda finished: None
    code = stage.run(["--metrics", str(store / "out")])
sys.exit(code)
"""


@pytest.mark.parametrize("watched", ["watched", ""])
def test_a_frozen_stage_commits_nothing(tmp_path: Path, watched: str) -> None:
    """A stage and its holder, stopped by SIGSTOP in the middle, lose their turn; woken up, they end with 75."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    first = subprocess.Popen(
        [sys.executable, "-c", FREEZES, str(tmp_path), watched], text=True, **pipes
    )
    assert first.stdout and first.stdout.readline() == "began\n"
    os.kill(first.pid, signal.SIGSTOP)
    frozen = time.monotonic()
    with open_lease_group(str(tmp_path / "group"), who="second", patience=5).acquire(
        timeout=LIMIT_S
    ) as held:
        assert time.monotonic() - frozen > 4.9 and held.number == 2
        os.kill(first.pid, signal.SIGCONT)
        _, said = first.communicate("go on\n", timeout=LIMIT_S)
        assert first.returncode == EXIT_RETRY and "lease 1 of group group was lost" in said
        assert find_manifest(str(tmp_path / "out")) is None
        document = held.group.read()
        assert (
            document.number == 2 and document.holder and document.holder.who == "second"
        )  # undisturbed


RELEASES = FREEZES.replace(
    '    print("began", flush=True)', '    fencing.release_lease()\n    print("began", flush=True)'
)


def test_a_stage_that_released_its_lease_commits_in_anothers_turn(tmp_path: Path) -> None:
    """Its holder ends the turn at once, and renews it no longer; that it runs out then ends nobody."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    first = subprocess.Popen(
        [sys.executable, "-c", RELEASES, str(tmp_path), "watched"], text=True, **pipes
    )
    assert first.stdout and first.stdout.readline() == "began\n"
    with open_lease_group(str(tmp_path / "group"), who="second", patience=5).acquire(
        timeout=LIMIT_S
    ) as held:
        assert held.number == 2 and find_manifest(str(tmp_path / "out")) is None
        grant = fencing.Grant.model_validate_json((tmp_path / "lease.json").read_bytes())
        until(lambda: fencing.read_clock() > grant.until + 1, child=first)
        said = first.communicate("go on\n", timeout=LIMIT_S)
        made = find_manifest(str(tmp_path / "out"))
        assert first.returncode == 0 and made and made.provenance["lease"]["number"] == 1, said
        assert held.renew().number == 2  # undisturbed


def test_what_needs_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an artifact nor the pointer to the newest weights is written by who is late; with a turn, it is named."""
    now = fencing.read_clock()
    grant = fencing.Grant(group="g", number=7, ticket="a.1", renewed=now - 9, until=now - 1)
    fencing.write_lease_grant(tmp_path / "lease.json", grant)
    monkeypatch.setenv(fencing.VARIABLE, str(tmp_path / "lease.json"))
    with pytest.raises(Retryable, match=r"lease 7 of group g was lost \d+\.\d s ago"):
        toy.sft(out=f"{tmp_path}/sft")
    with pytest.raises(
        Retryable, match="lease 7"
    ):  # asked last of all, right before it would stand
        Draft(f"{tmp_path}/sft").commit(stage="sft")
    with pytest.raises(Retryable, match="lease 7"):
        pointer.advance_pointer(f"{tmp_path}/weights", pointer.Latest(version=1, ref="x"))
    assert (
        find_manifest(f"{tmp_path}/sft") is None
        and pointer.read_pointer(f"{tmp_path}/weights") is None
    )
    fencing.write_lease_grant(
        tmp_path / "lease.json", grant.model_copy(update={"until": now + 600})
    )
    assert toy.sft(out=f"{tmp_path}/sft").provenance["lease"] == {
        "group": "g",
        "number": 7,
        "ticket": "a.1",
    }
    fencing.write_lease_grant(tmp_path / "lease.json", grant)
    with pytest.raises(Retryable, match="lease 7"):
        fencing.release_lease()  # too late: what was computed since may have been in another's turn
    assert not fencing.is_lease_released()
    (tmp_path / "lease.json").unlink()
    with pytest.raises(Retryable, match="who holds it has ended"):
        toy.evaluate(out=f"{tmp_path}/check", policy=f"{tmp_path}/sft")


def test_stopped_while_waiting(tmp_path: Path) -> None:
    """A wait ends by `stop` or in time, and leaves no seat behind."""
    stop = threading.Event()
    stop.set()
    with open_lease_group(str(tmp_path), who="a", patience=30).acquire() as held:
        for about in ({"stop": stop}, {"timeout": 0}):
            with pytest.raises(Retryable, match="lease: "):
                open_lease_group(str(tmp_path), who="b", patience=30).acquire(**about).__enter__()
        with pytest.raises(
            UserError, match=r"cluster\.share\.patience: 5: the runs of group .* say 30\.0"
        ):
            open_lease_group(str(tmp_path), who="b", patience=5).acquire().__enter__()
        assert held.group.read().waiting == ()


class Failing(StoredLease):
    """A place in trouble: `reads` fail, and a write that gives the turn away stands, but is answered by `answer`."""

    def __init__(self, url: str, reads: int = 0, answer: Exception | None = None) -> None:
        super().__init__(url)
        self.reads, self.answer = reads, answer

    def read(self) -> tuple[LeaseQueue, bytes | None]:
        if self.reads:
            self.reads -= 1
            raise Retryable("503")
        return super().read()

    def write(self, document: LeaseQueue, seen: bytes | None) -> None:
        super().write(document, seen)
        if self.answer and document.holder:
            answer, self.answer = self.answer, None
            raise answer


@pytest.mark.parametrize("fault", [Conflict("409 to what was sent twice"), Retryable("no answer")])
def test_a_turn_whose_answer_was_lost_is_had(tmp_path: Path, fault: Exception) -> None:
    """The write stood; without an answer it would be a turn that nobody knows to have, renewed for ever."""
    place = Failing(str(tmp_path), answer=fault)
    with LeaseGroup(place, "g", who="a", patience=30).acquire(timeout=LIMIT_S) as held:
        assert place.answer is None and held.number == 1 and held.renew()
    assert place.read()[0].is_idle


@pytest.mark.parametrize(
    ("patience", "reads", "lost"),
    [(30, 0, False), (30, 1, False), (1.5, 1000, True)],
    ids=["well", "trouble", "away"],
)
def test_a_sidecar_that_is_started_again_goes_on(
    tmp_path: Path, patience: float, reads: int, lost: bool
) -> None:
    """With the turn that its file names, also through trouble of the API server that is shorter than the turn is safe.

    Where it is longer, the file says so, no other turn is asked for, and the seat is given back at the end.
    """
    place, file, stop = Failing(str(tmp_path)), tmp_path / "lease.json", threading.Event()
    turns = LeaseGroup(place, "g", who="a", patience=patience)
    held = turns.wait_for_grant(
        "a.1", LIMIT_S, threading.Event()
    )  # the sidecar before, killed: nobody has given its seat back
    fencing.write_lease_grant(file, held.grant)
    place.reads = reads
    sidecar = threading.Thread(target=hold_lease, args=(turns, file, stop), daemon=True)
    sidecar.start()

    def grant() -> fencing.Grant:
        return fencing.Grant.model_validate_json(file.read_bytes())

    until(lambda: grant().renewed > held.renewed or grant().until < 0)
    assert (grant().number, grant().until < 0) == (1, lost)
    place.reads = 0
    assert turns.read().holder
    stop.set()
    sidecar.join()
    assert turns.read().is_idle and turns.read().number == 1


def test_a_sidecar_gives_a_released_turn_back_and_asks_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when it is started again: it waits for the stage's end, as it would be started once more."""
    turns, file, stop = (
        open_lease_group(f"{tmp_path}/g", who="a", patience=30),
        tmp_path / "lease.json",
        threading.Event(),
    )
    monkeypatch.setenv(fencing.VARIABLE, str(file))
    for _ in range(2):
        sidecar = threading.Thread(target=hold_lease, args=(turns, file, stop), daemon=True)
        sidecar.start()
        until(file.exists)
        fencing.release_lease()
        until(lambda: turns.read().is_idle)
        assert sidecar.is_alive() and turns.read().number == 1
        stop.set()
        sidecar.join()
        stop.clear()
    assert fencing.check_lease()["number"] == 1, "what was computed in it may be committed"


def test_a_sidecar_whose_turn_is_another_s_asks_for_none(tmp_path: Path) -> None:
    turns, file, stop = (
        open_lease_group(str(tmp_path), who="a", patience=30),
        tmp_path / "lease.json",
        threading.Event(),
    )
    fencing.write_lease_grant(file, turns.wait_for_grant("a.1", LIMIT_S, threading.Event()).grant)
    turns.release_all()
    stop.set()
    with open_lease_group(str(tmp_path), who="b", patience=30).acquire(timeout=LIMIT_S) as held:
        hold_lease(turns, file, stop)
        assert fencing.Grant.model_validate_json(file.read_bytes()).until < 0
        assert held.renew() and held.group.read().waiting == ()


def test_a_run_that_its_group_refuses_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The sidecar says why in the file, which lets the stage start, and stays: it would be started again for ever."""
    file, stop = tmp_path / "lease.json", threading.Event()
    flags = parse_arguments(
        ["--group=g", "--run=b", "--namespace=n", f"--file={file}", "--patience=20"]
    )
    with open_lease_group(f"{tmp_path}/g", who="a", patience=30).acquire() as held:
        sidecar = threading.Thread(
            target=serve_lease, args=(f"{tmp_path}/g", flags, stop), daemon=True
        )
        sidecar.start()
        until(file.exists)
        monkeypatch.setenv(fencing.VARIABLE, str(file))
        assert toy.sft.run(["--checkpoint", f"{tmp_path}/sft"]) == EXIT_USER
        line = "error: lease: 'g': cluster.share.patience: 20.0: the runs of group g say 30.0: say the same, or"
        assert line in capfd.readouterr().err and find_manifest(f"{tmp_path}/sft") is None
        assert sidecar.is_alive() and held.group.read().waiting == ()
        stop.set()
        sidecar.join()
