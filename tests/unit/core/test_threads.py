import threading

import pytest

from tests.waiting import LIMIT_S
from tuneloop.core.threads import map_ahead


def test_it_is_map() -> None:
    for count in range(9):
        for threads in (1, 3):
            assert [*map_ahead(str, range(count), threads)] == [*map(str, range(count))]


def test_the_next_is_made_while_the_caller_has_one_in_hand_and_no_more() -> None:
    begun = [threading.Event() for _ in range(3)]

    def make(item: int) -> tuple[int, int]:
        begun[item].set()
        return item, threading.get_ident()

    made = map_ahead(make, range(3))
    item, thread = next(made)
    assert item == 0 and thread != threading.get_ident()
    assert begun[1].wait(LIMIT_S) and not begun[2].is_set()
    assert [item for item, _ in made] == [1, 2]


def test_an_error_comes_in_its_turn_and_no_thread_is_left() -> None:
    before = threading.active_count()
    made = map_ahead(lambda item: 1 // item, [1, 0, 1])
    assert next(made) == 1
    with pytest.raises(ZeroDivisionError):
        next(made)
    left = map_ahead(str, range(9))
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert threading.active_count() <= before
