import tracemalloc
from array import array
from collections.abc import Iterator

import pytest

from tuneloop.formats.token_files import Corpus, Document
from tuneloop.training.pairs import Mismatched, Pair, Pairs, build_document


def made(count: int, length: int) -> Iterator[tuple[str, Document]]:
    for i in range(count):
        n = length + i % 7
        ids = array("i", [(i * 31 + t) % 100_003 for t in range(n)])
        yield f"d{i}", Document(ids, array("b", [t % 3 == 2 for t in range(n)]))


def test_documents_come_back_as_they_went_in() -> None:
    wanted = [document for _, document in made(20, 1)]
    found = Corpus(made(20, 1))
    assert [*found] == wanted
    assert found[3:5] == wanted[3:5]
    assert found[-1] == wanted[-1]
    assert (len(found), found.tokens) == (20, sum(len(d.ids) for d in wanted))
    with pytest.raises(IndexError):
        found[20]
    assert max(len(d.ids) for d in found.extremes.values()) == 7
    assert max(max(d.ids) for d in found.extremes.values()) == max(max(d.ids) for d in wanted)
    assert len(found.extremes) <= 2
    assert len(Corpus([])) == 0


def test_memory_does_not_grow_with_the_tokens() -> None:
    """Four hundred thousand tokens, which as lists of numbers would be many times what is allowed here."""
    tracemalloc.start()
    try:
        found = Corpus(made(400, 1000))
        assert found.tokens > 400_000
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


def pairs(count: int, length: int) -> Iterator[Pair]:
    for i in range(count):
        tokens = [(i * 31 + t) % 100_003 for t in range(length)]
        yield Pair(f"p{i}", tokens[: 2 + i % 3], [*tokens, 1], [*tokens[::-1], 2])


def test_pairs_come_back_as_they_went_in() -> None:
    wanted = [*pairs(20, 5)]
    found = Pairs(iter(wanted))
    assert [*found] == wanted and found[-3:] == wanted[-3:]
    assert found.digests().to_pylist() == [pair.digest for pair in wanted]
    assert [*found.documents] == [document for pair in wanted for document in pair.documents()]
    others = Mismatched(found)
    assert len(others) == 40
    assert others[0] == build_document(wanted[0].prompt, wanted[-1].chosen)
    assert others[3:5] == [
        build_document(wanted[1].prompt, wanted[0].rejected),
        build_document(wanted[2].prompt, wanted[1].chosen),
    ]


def test_memory_does_not_grow_with_the_tokens_of_pairs() -> None:
    tracemalloc.start()
    try:
        found = Pairs(pairs(200, 1000))
        assert found.documents.tokens > 400_000
        assert len(found.digests()) == 200
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()
