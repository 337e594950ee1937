"""Which shards count as done: what verify finds, what status reports, and what a worker makes again.

Forged files have correct hashes and sizes, so that the other checks must find the fault. The records of an
idx are read and written as docs/format.md describes them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import signal
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import BrokenShard
from tests.forged import content_sha256
from tests.input_writers import table_bytes
from tests.world import World, hostile_texts

HEADER_BYTES, CHUNK_RECORDS = 64, 512
PLACE = [("offset", "<u8"), ("num_bytes", "<u4"), ("num_tokens", "<u4")]
DOCUMENT = np.dtype([*PLACE, ("input_number", "<u4"), ("input_offset", "<u8")])
ROW = np.dtype([*DOCUMENT.descr, ("starts_offset", "<u8"), ("num_starts", "<u4")])
CHAT = np.dtype([*ROW.descr, ("mask_offset", "<u8")])
SETS: Mapping[str, Mapping[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "keep_text": False},
    "packed": {"record": "packed", "seq_len": 16, "digests": True},
    "table": {},
    "split": {"validation_fraction": 0.3},
}
Whole = Callable[[str], World]
BROKEN = 1  # the damaged shard, of three


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Verified data sets of three shards. Never written to."""
    root = tmp_path_factory.mktemp("whole")

    @functools.cache
    def make(name: str) -> World:
        every = hostile_texts(240, seed=8, most_words=6)
        texts = [text for text in every if text.strip() and len(text) < 300]
        raw: dict[str, Any] = {"a.txt": "\n".join(texts[:90]), "b.txt": "\n".join(texts[90:])}
        if name == "table":  # places are rows; the second shard ends inside the second file
            parts = (texts[:70], texts[70:-10], texts[-10:])
            raw = {f"{n}.parquet": table_bytes({"text": part}, "parquet", 5) for n, part in enumerate(parts)}
        return World(root / name).raw(raw).make(num_shards=3, **SETS[name])

    return make


def path_of(world: World, suffix: str, shard_id: int = BROKEN) -> Path:
    folder = world.data_dir / "digests" if suffix == "digests" else world.data_dir
    return folder / f"shard-{shard_id:05d}.{suffix}"


def check_found_and_made_again(world: World, original: World, *, fast: bool = False) -> None:
    """Check that verify names only the broken shard and writes no index, and that only it is made again."""
    ended = world.main("verify", world.data_dir, fast=fast or None)
    assert ended.code != 0, "verify found nothing"
    assert f"{BROKEN:05d}" in ended.err
    assert not re.search("shard[- ]0000[02]", ended.err)
    assert not (world.data_dir / "index.json").exists()
    others = [path_of(world, "tar", number) for number in (0, 2)]
    before = [path.stat().st_ino for path in others]
    world.run().verify()
    assert [path.stat().st_ino for path in others] == before
    assert (world.data_dir / "index.json").exists()
    assert world.contents() == original.contents()


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


CHANGES: Mapping[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-2],  # not one byte, which is only a line end in some files
    "first bit": lambda data: flipped(data, 0),
    "middle bit": lambda data: flipped(data, len(data) // 2),
}
JSON_FILES = [("json", "tar"), ("json", "idx"), ("json", "json")]
FILES = [*JSON_FILES, ("packed", "tar"), ("packed", "digests"), ("split", "idx")]
DAMAGES: list[Any] = [(*file, change, False) for file in FILES for change in CHANGES]
# --fast finds files that are missing or have another size.
DAMAGES += [(*file, change, True) for file in [*JSON_FILES, FILES[4]] for change in ("", "cut")]


@pytest.mark.parametrize(("name", "suffix", "change", "fast"), DAMAGES)
def test_a_damaged_file_is_found_and_its_shard_is_made_again(
    whole: Whole, tmp_path: Path, name: str, suffix: str, change: str, fast: bool
) -> None:
    world = whole(name).copy(tmp_path)
    path = path_of(world, suffix)
    data = path.read_bytes()
    path.unlink()
    if change:
        path.write_bytes(CHANGES[change](data))
    check_found_and_made_again(world, whole(name), fast=fast)


def forge(world: World, part: str, change: Callable[[Any], Any], shard_id: int = BROKEN) -> None:
    """Change the records, tar or manifest of a shard, and update hashes and sizes."""
    tar, idx, manifest = (path_of(world, suffix, shard_id) for suffix in ("tar", "idx", "json"))
    stated = json.loads(manifest.read_bytes())
    if part == "manifest":
        change(stated)
    elif part == "tar":
        tar.write_bytes(change(tar.read_bytes()))
    else:
        data = idx.read_bytes()
        dtype = {"packed": ROW, "chat": CHAT}.get(stated["spec"]["record"], DOCUMENT)
        records = np.frombuffer(data, dtype, stated["counts"]["num_samples"], HEADER_BYTES)
        changed = change(records.copy())
        starts = range(0, len(changed), CHUNK_RECORDS)
        chunks = [changed[first : first + CHUNK_RECORDS].tobytes() for first in starts]
        crcs = np.array([zlib.crc32(chunk) for chunk in chunks], "<u4").tobytes()
        idx.write_bytes(data[:HEADER_BYTES] + b"".join(chunks) + crcs)
    for path in (tar, idx):
        data = path.read_bytes()
        stated[path.suffix[1:]] = {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    stated["content_sha256"] = content_sha256(stated)
    manifest.write_text(json.dumps(stated, indent=1))


def with_field(name: str, value: Callable[[Any], Any], row: int = 3) -> Callable[[Any], Any]:
    """Return a function that changes a field of one record."""

    def change(records: Any) -> Any:
        records[name][row] = value(records[name][row])
        return records

    return change


def one_token_moved(records: Any) -> Any:
    records["num_tokens"][[3, 4]] += np.array([1, -1], "<i4").view("<u4")
    return records


def exchanged(records: Any) -> Any:
    """Swap the input places of two documents."""
    records["input_offset"][[3, 4]] = records["input_offset"][[4, 3]]
    return records


def one_twice(records: Any) -> Any:
    """Give a document the bytes of the one before it."""
    for name in ("offset", "num_bytes", "num_tokens"):
        records[name][4] = records[name][3]
    return records


def counted(name: str, number: int) -> Callable[[Any], None]:
    """Return a function that adds to a count of a manifest."""

    def change(stated: dict[str, Any]) -> None:
        *above, last = name.split(".")
        counts = functools.reduce(dict.__getitem__, above, stated["counts"])
        counts[last] += number

    return change


def with_first_id(number: int) -> Callable[[bytes], bytes]:
    """Return a function that replaces the first id of the first document."""

    def change(tar: bytes) -> bytes:
        begin = tar.index(b"\x93NUMPY") + 128
        return tar[:begin] + number.to_bytes(2, "little") + tar[begin + 2 :]

    return change


# The data set, the part that is forged, and the change. A loader refuses wrong "ids" and does not read
# "places" of the input. Only verify finds wrong "starts": to a loader they look like those of the next row.
FORGED: Mapping[str, tuple[str, str, Callable[[Any], Any]]] = {
    "as it was": ("json", "places", lambda records: records),
    "a sample less": ("json", "ids", lambda records: records[:-1]),
    "a token more": ("json", "ids", with_field("num_tokens", lambda number: number + 1)),
    "no token": ("json", "ids", with_field("num_tokens", lambda _: 0)),
    "a token of another document": ("json", "ids", one_token_moved),
    "ids a byte later": ("json", "ids", with_field("offset", lambda offset: offset + 1)),
    "ids a byte shorter": ("json", "ids", with_field("num_bytes", lambda size: size - 1)),
    "ids behind the tar": ("json", "ids", with_field("offset", lambda _: 1 << 40)),
    "ids up to behind the tar": ("npy", "ids", with_field("offset", lambda _: 1 << 40)),
    "the ids of the document before": ("npy", "ids", one_twice),
    "bytes that are no ids": ("npy", "ids", with_field("num_bytes", lambda size: size + 2)),
    "documents exchanged": ("json", "places", exchanged),
    "a document before the shard": ("json", "places", with_field("input_offset", lambda _: 0, row=0)),
    "a document behind the shard": ("json", "places", with_field("input_number", lambda _: 2, row=-1)),
    "one of the next shard": ("json", "places", with_field("input_offset", lambda _: 1 << 30, row=-1)),
    "the last row from the next file": ("table", "places", with_field("input_number", lambda _: 2, row=-1)),
    "another id for validation": ("split", "places", exchanged),
    "more tokens than a row": ("packed", "ids", with_field("num_tokens", lambda number: number + 1, row=0)),
    "starts behind the tar": ("packed", "ids", with_field("starts_offset", lambda _: 1 << 40)),
    "a document more in a row": ("packed", "starts", with_field("num_starts", lambda number: number + 1)),
    "no end of the tar": ("json", "tar", lambda data: data[:-600] + b"x" + data[-599:]),
    "an id outside of the vocabulary": ("npy", "tar", with_first_id(0xFFFF)),
    "samples": ("json", "manifest", counted("num_samples", 1)),
    "tokens": ("packed", "manifest", counted("num_tokens", 1)),
    "input bytes": ("json", "manifest", counted("input_bytes", -1)),
    "samples for validation": ("split", "manifest", counted("validation.num_samples", 1)),
    "documents for validation": ("split", "manifest", counted("validation.num_documents", -1)),
    "another data set": ("json", "manifest", lambda stated: stated["spec"].update(append_eos=True)),
    "no digests": ("packed", "manifest", lambda stated: stated.pop("digests")),
}


@pytest.mark.parametrize("change", FORGED)
def test_a_forged_shard_with_correct_hashes_is_found_and_never_delivers_other_ids(
    whole: Whole, tmp_path: Path, change: str
) -> None:
    name, part, function = FORGED[change]
    world = whole(name).copy(tmp_path)
    forge(world, part, function)
    options = {"boundaries": "segment_ids"} if name == "packed" else {}
    if part == "places":
        assert world.samples(**options) == whole(name).samples(**options)
    elif part == "ids":
        with pytest.raises(BrokenShard) as found:
            world.samples(**options)
        assert f"{BROKEN:05d}" in str(found.value)
    if change == "as it was":  # shows that forge() alone is not found
        world.verify()
    else:
        check_found_and_made_again(world, whole(name))


def status(world: World) -> tuple[str, bool]:
    """Return which shards are done and whether the set is verified, by ``status`` without Slurm."""
    state = json.loads(world.main("status", world.data_dir, json=True, environ={"PATH": "/nowhere"}).out)
    return state["done"], state["verified"]


def test_a_finding_remains_until_an_equal_verify_finds_the_shard_intact(whole: Whole, tmp_path: Path) -> None:
    world = whole("json").copy(tmp_path)
    first, second = (path_of(world, "tar", number) for number in (0, 1))
    intact = [path.read_bytes() for path in (first, second)]
    first.write_bytes(CHANGES["middle bit"](intact[0]))
    assert world.main("verify", world.data_dir).code != 0
    second.write_bytes(intact[1][:-2])
    assert world.main("verify", world.data_dir, fast=True).code != 0
    second.write_bytes(intact[1])
    assert status(world)[0] == "2", "--fast removes no finding of a whole verify"
    assert world.main("verify", world.data_dir, fast=True).code != 0, "not even when it is run again"
    assert status(world)[0] == "1-2", "it found the second shard intact"
    first.write_bytes(intact[0])
    second.write_bytes(CHANGES["middle bit"](intact[1]))
    assert world.main("verify", world.data_dir).code != 0
    second.write_bytes(intact[1])
    assert status(world)[0] == "0,2", "a whole verify found the first shard intact"
    world.verify()
    assert status(world) == ("0-2", True)


def test_a_set_is_verified_if_all_shards_are_made_and_intact(whole: Whole, tmp_path: Path) -> None:
    world = World(tmp_path, raw_dir=whole("json").raw_dir).plan(num_shards=3)
    index, tar, manifest = world.data_dir / "index.json", path_of(world, "tar"), path_of(world, "json")
    assert status(world) == ("", False)
    world.run(0, 2)
    assert status(world) == ("0,2", False)
    world.run(1)
    assert status(world) == ("0-2", False)
    world.verify()
    assert status(world) == ("0-2", True)
    intact_index, intact_tar = index.read_bytes(), tar.read_bytes()
    tar.write_bytes(CHANGES["middle bit"](intact_tar))  # the size is right, and verify has not run yet
    assert status(world) == ("0-2", True)
    assert world.main("verify", world.data_dir).code != 0
    assert status(world) == ("0,2", False)
    index.write_bytes(intact_index)  # an old index does not outweigh the finding
    assert status(world) == ("0,2", False)
    world.run()
    assert status(world) == ("0-2", True)
    tar.write_bytes(intact_tar[:-2])
    assert status(world) == ("0,2", False)
    tar.write_bytes(intact_tar)
    shutil.copy(whole("npy").data_dir / index.name, index)
    assert status(world) == ("0-2", False)
    shutil.copy(path_of(whole("npy"), "json"), manifest)
    assert status(world) == ("0,2", False)


def test_verify_deep_makes_three_shards_again_by_default(tmp_path: Path) -> None:
    """Each shard has a wrong id and correct hashes, so only a comparison with the input finds it."""
    world = World(tmp_path).raw({"a.txt": "a line\n" * 10}).make(num_shards=5, token_format="npy")
    for shard_id in range(5):
        forge(world, "tar", with_first_id(0), shard_id)
    for most, num_found in (("--deep", 3), ("--deep=5", 5)):
        assert world.main("verify", world.data_dir, most).code == 65
        assert len(json.loads((world.data_dir / "findings.json").read_bytes())["findings"]) == num_found


@pytest.mark.processes
def test_a_verified_set_keeps_only_the_records_of_runs_that_may_still_be_running(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "one\ntwo\n"}).plan()
    hidden = (world.raw_dir / "a.txt").rename(tmp_path / "a.txt")
    assert world.main("run", world.data_dir, num_proc=1).code == 66
    (ended,) = (world.data_dir / "jobs" / "attempts").iterdir()
    running = ended.with_name("node-1-7.1700000000")
    running.write_text(ended.read_text().partition("\nend\n")[0])
    hidden.rename(world.raw_dir / "a.txt")
    world.run().verify()
    assert [*ended.parent.iterdir()] == [running]


def test_a_blanked_shard_names_its_original_tar_and_verifies(whole: Whole, tmp_path: Path) -> None:
    (tmp_path / "names").write_text("at:a.txt:0\n")
    new = whole("packed").blanked(tmp_path / "names", tmp_path / "new").verify()
    old = hashlib.sha256(path_of(whole("packed"), "tar", 0).read_bytes()).hexdigest()
    assert [each.get("unblanked_sha256") for each in new.manifests()] == [old, None, None]


def test_each_file_is_synced_before_it_is_renamed_and_the_manifest_is_renamed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path).raw({"a.txt": b"a line\n\xff\n"})
    world.plan(num_shards=1, max_bad_fraction=1, digests=True)
    calls: list[tuple[str, str]] = []  # (call, final name of the file)
    fsync, rename = os.fsync, os.rename

    def noted_fsync(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        calls.append(("sync", re.sub(r"^\.(shard-\d+\.\w+)\..*", r"\1", path.name)))
        fsync(fd)

    def noted_rename(source: Any, target: Any, **options: Any) -> None:
        calls.append(("name", Path(target).name))
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    world.run()
    *files, manifest = (path_of(world, suffix, 0) for suffix in ("tar", "idx", "digests", "json"))
    files.append(world.data_dir / "quarantine" / "shard-00000.jsonl")
    of_manifest = calls.index(("name", manifest.name))
    before = calls[:of_manifest]
    for path in files:
        assert ("name", path.name) in before, f"the manifest is renamed before {path.name}"
        of_file = before.index(("name", path.name))
        assert ("sync", path.name) in before[:of_file], path.name
        assert ("sync", path.parent.name) in before[of_file:], f"{path.name} may lose its name"
    assert ("sync", manifest.name) in before
    assert ("sync", world.data_dir.name) in calls[of_manifest:]


@pytest.mark.processes
def test_temporaries_of_killed_attempts_are_removed_by_the_next_attempt(whole: Whole, tmp_path: Path) -> None:
    world = World(tmp_path, raw_dir=whole("json").raw_dir).plan(num_shards=1)

    def kill_at_the_first_rename() -> None:
        pid = os.fork()
        if not pid:
            os.rename = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
            world.try_shard(0)
            os._exit(99)  # it was not killed
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        assert len(world.temporaries()) > 1

    kill_at_the_first_rename()
    kill_at_the_first_rename()
    assert world.run(0).temporaries() == []
    manifest = (world.data_dir / "shard-00000.json").rename(tmp_path / "manifest")
    kill_at_the_first_rename()
    manifest.rename(world.data_dir / "shard-00000.json")  # the next attempt finds the shard done
    assert world.run(0).temporaries() == []
