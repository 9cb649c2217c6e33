"""Whatever happens, a reader gets the exported bytes or a refusal: publications that crash, replicas at any version,
duplicates, damaged files, collected garbage."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.weights.exports import Crash, Crashing, Model, content, model, save, update
from tests.waiting import LIMIT_S
from tuneloop.cli import run_cli
from tuneloop.core.artifacts import file_digest
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import Store
from tuneloop.weights import layout, live, pointer
from tuneloop.weights.inspect import (
    delete_unused_versions,
    diff_versions,
    list_versions,
    verify_version,
)
from tuneloop.weights.materialize import materialize_version
from tuneloop.weights.pointer import PointerConflict, PointerRewind
from tuneloop.weights.publish import publish_version
from tuneloop.weights.tensors import read_tensors
from tuneloop.weights.versions import Chain

Case = tuple[str, int, int]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "publish",
                "publish",
                "crash",
                "again",
                "pull",
                "pull",
                "flip store",
                "flip replica",
                "gc",
            ]
        ),
        st.integers(0, 1 << 30),
        st.integers(0, 11),
    ),
    min_size=3,
    max_size=14,
)


class World:
    """A root, what was exported to it, and two replicas."""

    def __init__(self, place: Path) -> None:
        self.place, self.root = place, f"file://{place}/weights"
        self.exports: list[Path] = []
        self.state: Model = {}
        self.damaged = False

    def export(self, seed: int, choice: int) -> int:
        rng, version = np.random.default_rng(seed), len(self.exports)
        new_shape = (
            not self.state or choice == 11
        )  # as after a change of architecture: no delta can say that
        density = (0.0, 0.002, 0.05, 1.0)[choice % 4]
        self.state = (
            model(rng, tied=choice % 2 == 0) if new_shape else update(rng, self.state, density)
        )
        config = f'{{"changed_at": {version - version % 2}}}'
        self.exports.append(
            save(
                self.place / f"export{version}",
                self.state,
                shards=1 + (seed % 7 == 0),
                config=config,
            )
        )
        return version

    def publish(self, seed: int, choice: int, crash_at: int | None = None) -> None:
        version = self.export(seed, choice)
        encoding = ("gap8-xor", "xor", "overwrite", None)[choice % 4]
        if crash_at is not None:
            before = pointer.read_pointer(self.root)
            try:
                publish_version(
                    Crashing(self.root, crash_at), version, self.exports[version], encoding=encoding
                )  # type: ignore[arg-type]
            except Crash:
                assert pointer.read_pointer(self.root) == before, "the old version is served"
                if before is not None and not self.damaged:
                    verify_version(self.root)
        at_hand = self.exports[version - 1] if version and seed % 2 else None
        bound = (3.0, 0.5, 0.0)[seed % 3]
        publish_version(
            self.root,
            version,
            self.exports[version],
            base=at_hand,
            encoding=encoding,
            restore_bound=bound,
        )  # type: ignore[arg-type]

    def pull(self, seed: int, choice: int) -> None:
        replica = self.place / f"replica{choice % 2}"
        listed = [entry.version for entry in list_versions(self.root)]
        version = listed[seed % len(listed)]
        done = materialize_version(self.root, version, replica)
        assert done.version == version
        assert content(replica) == content(self.exports[version])

    def flip(self, files: list[Path], seed: int) -> None:
        files = sorted(
            p for p in files if p.is_file() and p.stat().st_size and not p.name.endswith(".lock")
        )
        if files:
            path = files[seed % len(files)]
            data = bytearray(path.read_bytes())
            data[(seed // 7) % len(data)] ^= 1 << (seed % 8)
            path.write_bytes(data)

    def act(self, kind: str, seed: int, choice: int) -> None:
        if kind == "publish":
            self.publish(seed, choice)
        elif kind == "crash":
            self.publish(seed, choice, crash_at=choice)
        elif kind == "again" and self.exports:
            publish_version(self.root, len(self.exports) - 1, self.exports[-1])
        elif kind == "pull" and self.exports:
            self.pull(seed, choice)
        elif kind == "flip store":
            self.damaged = True
            self.flip(list((self.place / "weights").rglob("*")), seed)
        elif kind == "flip replica":
            self.flip(list((self.place / f"replica{choice % 2}").rglob("*")), seed)
        elif kind == "gc" and self.exports:
            pinned = [entry.version for entry in list_versions(self.root)][:1]
            delete_unused_versions(self.root, keep=1 + choice % 2, pinned=pinned)
            if not self.damaged:
                for version in {*pinned, len(self.exports) - 1}:
                    verify_version(self.root, version)


@settings(max_examples=25, deadline=None)
@given(ACTIONS)
def test_identical_or_refused(actions: list[Case]) -> None:
    with tempfile.TemporaryDirectory() as place:
        world = World(Path(place))
        world.publish(0, 0)
        for kind, seed, choice in actions:
            before = world.damaged
            try:
                world.act(kind, seed, choice)
            except UserError as refusal:
                local = "replica" in str(
                    refusal
                )  # found in a replica, which the next pull restores
                assert before or local, f"{kind} refused without cause: {refusal}"
                if before:
                    return


@pytest.mark.parametrize("anchor", [False, True])
def test_crash_before_every_operation(tmp_path: Path, anchor: bool) -> None:
    """Of a first version, a delta, and a full version with its delta."""
    rng = np.random.default_rng(0)
    states = [model(rng)]
    for _ in range(9 if anchor else 2):
        states.append(update(rng, states[-1], 1.0 if anchor else 0.02))
    exports = [save(tmp_path / f"export{i}", s) for i, s in enumerate(states)]
    root = f"file://{tmp_path}/weights"
    kinds = []
    for version, export in enumerate(exports):
        before = pointer.read_pointer(root)
        for at in range(100):
            try:
                publish_version(Crashing(root, at), version, export)
                break
            except Crash:
                assert pointer.read_pointer(root) == before
                if before is not None:
                    assert verify_version(root) and Chain(root).latest == version - 1
        assert 2 < at < 100, "each operation was the last before a crash"
        published = list_versions(root)[-1]
        kinds.append((published.encoding is None, published.base_version))
        names = {p.name for p in (tmp_path / "weights" / f"weight_v{version:06d}").rglob("*")}
        assert not [n for n in names if n.endswith(".part")], "leftovers are gone"
        materialize_version(root, None, tmp_path / "replica")
        assert content(tmp_path / "replica") == content(export)
    assert verify_version(root) == len(states[0])
    assert not anchor or any(full for full, _ in kinds[1:])


def test_a_restarted_trainer_continues_the_chain(tmp_path: Path) -> None:
    rng, root = np.random.default_rng(1), f"file://{tmp_path}/weights"
    first = model(rng)
    second = update(rng, first, 0.01)
    publish_version(root, 0, save(tmp_path / "a", first))
    without_base = publish_version(root, 1, save(tmp_path / "b", second))
    assert (without_base.base_version, without_base.full) == (0, False)
    with_base = (
        publish_version(f"{root}2", 0, tmp_path / "a"),
        publish_version(f"{root}2", 1, tmp_path / "b", base=tmp_path / "a"),
    )
    assert with_base[1].ref == without_base.ref, "the same bytes, wherever the base came from"
    with pytest.raises(Corrupt, match="without `base` it is derived"):
        publish_version(root, 2, tmp_path / "a", base=tmp_path / "a")


def test_a_chain_starts_on_a_model_that_its_readers_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Version 0 stores no weights but says which they are; who has others, or none, is refused in one line."""
    rng, root = np.random.default_rng(5), f"{tmp_path}/weights"
    states = [model(rng)]
    states += [update(rng, states[0], 0.02)]
    states += [update(rng, states[1], 0.02)]
    exports = [save(tmp_path / f"export{i}", state, shards=2) for i, state in enumerate(states)]
    first = publish_version(root, 0, exports[0], held_by_readers=True)
    assert (
        not list((tmp_path / "weights").rglob("*.safetensors"))
        and first.sent_bytes < 0.5 * first.full_bytes
    )
    for version in (1, 2):
        done = publish_version(
            root, version, exports[version], base=exports[version - 1], base_version=version - 1
        )
        assert (done.base_version, done.full) == (version - 1, False)
        materialize_version(root, version, tmp_path / "replica", base=exports[0])
        assert content(tmp_path / "replica") == content(exports[version])
    late = materialize_version(root, 2, tmp_path / "late", base=exports[0])
    assert (late.full, late.deltas) == (0, [1, 2]) and content(tmp_path / "late") == content(
        exports[2]
    )
    assert publish_version(root, 2, exports[2]).sent_bytes == 0, "what stands needs no base"

    digest = Chain(root).entry(0).index.tuneloop.readers_digest
    for flags, found in ((["--base", str(exports[1])], "[0-9a-f]{32}"), ([], "None")):
        assert run_cli(["weights", "materialize", root, str(tmp_path / "refused"), *flags]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert re.search(
            rf"--base.* its weights are {found}, but version 0, which stores no weights, needs {digest}; give",
            said,
        )
        assert not content(tmp_path / "refused")
    with pytest.raises(UserError, match="--base"):
        publish_version(root, 3, exports[2])
    assert run_cli(["weights", "verify", root, "--base", str(exports[0])]) == 0
    assert run_cli(["weights", "ls", root]) == 0 and "held by readers" in capsys.readouterr().out
    publish_version(root, 3, exports[1], encoding=None)
    assert delete_unused_versions(root) == [0, 1, 2] and verify_version(root) == len(states[0])


@pytest.mark.parametrize("encoding", ["gap8-xor", "xor", "overwrite"])
@pytest.mark.parametrize("held", [False, True])
def test_some_tensors_are_read_without_the_others(
    tmp_path: Path, encoding: Any, held: bool
) -> None:
    """Through deltas from the full version below, which may lie with the reader; what is damaged is refused."""
    rng, root = np.random.default_rng(11), f"{tmp_path}/weights"
    states = [model(rng)]
    for version in range(3):
        export = save(tmp_path / f"export{version}", states[-1], shards=2)
        before = tmp_path / f"export{version - 1}" if version else None
        publish_version(
            root,
            version,
            export,
            base=before,
            encoding=encoding,
            held_by_readers=held and not version,
        )
        states.append(update(rng, states[-1], 0.05))
    names, base = ["layer.0.weight", "step", "empty"], tmp_path / "export0"
    for version in (0, 2):
        read = list(read_tensors(Chain(root), version, names, base=base))
        assert [bytes(data) for _, data in read] == [
            bytes(states[version][name][2]) for name in names
        ]
        assert [tensor.shape for tensor, _ in read] == [states[version][name][1] for name in names]
    (path,) = (tmp_path / "weights" / "weight_v000002").glob("*.safetensors")
    whole = path.read_bytes()
    damaged = bytearray(whole)
    for tensor in (t for name, t in layout.read_header(path).tensors.items() if name == names[0]):
        damaged[tensor.end - 1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(Corrupt):
        list(read_tensors(Chain(root), 2, names, base=base))
    path.unlink()
    with pytest.raises(Corrupt, match="is missing although its index is there"):
        list(read_tensors(Chain(root), 2, names, base=base))


def test_versions_are_immutable_and_move_forward(tmp_path: Path) -> None:
    rng, root = np.random.default_rng(2), f"file://{tmp_path}/weights"
    first = model(rng)
    a, b = save(tmp_path / "a", first), save(tmp_path / "b", update(rng, first, 0.1))
    publish_version(root, 3, a)
    again = publish_version(root, 3, a)
    assert again.sent_bytes == 0
    with pytest.raises(PointerConflict, match="holds other weights"):
        publish_version(root, 3, b)
    with pytest.raises(PointerRewind, match="at version 3 already"):
        publish_version(root, 2, b)
    with pytest.raises(UserError, match="is not in"):
        materialize_version(root, 2, tmp_path / "replica")
    assert verify_version(root, 3) == len(first)


def _publish(root: str, export: Path, outcome: multiprocessing.Queue[str]) -> None:
    try:
        publish_version(root, 1, export)
        outcome.put("published")
    except PointerConflict:
        outcome.put("refused")


def test_two_rival_publishers_leave_one_whole_version(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    first = model(rng)
    for attempt in range(4):
        root = f"file://{tmp_path}/weights{attempt}"
        base = save(tmp_path / f"base{attempt}", first)
        publish_version(root, 0, base)
        exports = [
            save(tmp_path / f"rival{attempt}{i}", update(rng, first, 0.05)) for i in range(2)
        ]
        outcome: multiprocessing.Queue[str] = multiprocessing.Queue()
        rivals = [
            multiprocessing.Process(target=_publish, args=(root, export, outcome))
            for export in exports
        ]
        for rival in rivals:
            rival.start()
        assert sorted(outcome.get(timeout=LIMIT_S) for _ in rivals) == ["published", "refused"]
        for rival in rivals:
            rival.join(LIMIT_S)
        materialize_version(root, None, tmp_path / f"replica{attempt}")
        assert content(tmp_path / f"replica{attempt}") in [content(export) for export in exports]


def test_anchors_bound_the_chain_and_replicas_pass_them_by_delta(tmp_path: Path) -> None:
    rng, root = np.random.default_rng(4), f"file://{tmp_path}/weights"
    state = model(rng)
    replica = tmp_path / "replica"
    for version in range(20):
        export = save(tmp_path / f"export{version}", state)
        published = publish_version(root, version, export)
        step = materialize_version(root, version, replica)
        assert content(replica) == content(export)
        assert version == 0 or step.full is None, "a replica that keeps up reads deltas only"
        fresh = materialize_version(root, version, tmp_path / f"fresh{version}")
        assert fresh.read_bytes < 4.5 * published.full_bytes
        state = update(rng, state, 0.02)
    anchors = [entry.version for entry in list_versions(root) if entry.encoding is None]
    assert len(anchors) > 1 and all(
        Chain(root).entry(a).index.tuneloop.delta_index for a in anchors[1:]
    )


@pytest.mark.parametrize(
    ("bound", "anchors"), [(0.0, [0, 1, 2, 3, 4, 5]), (0.25, [0, 3]), (9.0, [0])]
)
def test_how_soon_the_next_anchor_comes_is_a_setting(
    tmp_path: Path, bound: float, anchors: list[int]
) -> None:
    """The export stays as it is, so that a delta has no bytes and costs the 0.1 of applying it."""
    export, root = (
        save(tmp_path / "export", model(np.random.default_rng(9))),
        f"file://{tmp_path}/weights",
    )
    for version in range(6):
        publish_version(root, version, export, restore_bound=bound)
    assert [entry.version for entry in list_versions(root) if entry.encoding is None] == anchors


def test_gc_keeps_what_is_needed_and_drops_the_rest(tmp_path: Path) -> None:
    rng, root = np.random.default_rng(5), f"file://{tmp_path}/weights"
    state = model(rng)
    exports = []
    for version in range(14):
        exports.append(save(tmp_path / f"export{version}", state))
        publish_version(
            root, version, exports[-1], encoding=None if version in (4, 9) else "gap8-xor"
        )
        state = update(rng, state, 0.001)
    Store(root).put("weight_v000002/leftover", b"")
    Store(root).put("weight_v000099/being-written", b"")
    for replica, version in (("serves", 5), ("died", 3), ("ended", 2), ("elsewhere", 77)):
        live.announce_version(Store(root), replica, version)
    live.withdraw_replica(Store(root), "ended")
    os.utime(tmp_path / "weights" / "live" / "died.json", (0, time.time() - live.EXPIRY_S - 1))
    assert live.list_served_versions(Store(root)) == {"serves": 5, "elsewhere": 77}
    standing = Store(root).keys("")
    listed = delete_unused_versions(root, keep=2, pinned=[9], delete=False)
    assert Store(root).keys("") == standing
    dropped = delete_unused_versions(root, keep=2, pinned=[9])
    assert dropped == listed and dropped == [0, 1, 2, 3, 6, 7, 8]
    assert [entry.version for entry in list_versions(root)] == [4, 5, 9, 10, 11, 12, 13]
    left = {key.partition("/")[0] for key in Store(root).keys("")}
    assert "weight_v000002" not in left and "weight_v000099" in left
    for version in (5, 12, 13):
        materialize_version(root, version, tmp_path / "replica")
        assert content(tmp_path / "replica") == content(exports[version])
    with pytest.raises(UserError, match="keep"):
        delete_unused_versions(root, keep=0)


def test_the_command_drops_only_when_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, export = f"{tmp_path}/weights", save(tmp_path / "export", model(np.random.default_rng(5)))
    for version in range(3):
        publish_version(root, version, export, encoding=None)
    for options, said, left in (
        ([], "to delete: 1, and", [0, 1, 2]),
        (["--delete"], "deleted: 1\n", [0, 2]),
    ):
        assert run_cli(["weights", "gc", root, "--pin", "0", *options]) == 0
        assert capsys.readouterr().out.startswith(said)
        assert [entry.version for entry in list_versions(root)] == left


def test_diff_names_what_changed(tmp_path: Path) -> None:
    rng, root = np.random.default_rng(6), f"file://{tmp_path}/weights"
    first = model(rng)
    second = {name: (dtype, shape, bytearray(data)) for name, (dtype, shape, data) in first.items()}
    second["layer.0.scale"][2][0] ^= 1
    third = model(rng, tied=False)
    for version, state in enumerate((first, second, third)):
        publish_version(root, version, save(tmp_path / f"export{version}", state))
    assert diff_versions(root, 0, 1).changed == {"layer.0.scale": pytest.approx(1 / 33)}
    assert diff_versions(root, 1, 2).added == ["lm_head"]
    assert diff_versions(root, 1, 1).same == len(first)


def test_damage_in_place_poisons_until_restored(tmp_path: Path) -> None:
    """A delta that decodes to something else is found by the checksum; the directory is then rebuilt, not retried."""
    rng, root = np.random.default_rng(7), f"file://{tmp_path}/weights"
    states = [model(rng)]
    for _ in range(2):
        states.append(update(rng, states[-1], 0.05))
    exports = [save(tmp_path / f"export{i}", s) for i, s in enumerate(states)]
    for version, export in enumerate(exports):
        publish_version(root, version, export, encoding="overwrite" if version == 1 else "gap8-xor")
    replica = tmp_path / "replica"
    materialize_version(root, 0, replica)
    (path,) = (tmp_path / "weights/weight_v000001").glob("model-*.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    for _ in range(2):
        with pytest.raises(Corrupt):
            materialize_version(root, 2, replica)
    path.write_bytes(whole)
    assert materialize_version(root, 2, replica).full == 0
    assert content(replica) == content(exports[2])


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("at", [-40, 4, 200], ids=["payload", "size of the header", "header"])
@pytest.mark.parametrize("version", [1, 0], ids=["delta", "full"])
def test_damage_is_said_of_the_stored_file(
    tmp_path: Path, version: int, at: int, remote: bool
) -> None:
    """Not of a copy that is gone by then; and not of a delta, where the full version below it is damaged."""
    rng, root = np.random.default_rng(7), f"file://{tmp_path}/weights"
    store = Store("memory:///weights" if remote else root)
    state: Model = {f"w{i}": ("BF16", (64, 64), bytearray(rng.bytes(1 << 13))) for i in range(3)}
    for number in range(3):
        publish_version(store, number, save(tmp_path / f"export{number}", state))
        state = update(rng, {**state}, 0.05)
    (key,) = (k for k in store.keys(f"weight_v{version:06d}") if k.endswith(".safetensors"))
    whole = store.get(key) or b""
    damaged = bytearray(whole)
    damaged[at] ^= 4
    store.put(key, bytes(damaged))
    for number in (version, 2):
        with pytest.raises(Corrupt) as refusal:
            verify_version(store, number)
        assert refusal.value.value == f"{store.url}/{key}"
        assert "; restore it from a copy, or publish the next version in full" in str(refusal.value)
    store.put(key, whole)
    assert verify_version(store, 2) == 3


def test_versions_above_a_damaged_one_only_say_which_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, root = np.random.default_rng(7), f"{tmp_path}/weights"
    state = model(rng)
    for version in range(5):
        publish_version(
            root,
            version,
            save(tmp_path / f"export{version}", state),
            encoding=None if version == 4 else "xor",
        )
        state = update(rng, state, 0.05)
    (path,) = (tmp_path / "weights/weight_v000001").glob("model-*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    for command in ("ls", "verify"):
        assert run_cli(["weights", command, f"{root}/none"]) == 2
        assert "has no versions; publish some, or correct the URL" in capsys.readouterr().err
    assert run_cli(["weights", "verify", root]) == 2
    said = capsys.readouterr()
    assert [line.split(":")[0] for line in said.out.splitlines()] == [
        f"published version {n}" for n in (0, 4)
    ]
    first, *above = said.err.splitlines()
    assert (
        f"published version 1: weights: 'file://{path}': is " in first
        and "; restore it from a copy" in first
    )
    assert above == [f"error: published version {n}: builds on version 1" for n in (2, 3)]


def test_a_replica_that_is_damaged_is_blamed_itself(tmp_path: Path) -> None:
    rng, root, replica = (
        np.random.default_rng(7),
        f"file://{tmp_path}/weights",
        tmp_path / "replica",
    )
    first = model(rng)
    second = update(rng, first, 0.5)
    for version, state in enumerate((first, second)):
        publish_version(root, version, save(tmp_path / f"export{version}", state))
    materialize_version(root, 0, replica)
    data = bytearray((replica / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (replica / "model.safetensors").write_bytes(data)
    with pytest.raises(Corrupt, match=r"/replica/model.safetensors': its .*; materialize it again"):
        materialize_version(root, 1, replica)
    assert materialize_version(root, 1, replica).full == 0


def test_lineage_is_checked_before_a_byte_changes(tmp_path: Path) -> None:
    rng, root, other = (
        np.random.default_rng(8),
        f"file://{tmp_path}/weights",
        f"file://{tmp_path}/other",
    )
    first = model(rng)
    for where in (root, other):
        publish_version(where, 0, save(tmp_path / f"{where[-5:]}0", first))
        publish_version(where, 1, save(tmp_path / f"{where[-5:]}1", update(rng, first, 0.05)))
        publish_version(where, 2, save(tmp_path / f"{where[-5:]}2", update(rng, first, 0.05)))
    replica = tmp_path / "replica"
    materialize_version(root, 1, replica)
    held = content(replica)
    for key in Store(root).keys("weight_v000002"):
        Store(root).delete(key)
    for key in Store(other).keys("weight_v000002"):  # a delta on another run's version 1
        Store(root).put(key, Store(other).get(key) or b"")
    with pytest.raises(Corrupt, match="is what `latest` or the next version builds on"):
        materialize_version(root, 2, replica)
    assert content(replica) == held


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/weights"
    export = save(tmp_path / "export", model(np.random.default_rng(9)))
    publish_version(root, 0, export)
    before = content(export)
    with pytest.raises(UserError, match="choose another"):
        materialize_version(root, 0, export)
    assert content(export) == before


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/below"])
def test_a_directory_that_cannot_be_is_one_line(tmp_path: Path, place: str) -> None:
    root = f"file://{tmp_path}/weights"
    publish_version(root, 0, save(tmp_path / "export", model(np.random.default_rng(9))))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        UserError, match=rf"^directory: '.*{place}': .*; choose one that can be written$"
    ):
        materialize_version(root, 0, tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine"


def test_files_that_may_not_be_read_are_one_line() -> None:
    """Of a delta, which is read where it lies, and of a full version, which is copied."""
    rng = np.random.default_rng(9)
    with (
        tempfile.TemporaryDirectory() as place
    ):  # pytest's own are below a directory of root's alone
        first, root = model(rng), f"file://{place}/weights"
        publish_version(root, 0, save(Path(place, "a"), first))
        publish_version(root, 1, save(Path(place, "b"), update(rng, first, 0.05)))
        Path(place).chmod(0o755)
        assert verify_version(root) and Chain(root).latest == 1
        for version, pattern in ((1, "model-*"), (0, "model.*.safetensors")):
            (path,) = Path(place, "weights", f"weight_v{version:06d}").glob(pattern)
            path.chmod(0)
            with unprivileged(), pytest.raises(UserError, match=rf"{path.name}.*; grant access$"):
                verify_version(root, version)
            with unprivileged(), pytest.raises(UserError, match=rf"{path.name}.*; grant access$"):
                file_digest(path)


@contextmanager
def unprivileged() -> Iterator[None]:
    """As a user whom permissions bind, where that is not so anyhow."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def _pull_for_ever(root: str, replica: Path) -> None:
    while True:
        for version in (1, 2, 0, 2):
            materialize_version(root, version, replica)


def test_killed_readers_leave_nothing_wrong(tmp_path: Path) -> None:
    """SIGKILL at any moment of copying or patching; two processes share the directory."""
    rng, root, replica = (
        np.random.default_rng(10),
        f"file://{tmp_path}/weights",
        tmp_path / "replica",
    )
    state: Model = {f"w{i}": ("BF16", (256, 256), bytearray(rng.bytes(1 << 17))) for i in range(8)}
    exports = []
    for version in range(3):
        exports.append(save(tmp_path / f"export{version}", state))
        publish_version(root, version, exports[-1])
        state = update(rng, state, 0.02)
    for attempt in range(6):
        readers = [
            multiprocessing.Process(target=_pull_for_ever, args=(root, replica)) for _ in range(2)
        ]
        for reader in readers:
            reader.start()
        time.sleep(0.05 + 0.03 * attempt + float(rng.random()) * 0.02)
        for reader in readers:
            assert reader.pid is not None and reader.is_alive()
            os.kill(reader.pid, signal.SIGKILL)
            reader.join()
        materialize_version(root, attempt % 3, replica)
        assert content(replica) == content(exports[attempt % 3])


def _continue(root: str, exports: list[Path]) -> None:
    for version, export in enumerate(exports[1:], 1):
        publish_version(root, version, export)


def test_a_replica_follows_while_the_trainer_publishes(tmp_path: Path) -> None:
    """Polling `latest` never fails and never goes back, whatever moment the listing and the pointer are read at."""
    rng, root, replica = (
        np.random.default_rng(11),
        f"file://{tmp_path}/weights",
        tmp_path / "replica",
    )
    states = [model(rng)]
    for _ in range(12):
        states.append(update(rng, states[-1], 0.01))
    exports = [save(tmp_path / f"export{i}", s) for i, s in enumerate(states)]
    publish_version(root, 0, exports[0])
    trainer = multiprocessing.Process(target=_continue, args=(root, exports))
    trainer.start()
    seen = [0]
    while seen[-1] < len(exports) - 1:
        done = materialize_version(root, None, replica)
        assert done.version >= seen[-1]
        assert content(replica) == content(exports[done.version])
        seen.append(done.version)
    trainer.join(30)
    assert trainer.exitcode == 0
