"""Whatever stands in a JSON file of the contract, or in its place, has an error that names it."""

from __future__ import annotations

import copy
import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loader.find_shards import find_shards
from shardprep.errors import BrokenShard, ReadWriteError, ShardprepError, UnknownVersion
from shardprep.format.idx import CHUNK_RECORDS, IDX_DOCUMENT, ChunkCrcs
from shardprep.format.index import read_index
from shardprep.format.json_files import content_sha256
from shardprep.format.manifest import read_manifest
from tests.word_tokenizers import save_word_tokenizer

if TYPE_CHECKING:
    from tests.conftest import Prep

READERS: dict[str, Callable[[Path], Any]] = {
    "index.json": read_index,
    "shard-00000.json": lambda folder: read_manifest(folder, 0),
}
NONSENSE: dict[str, Any] = {
    "null": None,
    "true": True,
    "false in quotes": "false",
    "a float": 1.0,
    "infinity": 1e999,
    "negative": -1,
    "2**70": 2**70,
    "half a surrogate": "\ud800",
    "a NUL": "a\0b",
    "a list": [1],
    "an object": {"a": 1},
}


@pytest.fixture(scope="module")
def made_dir(prep: Prep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw, folder = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("made")
    (raw / "a.txt").write_text("one line\nand two\n" * 20)
    prep.plan(raw, folder, num_shards=2)
    prep.make(folder)
    assert prep.command("verify", folder).code == 0
    return folder


@pytest.fixture
def whole_dir(made_dir: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(made_dir, tmp_path / "data"))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value of a JSON document; of lists the first three entries."""
    inner = (
        value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    )
    return (
        [path, *(place for key, each in inner for place in places(each, (*path, key)))]
        if path != ()
        else [place for key, each in inner for place in places(each, (key,))]
    )


def replaced(data: Any, place: tuple[Any, ...], value: Any) -> Any:
    data = copy.deepcopy(data)
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return data


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_every_value_of_a_wrong_type_or_range_is_refused_though_the_hash_is_right(
    whole_dir: Path, name: str
) -> None:
    path = whole_dir / name
    data = json.loads(path.read_bytes())
    every = [place for place in places(data) if place[0] not in {"run", "content_sha256"}]
    assert len(every) > 15
    before = READERS[name](whole_dir)
    texts: dict[Any, str] = {}
    for place in every:
        for what, value in NONSENSE.items():
            forged = replaced(data, place, value)
            forged["content_sha256"] = content_sha256(forged)
            path.write_text(json.dumps(forged))
            try:
                READERS[name](whole_dir)
            except ShardprepError as error:
                texts[place, what] = str(error)
    assert {key: text for key, text in texts.items() if name not in text} == {}
    assert "".join(texts.values()).encode(), "they can be printed"
    assert len(texts) > 0.8 * len(every) * len(NONSENSE)
    path.write_text(json.dumps(data))
    assert type(READERS[name](whole_dir)) is type(before)


CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "not UTF-8": b"\xff\xfe{}",
    "nested deep": b"[" * 200_000,
    "nested deep and closed": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "NaN": b'{"format": NaN}',
    "a number of a million digits": b'{"format": ' + b"9" * 1_000_000 + b"}",
    "version of another type": b'{"format": "shardprep-manifest", "version": [2]}',
    "no object": b"3",
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_json_of_ours_is_refused(whole_dir: Path, name: str, content: str) -> None:
    (whole_dir / name).write_bytes(CONTENTS[content])
    with pytest.raises((BrokenShard, UnknownVersion)) as caught:
        READERS[name](whole_dir)
    assert caught.value.path == str(whole_dir / name)


def found_there(name: str, folder: Path) -> str | None:
    """What stands in the place of a file, as the error says."""
    with pytest.raises(BrokenShard) as caught:
        READERS[name](folder)
    assert caught.value.path == str(folder / name)
    return caught.value.found


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(whole_dir: Path, name: str) -> None:
    path = whole_dir / name
    path.unlink()
    os.mkfifo(path)
    assert found_there(name, whole_dir) == "a FIFO"
    path.unlink()
    path.mkdir()
    assert found_there(name, whole_dir) == "a folder"
    path.rmdir()
    path.symlink_to("/dev/zero")
    assert found_there(name, whole_dir) == "a character device"


@pytest.mark.parametrize("name", READERS)
def test_a_file_too_large_is_refused_before_it_is_read(whole_dir: Path, name: str) -> None:
    os.truncate(whole_dir / name, 1 << 40)
    assert found_there(name, whole_dir) == "1099511627776 bytes"


@pytest.mark.parametrize(("name", "call"), itertools.product(READERS, ["open", "fstat", "read"]))
def test_an_error_of_the_file_system_is_a_read_error_that_names_the_file(
    whole_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: str
) -> None:
    path, ours = str(whole_dir / name), set[int]()

    def failing(this: str, does: str) -> None:
        original = getattr(os, this)

        def attempt(file: Any, *args: Any, **options: Any) -> Any:
            is_ours = file in ours if isinstance(file, int) else str(file) == path
            found = original(file, *args, **options)
            if is_ours and does == call:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if is_ours and does == "open":
                ours.add(found)
            return found

        monkeypatch.setattr(os, this, attempt)

    for each in ("open", "fstat", "read", "close"):
        failing(each, each)
    failing("preadv", "read")
    with pytest.raises(ReadWriteError, match=rf"{name} cannot be read: Input/output error"):
        READERS[name](whole_dir)


def test_the_loader_reads_an_index_again_after_an_error_that_goes_away(
    whole_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from shardprep import files as regular_files

    monkeypatch.setattr(regular_files, "RETRY_DELAYS_S", (0.0, 0.0))
    real_open, failures = os.open, [errno.EIO, errno.ESTALE]

    def open_(file: Any, *args: Any, **options: Any) -> int:
        if str(file).endswith("index.json") and failures:
            raise OSError(failures.pop(), "for a while")
        return real_open(file, *args, **options)

    monkeypatch.setattr(os, "open", open_)
    assert find_shards(whole_dir).num_shards == 2
    assert not failures
    assert "trying again" in caplog.text


@pytest.mark.parametrize("column", [0, 1, 3, 4])
def test_numbers_of_an_index_that_do_not_agree_are_refused(whole_dir: Path, column: int) -> None:
    path = whole_dir / "index.json"
    data = json.loads(path.read_bytes())
    data["shards"][1][column] = 0 if data["shards"][1][column] != 0 else 7
    data["content_sha256"] = content_sha256(data)
    path.write_text(json.dumps(data))
    with pytest.raises(BrokenShard, match=r"shards\[1\]"):
        read_index(whole_dir)


def test_a_manifest_without_permission_ends_a_command_with_74(
    prep: Prep, whole_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def open_(file: Any, *args: Any, **options: Any) -> int:
        if str(file).endswith("shard-00000.json"):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real_open(file, *args, **options)

    monkeypatch.setattr(os, "open", open_)
    for command in (["verify", whole_dir], ["--shard_id", 0, "--output_dir", whole_dir], ["run", whole_dir]):
        ended = prep.command(*command)
        assert ended.code == 74, ended.text
        assert "shard-00000.json cannot be read: Permission denied" in ended.text


@pytest.mark.slow
def test_the_tokenizer_is_synced_before_the_plan_is_published(
    prep: Prep, sample_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    real_fsync, real_rename, real_link = os.fsync, Path.rename, os.link

    def fsync(handle: int) -> None:
        events.append(("fsync", Path(f"/proc/self/fd/{handle}").readlink().name))
        real_fsync(handle)

    def rename(path: Path, target: Path) -> Any:
        events.append(("rename", Path(target).name))
        return real_rename(path, target)

    def link(source: Any, target: Any) -> None:
        events.append(("link", Path(target).name))
        real_link(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(os, "link", link)
    prep.plan(sample_dir, tmp_path / "data", num_shards=2)
    named, planned = events.index(("rename", "tokenizer")), events.index(("link", "plan.json"))
    assert named < planned
    assert ("fsync", "tokenizer.json") in events[:named]
    assert events[named - 1][0] == "fsync", "the folder that gets the name"
    assert events[named - 1][1].startswith(".tokenizer.")
    assert ("fsync", "data") in events[named:planned]


@pytest.mark.slow
def test_a_tokenizer_without_a_plan_does_not_hold_a_folder(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    save_word_tokenizer(tmp_path / "other", 50)
    prep.plan(sample_dir, tmp_path / "data", num_shards=2, model_id=str(tmp_path / "other"))
    (tmp_path / "data" / "plan.json").unlink()  # as a kill between the two leaves it
    plan = prep.plan(sample_dir, tmp_path / "data", num_shards=2)
    assert prep.names(tmp_path / "data") == ["plan.json", "tokenizer"]
    assert plan.tokenizer.vocab_size > 600
    assert prep.command("--shard_id", 0, "--output_dir", tmp_path / "data").code == 0


@pytest.mark.slow
def test_planning_again_puts_a_damaged_tokenizer_back(prep: Prep, sample_dir: Path, tmp_path: Path) -> None:
    prep.plan(sample_dir, tmp_path / "data", num_shards=2)
    path = tmp_path / "data" / "tokenizer" / "tokenizer_config.json"
    good = path.read_bytes()
    path.write_bytes(good.replace(b"<|end_of_text|>", b"<|end_of_tent|>"))
    assert path.read_bytes() != good
    prep.plan(sample_dir, tmp_path / "data", num_shards=2)
    assert path.read_bytes() == good
    assert prep.temporaries(tmp_path / "data") == []


def test_crcs_are_the_same_however_the_records_come() -> None:
    record = bytes(range(IDX_DOCUMENT.itemsize))
    tables = []
    for step in (1, 7, CHUNK_RECORDS, 3 * CHUNK_RECORDS):
        crcs = ChunkCrcs(IDX_DOCUMENT)
        records = record * (2 * CHUNK_RECORDS + 5)
        for start in range(0, len(records), step * len(record)):
            crcs.add(records[start : start + step * len(record)])
        tables.append(crcs.table())
    assert len(tables[0]) == 3 * 4
    assert set(tables) == {tables[0]}
