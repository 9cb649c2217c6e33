import random
import threading

import pytest

from tuneloop.extensions.gateway import ledger as module
from tuneloop.extensions.gateway.ledger import Entry, Ledger
from tuneloop.inference.refusals import Refused


def entry(fingerprint: str, batch: object = None) -> Entry:
    return Entry(fingerprint, lambda entries: [each.fingerprint for each in entries], batch=batch)


def work(ledger: Ledger) -> list[str]:
    """Do all that can be done; what it was, in order."""
    done = []
    while entries := ledger.take(0):
        done += [each.fingerprint for each in entries]
        for each, result in zip(entries, entries[0].work(entries)):
            ledger.finish(each, result)
    return done


def test_each_once_and_in_order_however_requests_arrive() -> None:
    ledger = Ledger()
    ledger.open("m", 0)
    order = [n for n in range(40) for _ in range(3)]  # each sent three times
    random.Random(0).shuffle(order)
    done: list[str] = []
    for part in range(0, len(order), 10):
        threads = [
            threading.Thread(target=ledger.submit, args=("m", n, entry(f"r{n}")))
            for n in order[part : part + 10]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done += work(ledger)
    assert done == [f"r{n}" for n in range(40)]
    assert ledger.future("m:7").result(0) == "r7"


def test_one_waits_for_those_before_it() -> None:
    ledger = Ledger()
    ledger.open("m", 1)
    ledger.submit("m", 2, entry("second"))
    assert ledger.take(0) == []
    ledger.submit("m", 1, entry("first"))
    assert work(ledger) == ["first", "second"]
    assert ledger.submit("m", None, entry("third")) == "m:3"


def test_a_number_is_one_request() -> None:
    ledger = Ledger()
    ledger.open("m", 0)
    assert ledger.submit("m", 0, entry("a")) == ledger.submit("m", 0, entry("a")) == "m:0"
    with pytest.raises(Refused, match="m:0 was another request; use a free number"):
        ledger.submit("m", 0, entry("b"))
    for wrong in ("m:1", "n:0", "m", ""):
        with pytest.raises(Refused, match="not known here"):
            ledger.future(wrong)
    with pytest.raises(Refused, match="not known here"):
        ledger.submit("n", 0, entry("a"))


def test_samples_are_taken_together_and_given_back_in_order() -> None:
    ledger = Ledger()
    ledger.open("s")
    for number, batch in enumerate("xyxx"):
        ledger.submit("s", number, entry(f"{batch}{number}", batch))
    taken = ledger.take(0)
    assert [each.fingerprint for each in taken] == ["x0", "x2", "x3"]
    ledger.put_first(taken)
    assert work(ledger) == ["x0", "x2", "x3", "y1"]


def test_old_results_are_dropped_and_never_applied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_RESULTS", 3)
    ledger = Ledger()
    ledger.open("m", 0)
    for number in range(6):
        ledger.submit("m", number, entry(f"r{number}"))
        work(ledger)
    with pytest.raises(Refused, match="not known here"):
        ledger.future("m:0")
    with pytest.raises(Refused, match="was applied"):
        ledger.submit("m", 0, entry("r0"))
    assert ledger.future("m:5").result(0) == "r5"


def test_requests_that_wait_for_one_that_never_comes_have_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each would be kept with all that it carries; the one that they wait for is taken."""
    monkeypatch.setattr(module, "KEPT_RESULTS", 3)
    ledger = Ledger()
    ledger.open("m", 0)
    for number in range(1, 7):
        ledger.submit("m", number, entry(f"r{number}"))
    with pytest.raises(Refused, match="m: 6 requests or results are waiting"):
        ledger.submit("m", 7, entry("r7"))
    assert ledger.submit("m", 6, entry("r6")) == "m:6", "a known one is the same"
    ledger.submit("m", 0, entry("r0"))
    assert work(ledger) == [f"r{number}" for number in range(7)]
    assert ledger.submit("m", 7, entry("r7")) == "m:7"


def test_results_that_were_fetched_go_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FETCHED_S", 0.0)
    ledger = Ledger()
    ledger.open("s")
    for name in ("fetched", "not yet"):
        ledger.submit("s", None, entry(name))
    work(ledger)
    assert ledger.future("s:1").result(0) == "fetched"
    monkeypatch.setattr(module, "SWEEP_S", 0.0)
    assert ledger.submit("s", None, entry("next")) == "s:3"
    with pytest.raises(Refused, match="not known here"):
        ledger.future("s:1")
    assert ledger.future("s:2").result(0) == "not yet" and work(ledger) == ["next"]
