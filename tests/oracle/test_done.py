"""Which shards count as done: what verify finds, what status says, and what a worker makes again.

Forged files have the hashes and sizes that they should have, so that each other check is needed. The records
of an idx are as docs/format.md describes them.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import shutil
import signal
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from loader import BrokenShard
from tests.forged import content_sha256
from tests.world import World, hostile_texts

HEADER_BYTES, CHUNK_RECORDS = 64, 512
PLACE = [("offset", "<u8"), ("num_bytes", "<u4"), ("num_tokens", "<u4")]
DOCUMENT = np.dtype([*PLACE, ("source", "<u4"), ("source_offset", "<u8")])
ROW = np.dtype([*DOCUMENT.descr, ("starts_offset", "<u8"), ("num_starts", "<u4")])
SETS: Mapping[str, Mapping[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "keep_text": False},
    "packed": {"record": "packed", "seq_len": 16, "digests": True},
    "table": {},
    "split": {"validation_fraction": 0.3},
}
Whole = Callable[[str], World]
BROKEN = 1  # the shard that is damaged, of three


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Verified data sets of 3 shards. Never written to."""
    root = tmp_path_factory.mktemp("whole")

    @functools.cache
    def make(name: str) -> World:
        every = hostile_texts(240, seed=8, most_words=6)
        texts = [text for text in every if text.strip() and len(text) < 300]
        raw: dict[str, Any] = {"a.txt": "\n".join(texts[:90]), "b.txt": "\n".join(texts[90:])}
        if name == "table":  # places are rows; the second shard ends inside of the second file
            parts = (texts[:70], texts[70:-10], texts[-10:])
            raw = {f"{number}.parquet": parquet(part) for number, part in enumerate(parts)}
        return World(root / name).raw(raw).make(num_shards=3, **SETS[name])

    return make


def parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=5)
    return file.getvalue()


def path_of(world: World, suffix: str) -> Path:
    folder = world.data_dir / "digests" if suffix == "digests" else world.data_dir
    return folder / f"shard-{BROKEN:05d}.{suffix}"


def check_found_and_made_again(world: World, original: World, *, fast: bool = False) -> None:
    """Verify names the shard alone, the set is not whole, and the worker makes this shard again, no other."""
    ended = world.main("verify", world.data_dir, fast=fast or None)
    assert ended.code != 0, "verify found nothing"
    assert f"{BROKEN:05d}" in ended.err
    told = set(ended.err.replace(":", " ").split())
    assert not {"shard-00000", "shard-00002", "shard 00000", "shard 00002"} & told
    assert not (world.data_dir / "index.json").exists()
    others = [world.data_dir / f"shard-{number:05d}.tar" for number in (0, 2)]
    before = [path.stat().st_ino for path in others]
    world.run().verify()
    assert [path.stat().st_ino for path in others] == before
    assert (world.data_dir / "index.json").exists()
    assert world.contents() == original.contents()


def cut(data: bytes) -> bytes:
    return data[:-2]  # a line end is the last byte of some


def flipped_first(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def flipped_middle(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


DAMAGED = (
    ("json", "tar"), ("json", "idx"), ("json", "json"), ("packed", "tar"), ("packed", "digests"),
    ("split", "idx"),
)  # fmt: skip
DAMAGES: list[Any] = [
    (*file, change, False) for file in DAMAGED for change in (cut, flipped_first, flipped_middle)
]
# A quick look finds what is missing or has another size.
DAMAGES += [("json", suffix, change, True) for suffix in ("tar", "idx", "json") for change in (None, cut)]


@pytest.mark.parametrize(("name", "suffix", "change", "fast"), DAMAGES)
def test_a_damaged_file_is_found_and_its_shard_is_made_again(
    whole: Whole, tmp_path: Path, name: str, suffix: str, change: Callable[[bytes], bytes] | None, fast: bool
) -> None:
    world = whole(name).copy(tmp_path)
    path = path_of(world, suffix)
    data = path.read_bytes()
    path.unlink()
    if change is not None:
        path.write_bytes(change(data))
    check_found_and_made_again(world, whole(name), fast=fast)


def forge(
    world: World,
    *,
    records: Callable[[Any], Any] | None = None,
    tar: Callable[[bytes], bytes] | None = None,
    manifest: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Change a shard, and give it the hashes and sizes of what it is then."""
    stated = json.loads(path_of(world, "json").read_bytes())
    if records is not None:
        path = path_of(world, "idx")
        data = path.read_bytes()
        dtype = ROW if stated["spec"]["record"] == "packed" else DOCUMENT
        count = stated["counts"]["num_samples"]
        changed = records(np.frombuffer(data, dtype, count, HEADER_BYTES).copy())
        starts = range(0, len(changed), CHUNK_RECORDS)
        parts = [changed[first : first + CHUNK_RECORDS].tobytes() for first in starts]
        crcs = np.array([zlib.crc32(part) for part in parts], "<u4").tobytes()
        path.write_bytes(data[:HEADER_BYTES] + b"".join(parts) + crcs)
    if tar is not None:
        path = path_of(world, "tar")
        path.write_bytes(tar(path.read_bytes()))
    if manifest is not None:
        manifest(stated)
    for suffix in ("tar", "idx"):
        data = path_of(world, suffix).read_bytes()
        stated[suffix] = {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    stated["content_sha256"] = content_sha256(stated)
    path_of(world, "json").write_text(json.dumps(stated, indent=1))


def with_field(name: str, value: Callable[[Any], Any], row: int = 3) -> Callable[[Any], Any]:
    """Change a field of one record."""

    def change(records: Any) -> Any:
        records[name][row] = value(records[name][row])
        return records

    return change


def one_token_moved(records: Any) -> Any:
    records["num_tokens"][3] += 1
    records["num_tokens"][4] -= 1
    return records


def exchanged(records: Any) -> Any:
    """Two documents change their places in the input."""
    records["source_offset"][[3, 4]] = records["source_offset"][[4, 3]]
    return records


def one_twice(records: Any) -> Any:
    """A document has the bytes of the one before it."""
    for name in ("offset", "num_bytes", "num_tokens"):
        records[name][4] = records[name][3]
    return records


def add(values: dict[str, Any], name: str, number: int) -> None:
    values[name] = bool(number) if isinstance(values[name], bool) else values[name] + number


def set_ids(tar: bytes) -> bytes:
    """Give the first document ids of 65,535."""
    begin = tar.index(b"\x93NUMPY") + 128
    return tar[:begin] + b"\xff\xff" + tar[begin + 2 :]


FORGED: Mapping[str, tuple[str, str, Callable[[Any], Any]]] = {
    "as it was": ("json", "records", lambda records: records),
    "a sample less": ("json", "records", lambda records: records[:-1]),
    "a token more": ("json", "records", with_field("num_tokens", lambda number: number + 1)),
    "no token": ("json", "records", with_field("num_tokens", lambda _: 0)),
    "a token of another document": ("json", "records", one_token_moved),
    "ids a byte later": ("json", "records", with_field("offset", lambda offset: offset + 1)),
    "ids a byte shorter": ("json", "records", with_field("num_bytes", lambda size: size - 1)),
    "ids behind the tar": ("json", "records", with_field("offset", lambda _: 1 << 40)),
    "ids up to behind the tar": ("npy", "records", with_field("offset", lambda _: 1 << 40)),
    "the ids of the document before": ("npy", "records", one_twice),
    "bytes that are no ids": ("npy", "records", with_field("num_bytes", lambda size: size + 2)),
    "documents exchanged": ("json", "records", exchanged),
    "a document before the shard": ("json", "records", with_field("source_offset", lambda _: 0, row=0)),
    "a document behind the shard": ("json", "records", with_field("source", lambda _: 2, row=-1)),
    "the last document from the next shard": (
        "json", "records", with_field("source_offset", lambda _: 1 << 30, row=-1),
    ),
    "the last row from the next file": ("table", "records", with_field("source", lambda _: 2, row=-1)),
    "another id for validation": ("split", "records", exchanged),
    "more tokens than a row": ("packed", "records", with_field("num_tokens", lambda num: num + 1, row=0)),
    "starts behind the tar": ("packed", "records", with_field("starts_offset", lambda _: 1 << 40)),
    "a document more in a row": ("packed", "records", with_field("num_starts", lambda number: number + 1)),
    "no end of the tar": ("json", "tar", lambda data: data[:-600] + b"x" + data[-599:]),
    "an id outside of the vocabulary": ("npy", "tar", set_ids),
    "samples": ("json", "manifest", lambda stated: add(stated["counts"], "num_samples", 1)),
    "tokens": ("packed", "manifest", lambda stated: add(stated["counts"], "num_tokens", 1)),
    "input bytes": ("json", "manifest", lambda stated: add(stated["counts"], "input_bytes", -1)),
    "samples for validation": (
        "split", "manifest", lambda stated: add(stated["counts"]["validation"], "num_samples", 1),
    ),
    "documents for validation": (
        "split", "manifest", lambda stated: add(stated["counts"]["validation"], "num_documents", -1),
    ),
    "another data set": ("json", "manifest", lambda stated: add(stated["spec"], "append_eos", 1)),
    "no digests": ("packed", "manifest", lambda stated: stated.pop("digests")),
}  # fmt: skip


@pytest.mark.parametrize("change", FORGED)
def test_a_forged_shard_is_found_though_its_hashes_are_right(
    whole: Whole, tmp_path: Path, change: str
) -> None:
    name, part, function = FORGED[change]
    world = whole(name).copy(tmp_path)
    forge(world, **{part: function})
    if change == "as it was":  # or the others would be found for another reason
        world.verify()
        return
    check_found_and_made_again(world, whole(name))


def test_a_loader_refuses_an_idx_that_does_not_fit_its_tar_and_never_delivers_other_ids(
    whole: Whole, tmp_path: Path
) -> None:
    for number, (change, (name, part, function)) in enumerate(FORGED.items()):
        if part != "records" or change == "a document more in a row":
            continue  # that one is for verify to find: the loader takes a start of the next row
        world = whole(name).copy(tmp_path / str(number))
        forge(world, records=function)
        if change in NOT_SEEN_BY_A_LOADER:
            assert ids_in_order(world, name) == ids_in_order(whole(name), name), change
            continue
        with pytest.raises(BrokenShard) as found:
            ids_in_order(world, name)
        assert f"{BROKEN:05d}" in str(found.value), change


# A loader asks nothing of these records but where the ids are.
NOT_SEEN_BY_A_LOADER = {
    "as it was", "documents exchanged", "a document before the shard", "a document behind the shard",
    "the last document from the next shard", "the last row from the next file", "another id for validation",
}  # fmt: skip


def ids_in_order(world: World, name: str) -> list[Any]:
    options = {"boundaries": "segment_ids"} if name == "packed" else {}
    with world.ranks(global_batch_size=1, shuffle=False, **options) as ranks:
        return ranks.take(len(ranks.loaders[0]))


def num_done(world: World) -> int:
    return int(json.loads(world.main("status", world.data_dir, json=True).out)["num_done"])


def test_a_finding_stands_until_an_equally_thorough_verify_finds_the_shard_right(
    whole: Whole, tmp_path: Path
) -> None:
    world = whole("json").copy(tmp_path)
    first, second = (world.data_dir / f"shard-{number:05d}.tar" for number in (0, 1))
    right = [path.read_bytes() for path in (first, second)]
    first.write_bytes(flipped_middle(right[0]))
    assert world.main("verify", world.data_dir).code != 0
    second.write_bytes(cut(right[1]))
    assert world.main("verify", world.data_dir, fast=True).code != 0
    second.write_bytes(right[1])
    assert num_done(world) == 1, "a quick look at the sizes takes back no finding of a whole verify"
    assert world.main("verify", world.data_dir, fast=True).code != 0, "nor does another one"
    assert num_done(world) == 2, "it found the second shard right"
    first.write_bytes(right[0])
    second.write_bytes(flipped_middle(right[1]))
    assert world.main("verify", world.data_dir).code != 0
    second.write_bytes(right[1])
    assert num_done(world) == 2, "a whole verify found the first shard right"


def test_status_calls_a_set_verified_when_all_is_made_and_verify_found_nothing(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm is asked
    original = whole("json")
    world = World(tmp_path, raw_dir=original.raw_dir).plan(num_shards=3)

    def status() -> tuple[str, bool]:
        told = json.loads(world.main("status", world.data_dir, json=True).out)
        return told["done"], told["verified"]

    assert status() == ("", False)
    world.run(0, 2)
    assert status() == ("0,2", False)
    world.run(1)
    assert status() == ("0-2", False)
    world.verify()
    assert status() == ("0-2", True)
    index = (world.data_dir / "index.json").read_bytes()
    tar = path_of(world, "tar")
    data = tar.read_bytes()
    tar.write_bytes(flipped_middle(data))  # the size is right, and nobody has looked at it
    assert status() == ("0-2", True)
    assert world.main("verify", world.data_dir).code != 0
    assert status() == ("0,2", False)
    (world.data_dir / "index.json").write_bytes(index)  # verify said otherwise
    assert status() == ("0,2", False)
    world.run()
    assert status() == ("0-2", True)
    tar.write_bytes(cut(data))
    assert status() == ("0,2", False)
    tar.write_bytes(data)
    shutil.copy(whole("npy").data_dir / "index.json", world.data_dir / "index.json")
    assert status() == ("0-2", False)
    path_of(world, "idx").unlink()
    assert status() == ("0,2", False)
    shutil.copy(whole("npy").data_dir / "shard-00001.json", path_of(world, "json"))
    assert status()[0] == "0,2"


@pytest.mark.slow
def test_without_a_number_three_shards_are_made_again(tmp_path: Path) -> None:
    """All are wrong, each behind what a worker compares of its input."""
    lines = [f"line {number:05d} of a file\n" for number in range(8000)]
    world = World(tmp_path).raw({"a.txt": "".join(lines)}).plan(num_shards=5)
    path, wrong = world.raw_dir / "a.txt", [*lines]
    times = path.stat()
    for number in (700, 2500, 4500, 5600, 7200):
        wrong[number] = lines[number].replace("file", "tile")
    for content in (wrong, lines):
        path.write_text("".join(content))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if content is wrong:
            world.run()
    world.verify()
    for most, num_found in (("--deep", 3), ("--deep=5", 5)):
        assert world.main("verify", world.data_dir, most).code == 65
        findings = json.loads((world.data_dir / "findings.json").read_bytes())["findings"]
        assert len(findings) == num_found


def test_an_input_that_moved_is_named_and_one_that_is_gone_or_changed_refused(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "one\ntwo\n"}).make()
    moved = world.raw_dir.rename(tmp_path / "moved")
    assert world.main("verify", world.data_dir, deep=True).code == 66
    assert not (world.data_dir / "findings.json").exists(), "that says nothing of a shard"
    assert world.main("verify", world.data_dir, deep=True, input_dir=moved).code == 0
    (moved / "a.txt").write_text("one\ntwo\nmore\n")
    assert world.main("verify", world.data_dir, deep=True, input_dir=moved).code == 78


def test_clean_removes_what_attempts_left_of_done_shards_and_keeps_what_may_become_one(
    whole: Callable[[str], World], tmp_path: Path
) -> None:
    world = whole("json").copy(tmp_path, but=["shard-00002.json"])
    kept = [".shard-00002.tar", ".shard-00007.tar", ".index.json", "ids/.shard-00002.jsonl"]
    gone = [".shard-00000.tar", "quarantine/.shard-00000.jsonl", "ids/.shard-00001.jsonl"]
    paths = [world.data_dir / f"{name}.node-1-0123abcd.tmp" for name in [*kept, *gone]]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    assert world.main("clean", world.data_dir, dry_run=True).code == 0
    assert all(path.exists() for path in paths)
    assert world.main("clean", world.data_dir).code == 0
    assert [path for path in paths if path.exists()] == paths[: len(kept)]


@pytest.mark.processes
def test_a_blanked_shard_names_the_tar_that_it_was_made_from_and_verifies(tmp_path: Path) -> None:
    texts = [text for text in hostile_texts(90, seed=4, most_words=6) if text.strip()]
    world = World(tmp_path).raw({"a.jsonl": [{"id": f"d{n}", "text": text} for n, text in enumerate(texts)]})
    world.make(num_shards=2, record="packed", seq_len=16, id_field="id")
    (tmp_path / "ids.txt").write_text("d3\n")
    new = tmp_path / "new"
    assert world.main("blank", world.data_dir, ids=tmp_path / "ids.txt", output=new, num_proc=1).code == 0
    assert world.main("verify", new).code == 0
    stated = [json.loads((new / f"shard-{number:05d}.json").read_bytes()) for number in (0, 1)]
    old = hashlib.sha256((world.data_dir / "shard-00000.tar").read_bytes()).hexdigest()
    assert [each.get("made_from") for each in stated] == [old, None]


@pytest.mark.parametrize("name", ["json", "packed"])
def test_each_file_is_on_the_disk_before_its_name_and_the_manifests_name_comes_last(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As a power cut would find them: the calls of the system, in their order."""
    original = whole(name)
    world = World(tmp_path, raw_dir=original.raw_dir).plan(num_shards=3, **SETS[name])
    calls: list[tuple[str, Path]] = []
    names: dict[Path, Path] = {}  # of temporary files, later
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def noted_fsync(fd: int) -> None:
        calls.append(("sync", Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    def noted(call: Callable[..., None]) -> Callable[..., None]:
        def renamed(source: Any, target: Any, **options: Any) -> None:
            names[Path(source)] = Path(target)
            calls.append(("name", Path(target)))
            call(source, target, **options)

        return renamed

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted(rename))
    monkeypatch.setattr(os, "replace", noted(replace))
    world.run(BROKEN)
    calls = [(what, names.get(path, path)) for what, path in calls]
    folder = world.data_dir
    suffixes = ["tar", "idx", *(["digests"] if SETS[name].get("digests") else []), "json"]
    files = [path_of(world, suffix) for suffix in suffixes]
    assert [path for what, path in calls if what == "name"][-1] == files[-1]
    for path in files:
        assert calls.index(("sync", path)) < calls.index(("name", path)), path.name
    manifest_named = calls.index(("name", files[-1]))
    for path in files[:-1]:
        named = calls.index(("name", path))
        assert ("sync", path.parent) in calls[named:manifest_named], f"{path.name} may lose its name"
    assert ("sync", folder) in calls[manifest_named:]
    assert not [path.name for path in folder.rglob(".*")], "temporary files are left"


def kill_at_work(world: World) -> None:
    """End a worker with SIGKILL as soon as a temporary file of it appears."""
    before = world.temporaries()
    pid = os.fork()
    if not pid:
        world.try_shard(0)
        os._exit(99)  # it was not killed
    while world.temporaries() == before:
        time.sleep(0.0002)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.processes
def test_what_killed_attempts_left_goes_with_the_one_that_makes_the_shard_or_finds_it_made(
    tmp_path: Path,
) -> None:
    text = "\n".join(text.replace("\n", " ") for text in hostile_texts(30_000, most_words=9))
    world = World(tmp_path).raw({"a.txt": text}).plan(num_shards=1)
    kill_at_work(world)
    kill_at_work(world)
    assert world.try_shard(0).code == 0
    assert world.temporaries() == []
    manifest = (world.data_dir / "shard-00000.json").rename(tmp_path / "manifest")
    kill_at_work(world)
    manifest.rename(world.data_dir / "shard-00000.json")
    assert world.temporaries()
    assert world.try_shard(0).code == 0
    assert world.temporaries() == []
