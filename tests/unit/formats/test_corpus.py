import tracemalloc
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tuneloop.formats.token_files import ROWS, Corpus, Document, build_document, write_corpus
from tuneloop.training.pairs import Mismatched, Pairs, digest_pairs


def made(count: int, length: int) -> Iterator[tuple[str, Document]]:
    for i in range(count):
        n = length + i % 7
        ids = array("i", [(i * 31 + t) % 100_003 for t in range(n)])
        yield f"d{i}", Document(ids, array("b", [t % 3 == 2 for t in range(n)]))


def test_documents_come_back_as_they_went_in() -> None:
    count = 2 * ROWS + 3
    wanted = [document for _, document in made(count, 1)]
    found = Corpus.from_documents(made(count, 1))
    assert [*found] == wanted
    assert found.names.to_pylist() == [f"d{i}" for i in range(count)]
    assert found[3:5] == wanted[3:5]
    assert found[-1] == wanted[-1]
    assert (len(found), found.tokens) == (count, sum(len(d.ids) for d in wanted))
    with pytest.raises(IndexError):
        found[count]
    assert found.lengths.tolist() == [len(d.ids) for d in wanted]
    assert found.highest_ids.tolist() == [max(d.ids) for d in wanted]
    assert len(Corpus.from_documents([])) == 0


def test_equal_documents_have_equal_bytes(tmp_path: Path) -> None:
    for name, count in (("one", 100), ("two", 100), ("other", 101)):
        write_corpus(str(tmp_path / name), made(count, 5))
    one, two, other = ((tmp_path / name).read_bytes() for name in ("one", "two", "other"))
    assert one == two != other


def test_memory_does_not_grow_with_the_tokens() -> None:
    """Four hundred thousand tokens, which as lists of numbers would be many times what is allowed here."""
    tracemalloc.start()
    try:
        found = Corpus.from_documents(made(400, 1000))
        assert found.tokens > 400_000
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


Sides = tuple[list[int], list[int], list[int]]


def pairs(count: int, length: int) -> Iterator[Sides]:
    """Prompts, chosen and rejected completions."""
    for i in range(count):
        tokens = [(i * 31 + t) % 100_003 for t in range(length)]
        yield tokens[: 2 + i % 3], [*tokens, 1], [*tokens[::-1], 2]


def written(given: Iterable[Sides]) -> Pairs:
    documents = (
        (f"p{i}", build_document(each[0], side))
        for i, each in enumerate(given)
        for side in each[1:]
    )
    return Pairs(Corpus.from_documents(documents))


def test_pairs_come_back_as_they_went_in() -> None:
    wanted = [*pairs(20, 5)]
    documents = [[build_document(prompt, side) for side in sides] for prompt, *sides in wanted]
    found = written(wanted)
    assert [*found] == documents and found[-3:] == documents[-3:]
    assert found.ids.to_pylist() == [f"p{i}" for i in range(20)]
    others = Mismatched(found.documents, 64)
    assert len(others) == 40
    assert others[0] == build_document(wanted[0][0], wanted[-1][1])
    assert others[3:5] == [
        build_document(wanted[1][0], wanted[0][2]),
        build_document(wanted[2][0], wanted[1][1]),
    ]


def test_a_mismatched_document_is_cut_off_at_the_limit() -> None:
    long_prompt = ([1] * 9, [2], [3])
    long_completion = ([4], [5] * 9, [6] * 9)
    documents = written([long_prompt, long_completion]).documents
    cut = Mismatched(documents, 10)
    assert [*cut] == [
        build_document([1] * 9, [5]),
        build_document([1] * 9, [6]),
        build_document([4], [2]),
        build_document([4], [3]),
    ]


def test_digests_of_pairs_tell_tokens_apart() -> None:
    found = digest_pairs(written(pairs(20, 5)).documents)
    assert (
        found.equals(digest_pairs(written(pairs(20, 5)).documents))
        and len({*found.to_pylist()}) == 20
    )
    moved = [
        ([*prompt, chosen[0]], chosen[1:], rejected) for prompt, chosen, rejected in pairs(20, 5)
    ]
    assert not {*digest_pairs(written(moved).documents).to_pylist()} & {*found.to_pylist()}


def test_memory_does_not_grow_with_the_tokens_of_pairs() -> None:
    tracemalloc.start()
    try:
        found = written(pairs(200, 1000))
        assert found.documents.tokens > 400_000
        assert len(digest_pairs(found.documents)) == 200
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()
