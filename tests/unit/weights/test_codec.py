"""Every encoding turns old bytes into new ones exactly, and a damaged payload never passes for a right one."""

import contextlib
import struct

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tuneloop.core.errors import Corrupt
from tuneloop.weights import codec

ENCODINGS: list[codec.Encoding] = ["gap8-xor", "xor", "overwrite"]


def pair(seed: int, elements: int, width: int, density: float) -> tuple[codec.Bytes, codec.Bytes]:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, elements * width, np.uint8)
    new = old.copy()
    view = new.view(f"<u{width}")
    view[rng.random(elements) < density] ^= np.array(1 + rng.integers(0, 2), f"<u{width}")
    return old, new


def digest(data: codec.Bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data.data)


@pytest.fixture(params=[64, 1 << 21], ids=["many blocks", "one block"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(codec, "BLOCK", request.param)
    return int(request.param)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_round_trip(encoding: codec.Encoding) -> None:
    @settings(max_examples=25, deadline=None)
    @given(
        st.integers(0, 1 << 32),
        st.integers(0, 3000),
        st.sampled_from([1, 2, 4, 8]),
        st.sampled_from([0.0, 0.0005, 0.02, 0.3, 1.0]),
    )
    def check(seed: int, elements: int, width: int, density: float) -> None:
        old, new = pair(seed, elements, width, density)
        delta = codec.encode_delta(old, new, width, encoding)
        assert (delta.payload is None) == np.array_equal(old, new)
        if encoding != "overwrite":
            assert delta.changed == np.count_nonzero(
                old.view(f"<u{width}") != new.view(f"<u{width}")
            )
        assert (delta.old, delta.new) == (digest(old), digest(new))
        if delta.payload is None:
            return
        payload, kept, made = np.frombuffer(delta.payload, np.uint8), old.copy(), np.empty_like(old)
        assert codec.apply_delta(old, made, payload, width, encoding) == delta.new
        np.testing.assert_array_equal(made, new)
        np.testing.assert_array_equal(old, kept, "what is read is not written")
        assert codec.apply_delta(old, old, payload, width, encoding) == delta.new
        np.testing.assert_array_equal(old, new)

    check()


def test_bits_not_values_are_compared() -> None:
    old = np.array([0.0, np.nan, np.nan, 1.0], np.float32)
    new = old.copy()
    new[0] = -0.0
    new.view(np.uint32)[2] ^= 1  # another NaN
    delta = codec.encode_delta(old.view(np.uint8), new.view(np.uint8), 4, "gap8-xor")
    assert delta.changed == 2 and delta.payload
    held = old.view(np.uint8)
    codec.apply_delta(held, held, np.frombuffer(delta.payload, np.uint8), 4, "gap8-xor")
    assert old.tobytes() == new.tobytes()


def test_gap8_xor_is_what_the_document_says() -> None:
    old = np.zeros(1000, "<u2")
    new = old.copy()
    new[[0, 3, 3 + 255, 3 + 255 + 600]] = [0x0102, 0x0304, 0x0506, 0x0708]
    delta = codec.encode_delta(old.view(np.uint8), new.view(np.uint8), 2, "gap8-xor")
    assert delta.payload is not None
    assert struct.unpack_from("<II", delta.payload) == (2, codec.BLOCK // 2)
    count, *sizes = struct.unpack_from("<4I", delta.payload, 8)
    at, frames = 24, []
    for size in sizes:
        frames.append(list(zstandard.ZstdDecompressor().decompress(delta.payload[at : at + size])))
        at += size
    assert count == 4 and at == len(delta.payload)
    assert frames == [[0, 3, 255, 0, 255, 255, 90], [2, 4, 6, 8], [1, 3, 5, 7]]


def test_overwrite_is_idempotent_and_xor_is_not() -> None:
    for encoding, same in (("overwrite", True), ("xor", False), ("gap8-xor", False)):
        old, new = pair(1, 500, 2, 0.1)
        payload = np.frombuffer(codec.encode_delta(old, new, 2, encoding).payload or b"", np.uint8)  # type: ignore[arg-type]
        codec.apply_delta(old, old, payload, 2, encoding)  # type: ignore[arg-type]
        codec.apply_delta(old, old, payload, 2, encoding)  # type: ignore[arg-type]
        assert np.array_equal(old, new) == same


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_damage_is_refused_or_changes_the_result(encoding: codec.Encoding) -> None:
    """A damaged payload ends in `Corrupt` or in other bytes, whose digest is returned; never in a write elsewhere."""

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        old, new = pair(data.draw(st.integers(0, 99)), 400, 2, 0.05)
        payload = bytearray(codec.encode_delta(old, new, 2, encoding).payload or b"")
        if data.draw(st.booleans()):
            payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(
                st.integers(0, 7)
            )
        else:
            del payload[data.draw(st.integers(0, len(payload) - 1)) :]
        guard = np.concatenate([old, old])
        made = guard[: len(old)]
        with contextlib.suppress(Corrupt):
            found = codec.apply_delta(
                old, made, np.frombuffer(bytes(payload), np.uint8), 2, encoding
            )
            assert found == digest(made) and (found == digest(new)) == np.array_equal(made, new)
        np.testing.assert_array_equal(
            guard[len(old) :], old, "nothing beyond the tensor is written"
        )

    check()


def test_sizes_match_the_bound_of_the_issue() -> None:
    """AdamW-like: 2 % of bf16 elements move by one unit in the last place."""
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(1 << 20).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    new[rng.random(len(new)) < 0.02] += 1
    sizes = {
        e: len(codec.encode_delta(old.view(np.uint8), new.view(np.uint8), 2, e).payload or b"")
        for e in ENCODINGS
    }
    assert sizes["gap8-xor"] < 0.6 * sizes["xor"]
    assert sizes["gap8-xor"] < old.nbytes / 50
