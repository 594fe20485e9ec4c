"""The files of a checkpoint of the cluster: written once, put together in other pieces, never loaded when damaged."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from aiokv.checkpoint import folder
from aiokv.checkpoint.cluster_files import (
    check_files,
    open_part,
    part_pieces,
    read_manifest,
    write_file,
    write_own,
)
from aiokv.checkpoint.cluster_reading import Reading, read_residuals
from aiokv.checkpoint.folder import Found, complete, find_checkpoints, make_plan, newest_complete, remove, verified
from aiokv.checkpoint.saving import SavedRule
from aiokv.config import Config
from aiokv.core.effects import WantedChunk, WriteManifest
from aiokv.core.saved_state import ChunkState
from aiokv.core.scheduler.checkpoint_keeper import CheckpointPlan
from aiokv.errors import ConfigError, DataError
from aiokv.optim import Assign
from aiokv.telemetry import take_note

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aiokv.wire.messages import CheckpointFile

RULE = SavedRule("sgd", {"learning_rate": 0.5}, "sum", ((3, {"learning_rate": 0.25}),), 4)
NAME = "run-000001-clock-0000000004"
NOTE = functools.partial(take_note, Counter())


def state(key: Any, start: int, stop: int, size: int, **changes: Any) -> ChunkState:
    """Return what is saved of a part of a key with some elements."""
    fields: dict[str, Any] = {"shape": (size,), "dtype": "float32", "version": 4, "counts": ((0, 4),), "policy": "bsp"}
    return ChunkState(key=key, start=start, stop=stop, **(fields | changes))


def make_part(place: Path, index: int, *chunks: tuple[ChunkState, int, dict[str, Any]]) -> CheckpointFile:
    """Write a server's part."""
    return write_file(str(place), f"part-{index}.safetensors", part_pieces(4, RULE, chunks))


VALUE = np.arange(10, dtype=np.float32)
MOMENTUM = VALUE * 2


def parts(place: Path, *cuts: int) -> list[CheckpointFile]:
    """Write a key of ten elements, of servers that have it up to some elements."""
    bounds = [0, *cuts, 10]
    files = []
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        arrays = {"value": VALUE[start:stop], "momentum": MOMENTUM[start:stop]}
        files.append(make_part(place, index, (state("w", start, stop, 10, digest=b"\x00\xff"), 4, arrays)))
    return files


def make_checkpoint(folder: Path, clock: int = 4, *, run: int = 1, workers: int = 2) -> Path:
    """Write a whole checkpoint of two servers."""
    place = folder / f"run-{run:06d}-clock-{clock:010d}"
    complete(WriteManifest(clock, str(place), workers, parts(place, 4), []), "")
    return place


def wanted(start: int, stop: int, *sources: int) -> WantedChunk:
    """Return a chunk that is to be put together."""
    return WantedChunk("w", start, stop, 4, Assign(), list(sources), 0)


# --- what is written is read ---


def test_other_programs_can_read_a_part(tmp_path: Path) -> None:
    make_part(tmp_path, 0, (state("w", 0, 10, 10), 4, {"value": VALUE, "momentum": MOMENTUM}))
    tensors = load_file(tmp_path / "part-0.safetensors")
    assert (tensors["value/s:w@0"] == VALUE).all()
    assert (tensors["momentum/s:w@0"] == MOMENTUM).all()


def test_state_machine_is_told_all_that_was_saved(tmp_path: Path) -> None:
    reading = Reading(str(make_checkpoint(tmp_path)))
    read = reading.stimulus
    assert (read.clock, read.error) == (4, None)
    assert read.rules is not None
    assert (read.rules.name, read.rules.params, read.rules.changes) == (RULE.name, RULE.params, RULE.changes)
    assert [(each.key, each.start, each.stop, each.counts) for each in read.states] == [
        ("w", 0, 4, ((0, 4),)),
        ("w", 4, 10, ((0, 4),)),
    ]
    assert read.states[0].digest == b"\x00\xff"


@pytest.mark.parametrize(("start", "stop", "sources"), [(0, 10, [1, 0]), (0, 4, [0]), (2, 7, [0, 1]), (9, 10, [1])])
def test_chunk_is_put_together_from_the_parts(tmp_path: Path, start: int, stop: int, sources: list[int]) -> None:
    arrays, updates = Reading(str(make_checkpoint(tmp_path))).arrays(wanted(start, stop, *sources))
    assert updates == 4
    assert (arrays["value"] == VALUE[start:stop]).all()
    assert (arrays["momentum"] == MOMENTUM[start:stop]).all()


def test_state_of_rows_is_cut_by_rows(tmp_path: Path) -> None:
    place = tmp_path / NAME
    value = np.arange(12, dtype=np.float32)
    history = np.array([1.0, 2.0, 3.0], np.float32)
    chunk = (state("w", 0, 12, 12, shape=(3, 4)), 4, {"value": value, "history": history})
    complete(WriteManifest(4, str(place), 2, [make_part(place, 0, chunk)], []), "")
    arrays, _ = Reading(str(place)).arrays(wanted(4, 12, 0))
    assert arrays["value"].tolist() == value[4:].tolist()
    assert arrays["history"].tolist() == [2.0, 3.0]


def test_rows_of_tables_are_found_by_their_numbers(tmp_path: Path) -> None:
    place = tmp_path / NAME
    tables = [
        {"ids": np.array(ids, np.int64), "value": np.array(ids, np.float32)[:, None] * [1, 10]}
        for ids in ([1, 3, 4], [5, 9])
    ]
    tables = [
        {name: array.astype(np.float32 if name == "value" else np.int64) for name, array in t.items()} for t in tables
    ]
    files = [
        make_part(place, index, (state("w", start, stop, 20, shape=(10, 2), sparse=True), 4, tables[index]))
        for index, (start, stop) in enumerate([(0, 5), (5, 10)])
    ]
    complete(WriteManifest(4, str(place), 2, files, []), "")
    arrays, _ = Reading(str(place)).arrays(wanted(3, 8, 0, 1))
    assert arrays["ids"].tolist() == [3, 4, 5]
    assert arrays["value"].tolist() == [[3, 30], [4, 40], [5, 50]]


def test_part_without_a_state_yet_makes_all_begin_anew(tmp_path: Path) -> None:
    place = tmp_path / NAME
    chunks = [
        (state("w", 0, 5, 10), 1, {"value": VALUE[:5], "momentum": MOMENTUM[:5]}),
        (state("w", 5, 10, 10), 0, {"value": VALUE[5:]}),
    ]
    complete(WriteManifest(4, str(place), 2, [make_part(place, 0, *chunks)], []), "")
    arrays, updates = Reading(str(place)).arrays(wanted(0, 10, 0, 1))
    assert (list(arrays), updates) == (["value"], 1)


@pytest.mark.parametrize("key", ["w", 7])
@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "int64", ml_dtypes.bfloat16])
def test_keys_and_dtypes(tmp_path: Path, key: Any, dtype: Any) -> None:
    place = tmp_path / NAME
    value = np.arange(3).astype(dtype)
    chunk = (state(key, 0, 3, 3, dtype=np.dtype(dtype).name), 0, {"value": value})
    complete(WriteManifest(4, str(place), 2, [make_part(place, 0, chunk)], []), "")
    arrays, _ = Reading(str(place)).arrays(WantedChunk(key, 0, 3, 4, Assign(), [0], 0))
    assert arrays["value"].dtype == dtype
    assert (arrays["value"] == value).all()


def test_any_place_that_fsspec_knows(tmp_path: Path) -> None:
    del tmp_path
    place = f"memory://checkpoints/{NAME}"
    files = [
        write_file(place, "part-0.safetensors", part_pieces(4, RULE, [(state("w", 0, 10, 10), 4, {"value": VALUE})]))
    ]
    complete(WriteManifest(4, place, 2, files, []), "memory://checkpoints")
    found = newest_complete("memory://checkpoints", NOTE)
    assert found is not None
    assert found.place == place
    remove([place], "memory://checkpoints", NOTE)
    assert find_checkpoints("memory://checkpoints") == []


# --- what is damaged is found ---


def blocks(size: int, step: int = 64) -> Iterator[int]:
    """Yield lengths to which a file may be cut."""
    yield from range(0, size, step)
    yield size - 1


def test_torn_part_is_found_wherever_it_was_torn(tmp_path: Path) -> None:
    place = make_checkpoint(tmp_path)
    file = place / "part-1.safetensors"
    whole = file.read_bytes()
    manifest = read_manifest(str(place))
    for length in blocks(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(DataError, match="is torn"):
            check_files(str(place), manifest)
    file.write_bytes(whole)
    check_files(str(place), manifest)


def test_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    place = make_checkpoint(tmp_path)
    file = place / "part-0.safetensors"
    whole = bytearray(file.read_bytes())
    manifest = read_manifest(str(place))
    for position in blocks(len(whole), 37):
        whole[position] ^= 1 << position % 8
        file.write_bytes(whole)
        with pytest.raises(DataError, match="is damaged"):
            check_files(str(place), manifest)
        whole[position] ^= 1 << position % 8


def test_servers_compare_what_they_read_too(tmp_path: Path) -> None:
    place = make_checkpoint(tmp_path)
    manifest = read_manifest(str(place))
    file = place / "part-0.safetensors"
    whole = bytearray(file.read_bytes())
    reading = Reading(str(place))
    whole[-40] ^= 1
    file.write_bytes(whole)
    with pytest.raises(DataError, match="array 'momentum' of key 'w' is damaged"):
        reading.arrays(wanted(0, 4, 0))
    whole[20] ^= 1
    file.write_bytes(whole)
    with pytest.raises(DataError, match="its head is damaged"):
        open_part(str(place), manifest.parts[0])


def test_manifest_that_was_changed_is_found_wherever_it_was(tmp_path: Path) -> None:
    place = make_checkpoint(tmp_path)
    file = place / "manifest.json"
    whole = file.read_bytes()
    for length in range(0, len(whole) - 1, 16):
        file.write_bytes(whole[:length])
        with pytest.raises(DataError):
            read_manifest(str(place))
    file.write_bytes(whole.replace(b'"clock": 4', b'"clock": 5'))
    with pytest.raises(DataError, match="is damaged"):
        read_manifest(str(place))


def test_file_that_is_gone_is_found(tmp_path: Path) -> None:
    place = make_checkpoint(tmp_path)
    (place / "part-0.safetensors").unlink()
    with pytest.raises(DataError, match="can't be read"):
        check_files(str(place), read_manifest(str(place)))
    with pytest.raises(DataError, match="can't be read"):
        Reading(str(place))


@pytest.mark.parametrize("name", ["../part-0.safetensors", "a/b", "a\\b"])
def test_manifest_can_t_name_files_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    place = str(tmp_path / NAME)
    # Whoever has written it did not look.
    monkeypatch.setattr(folder, "_check_there", lambda *_: None)
    file = make_part(tmp_path / NAME, 0, (state("w", 0, 10, 10), 4, {"value": VALUE}))
    file.name = name
    complete(WriteManifest(4, place, 2, [file], []), "")
    with pytest.raises(DataError, match="outside of its folder"):
        read_manifest(place)


def test_nothing_is_written_outside_of_the_folder(tmp_path: Path) -> None:
    pieces = part_pieces(4, RULE, [])
    with pytest.raises(DataError, match="is not in the folder"):
        write_file(str(tmp_path / "elsewhere" / NAME), "part-0", pieces, str(tmp_path / "here"))
    assert list(tmp_path.iterdir()) == []


def test_writing_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def torn() -> Iterator[bytes]:
        yield b"head"
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match="No space left"):
        write_file(str(tmp_path / NAME), "part-0", torn())
    assert list((tmp_path / NAME).iterdir()) == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="can't be written"):
        write_file(str(tmp_path / "file" / NAME), "part-0", [b"x"])


def test_node_writes_only_to_a_folder_of_its_own(tmp_path: Path) -> None:
    place, pieces = str(tmp_path / NAME), [b"head"]
    assert write_own(place, "part-0", pieces, "") == (
        None,
        "checkpoint_folder is not set for it, and it writes nowhere else",
    )
    file, reason = write_own(place, "part-0", pieces, str(tmp_path / "elsewhere"))
    assert file is None
    assert "is not in the folder" in reason
    file, reason = write_own(place, "part-0", pieces, str(tmp_path))
    assert file is not None
    assert (file.nbytes, reason) == (36, "")


def test_part_that_can_t_be_made_is_told_whatever_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Iterator[bytes]:
        yield b"head"
        raise RuntimeError("no memory")

    written = write_own(str(tmp_path / NAME), "part-0", broken(), str(tmp_path))
    assert written == (None, "RuntimeError: no memory")
    assert "part-0 can't be written" in caplog.text
    assert list((tmp_path / NAME).iterdir()) == []


# --- folders of checkpoints ---


def test_files_that_only_their_node_can_see_are_no_checkpoint(tmp_path: Path) -> None:
    """As with a folder of the same name on each machine, or memory:// in several processes."""
    place = tmp_path / NAME
    file = make_part(place, 0, (state("w", 0, 10, 10), 4, {"value": VALUE}))
    order = WriteManifest(4, str(place), 2, [file], [])
    hidden = place / "elsewhere"
    (place / file.name).rename(hidden)
    with pytest.raises(DataError, match="has to be a place that all nodes reach"):
        complete(order, str(tmp_path))
    (place / file.name).write_bytes(hidden.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"expected {file.nbytes} bytes, got {file.nbytes - 1}"):
        complete(order, str(tmp_path))
    assert newest_complete(str(tmp_path), NOTE) is None
    hidden.rename(place / file.name)
    complete(order, str(tmp_path))
    assert newest_complete(str(tmp_path), NOTE) is not None


def test_checkpoints_are_found_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    for run, clock in ((2, 3), (1, 10), (1, 9)):
        make_checkpoint(tmp_path, clock, run=run)
    (tmp_path / "something else").mkdir()
    found = find_checkpoints(str(tmp_path))
    assert [(each.run, each.clock) for each in found] == [(1, 9), (1, 10), (2, 3)]
    assert all(each.is_complete for each in found)
    assert find_checkpoints(str(tmp_path / "nothing")) == []


def test_folder_that_can_t_be_read_is_an_error() -> None:
    with pytest.raises(DataError, match="can't be read"):
        find_checkpoints("nonsense://folder")


def test_newest_whole_one_is_taken_and_the_log_says_what_was_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = make_checkpoint(tmp_path, 4)
    torn, changed, unfinished = (make_checkpoint(tmp_path, clock) for clock in (6, 8, 10))
    (torn / "part-1.safetensors").write_bytes(b"")
    (changed / "manifest.json").write_text("{}")
    (unfinished / "manifest.json").unlink()
    counters: Counter[str] = Counter()
    found = newest_complete(str(tmp_path), functools.partial(take_note, counters))
    assert found is not None
    assert found.place == str(good)
    assert counters == {"checkpoint_damaged": 2}
    passed = [record.getMessage() for record in caplog.records]
    assert [str(torn) in passed[1], str(changed) in passed[0], len(passed)] == [True, True, 2]
    assert all("can't be used" in text for text in passed)


def test_no_checkpoint_is_no_error_but_only_damaged_ones_are(tmp_path: Path) -> None:
    assert newest_complete(str(tmp_path), NOTE) is None
    place = make_checkpoint(tmp_path)
    (place / "part-1.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match=r"no checkpoint in .* can be used"):
        newest_complete(str(tmp_path), NOTE)


def test_what_is_deleted_is_no_checkpoint_before_it_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = make_checkpoint(tmp_path, 4), make_checkpoint(tmp_path, 6)
    remove([str(first)], str(tmp_path), NOTE)
    assert not first.exists()
    remove([str(tmp_path / "run-000001-clock-0000000099")], str(tmp_path), NOTE)
    remove([str(tmp_path)], "", NOTE)
    assert second.exists()
    assert not caplog.records
    remove([str(second)], str(tmp_path / "elsewhere"), NOTE)
    assert second.exists()
    assert "can't be deleted" in caplog.text


def config(folder: Path, **settings: Any) -> Config:
    """Return the settings of a scheduler."""
    fields: dict[str, Any] = {"checkpoint_folder": str(folder), "num_workers": 2} | settings
    return Config(**fields)


def test_plan_without_checkpoints_looks_at_nothing(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    assert make_plan(config(tmp_path), NOTE) == CheckpointPlan()


def test_plan_counts_runs_and_knows_what_is_there(tmp_path: Path) -> None:
    assert make_plan(config(tmp_path, checkpoint_every=5), NOTE) == CheckpointPlan(str(tmp_path), 1, 5, 0.0, 3)
    whole, unfinished, damaged = (
        make_checkpoint(tmp_path, 4),
        make_checkpoint(tmp_path, 6),
        make_checkpoint(tmp_path, 8),
    )
    (unfinished / "manifest.json").unlink()
    (damaged / "manifest.json").write_text("{}")
    plan = make_plan(config(tmp_path, checkpoint_seconds=5.0, checkpoint_keep=7), NOTE)
    # What is damaged stays: somebody may want to look at it.
    assert (plan.run, plan.names, plan.torn) == (2, (whole.name,), (unfinished.name,))
    assert (plan.seconds, plan.keep, plan.resume, plan.clock) == (5.0, 7, "", 0)


def test_plan_goes_on_from_the_latest_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 4)
    last = make_checkpoint(tmp_path, 2, run=2)
    plan = make_plan(config(tmp_path, resume="latest"), NOTE)
    assert (plan.resume, plan.clock, plan.run, plan.every) == (str(last), 2, 3, 0)


def test_latest_of_none_begins_anew_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert make_plan(config(tmp_path, resume="latest"), NOTE).resume == ""
    assert "the job begins anew" in caplog.text


def test_plan_goes_on_from_what_is_named(tmp_path: Path) -> None:
    first, _ = make_checkpoint(tmp_path / "old", 4), make_checkpoint(tmp_path / "old", 6)
    for named, clock in ((first, 4), (tmp_path / "old", 6)):
        assert make_plan(Config(num_workers=2, resume=str(named)), NOTE).clock == clock


def test_what_is_named_has_to_be_in_the_folder_if_there_is_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "old")
    with pytest.raises(DataError, match="is not in the folder"):
        make_plan(config(tmp_path / "new", resume=str(tmp_path / "old")), NOTE)


def test_what_is_named_has_to_be_there_and_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no complete checkpoint in"):
        make_plan(config(tmp_path, resume=str(tmp_path)), NOTE)
    place = make_checkpoint(tmp_path)
    (place / "part-1.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match="is torn"):
        make_plan(config(tmp_path, resume=str(place)), NOTE)
    (place / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="there is no complete checkpoint in"):
        make_plan(config(tmp_path, resume=str(place)), NOTE)


def test_other_number_of_workers_can_go_on(tmp_path: Path) -> None:
    place = make_checkpoint(tmp_path, workers=3)
    assert make_plan(config(tmp_path, resume="latest"), NOTE).resume == str(place)


def test_what_is_incomplete_or_damaged_is_not_verified_again(tmp_path: Path) -> None:
    found = Found(str(tmp_path), NAME, None, "damaged")
    assert verified(found) is found
    assert Found(str(tmp_path), "another name", None).run == 0
    assert Found(str(tmp_path), "another name", None).clock == 0


def test_checkpoint_that_all_workers_are_past_may_be_gone(tmp_path: Path) -> None:
    """Whoever takes the place of a worker later goes on behind it, and needs nothing of it."""
    gone = f"{tmp_path}/run-000001-clock-0000000010"
    assert read_residuals(gone, 0, 2, 11) == {}
    with pytest.raises(DataError, match=r"manifest\.json: can't be read"):
        read_residuals(gone, 0, 2, 10)
