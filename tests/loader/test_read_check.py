"""``read_check="crc"``: a flipped bit of a sample is refused by name, and nothing else changes."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from loader import TokenLoader, get_llama3_dataloader
from loader import reading as open_shard
from loader.__main__ import main as loader_command
from loader.find_shards import ShardSet, find_shards
from loader.reading import ReaderContext, ShardReader
from shardprep.errors import BrokenShard, MissingShard, ShardprepError, UsageError
from shardprep.format.idx import read_idx
from shardprep.format.manifest import read_manifest
from tests.chat_sets import TAGGED, chat_model, conversations, write_chats

if TYPE_CHECKING:
    from tests.conftest import Prep

FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy"},
    "packed": {"record": "packed", "seq_len": 16, "pack": "best_fit"},
    "chat": {"record": "chat", "seq_len": 64},
}
NUM_SHARDS = 2


@pytest.fixture(scope="module")
def made(prep: Prep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    (root / "raw").mkdir()
    lines = [f"document {number} of some 문서 {'word ' * (number % 7)}\n" for number in range(24)]
    (root / "raw" / "a.txt").write_text("".join(lines), encoding="utf-8")
    chats = write_chats(root / "chats", conversations(12))
    model = chat_model(prep.model_dir, root / "model", TAGGED)
    for name, options in FORMS.items():
        raw, model_id = (chats, model) if name == "chat" else (root / "raw", prep.model_dir)
        prep.plan(raw, root / name, num_shards=NUM_SHARDS, model_id=str(model_id), **options)
        prep.make(root / name)
        assert prep.command("verify", root / name, "--crcs").code == 0
    return root


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def load(folder: object, **options: Any) -> TokenLoader:
    return get_llama3_dataloader(folder, 2, **{"num_workers": 0, "seed": 5, **options})  # type: ignore[arg-type]


def epoch(loader: TokenLoader) -> list[Any]:
    with loader:
        return [{name: value.tolist() for name, value in batch.items()} for batch in loader]


def flip(path: Path, offset: int, bit: int = 2) -> None:
    """In place: who has the file open reads it."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def read_first(shards: ShardSet) -> None:
    """Every sample of the first shard, as the loader's processes read them."""
    reader = ShardReader(shards, ReaderContext(compares_crcs=True))
    try:
        reader.read(np.arange(shards.first_sample[1]), starts=shards.has_rows)
    finally:
        reader.close()


def places(folder: Path) -> list[tuple[int, int, int]]:
    """Of the first shard: sample, first byte and end of all that is read of it."""
    spec = read_manifest(folder, 0).spec
    found = []
    for number, row in enumerate(read_idx(folder, spec, 0)):
        found.append((number, int(row["offset"]), int(row["offset"] + row["num_bytes"])))
        if spec.kind in ("packed", "chat"):
            begin = int(row["starts_offset"])
            found.append((number, begin, begin + 4 * int(row["num_starts"])))
        if spec.kind == "chat":
            begin = int(row["mask_offset"])
            found.append((number, begin, begin + spec.seq_len))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_flipped_bit_of_any_byte_that_is_read_is_refused_by_tar_sample_and_bytes(
    copied: Path, form: str
) -> None:
    tar, shards = copied / form / "shard-00000.tar", find_shards(copied / form)
    read_first(shards)
    num_tried = 0
    for sample, begin, end in places(copied / form):
        for offset in range(begin, end, 1 if end - begin < 8 else 7):
            flip(tar, offset, offset % 8)
            with pytest.raises(BrokenShard) as caught:
                read_first(shards)
            message = rf"{tar}: bytes {begin} to {end}, of sample {sample}, have not the crc32 .* verify"
            assert re.match(message, str(caught.value)), caught.value
            assert caught.value.exit_code == 65
            flip(tar, offset, offset % 8)
            num_tried += 1
    assert num_tried > 50
    read_first(shards)


@pytest.mark.processes
def test_without_the_check_a_flipped_bit_of_an_id_is_another_batch(copied: Path) -> None:
    """What the check is for; docs/format.md says it."""
    whole = epoch(load(copied / "packed"))
    flip(copied / "packed" / "shard-00000.tar", places(copied / "packed")[0][1])
    assert epoch(load(copied / "packed")) != whole
    with pytest.raises(BrokenShard, match=r"shard-00000\.tar: bytes .*crc32"):
        epoch(load(copied / "packed", read_check="crc"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"boundaries": "position_ids"},
        {"split": "train", "validation_fraction": 0.3},
    ],
    ids=["whole", "rows", "split"],
)
def test_the_check_changes_no_batch(made: Path, form: str, options: dict[str, Any]) -> None:
    if "boundaries" in options:
        options = {**options, "seq_len": FORMS[form].get("seq_len", 16)}
    assert epoch(load(made / form, read_check="crc", **options)) == epoch(load(made / form, **options))


@pytest.mark.processes
def test_a_run_without_the_check_goes_on_with_it_on_other_ranks_and_workers(made: Path) -> None:
    options = {"global_batch_size": 4}
    with load(made / "packed", **options) as plain:
        batches = [batch["input_ids"].tolist() for batch in plain]
        state = plain.state_at(2)
    assert len(batches) > 4, "two batches per step"
    ranks = []
    for rank in range(2):
        with load(
            made / "packed", read_check="crc", num_workers=1, rank=rank, world_size=2, **options
        ) as loader:
            loader.load_state_dict(state)
            ranks.append([batch["input_ids"].tolist() for batch in loader])
    steps = [plain[:] + other for plain, other in zip(batches[4::2], batches[5::2], strict=True)]
    assert [sorted(a + b) for a, b in zip(*ranks, strict=True)] == [sorted(step) for step in steps]


def test_a_large_idx_that_is_read_in_parts_is_checked_alike(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_shard, "HELD_IDX_BYTES", 0)
    whole = epoch(load(copied / "npy"))
    assert epoch(load(copied / "npy", read_check="crc")) == whole
    flip(copied / "npy" / "shard-00000.tar", places(copied / "npy")[3][1])
    with pytest.raises(BrokenShard, match=r"of sample 3, have not the crc32"):
        epoch(load(copied / "npy", read_check="crc"))


def test_a_staged_copy_with_a_flipped_bit_is_left_and_the_data_set_read(
    copied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = epoch(load(copied / "packed", boundaries="position_ids"))
    assert loader_command(["stage", str(copied / "packed"), "--to", str(tmp_path / "node")]) == 0
    (copy,) = (tmp_path / "node").glob("*/shard-00000.tar")
    options = {"boundaries": "position_ids", "staged_dir": tmp_path / "node", "read_check": "crc"}
    for _, begin, end in places(copied / "packed")[:2]:  # ids, then starts
        caplog.clear()
        assert end > begin
        flip(copy, begin)
        assert epoch(load(copied / "packed", **options)) == whole
        (said,) = [record.message for record in caplog.records if "a staged copy fails" in record.message]
        assert f"{copy}: bytes {begin} to {end}, of sample 0, have not the crc32" in said
        flip(copy, begin)
    caplog.clear()
    assert epoch(load(copied / "packed", **options)) == whole
    assert "a staged copy fails" not in caplog.text


def test_a_bit_of_the_crc32s_themselves_is_refused_and_no_tar_is_blamed(copied: Path) -> None:
    path, shards = copied / "npy" / "crcs" / "shard-00000.crc", find_shards(copied / "npy")
    size = path.stat().st_size
    assert size > 64
    for offset in range(size):
        flip(path, offset, offset % 8)
        with pytest.raises(ShardprepError) as caught:
            read_first(shards)
        assert str(caught.value).startswith(str(path)), caught.value
        flip(path, offset, offset % 8)
    read_first(shards)
    os.truncate(path, size - 1)
    with pytest.raises(BrokenShard, match=r"shard-00000\.crc is cut short"):
        read_first(shards)


def test_crc32s_of_another_shard_are_refused(copied: Path) -> None:
    folder = copied / "json" / "crcs"
    shutil.copy(folder / "shard-00001.crc", folder / "shard-00000.crc")
    with pytest.raises(BrokenShard, match=r"written for shard_id 1, expected 0.*verify .* --crcs"):
        epoch(load(copied / "json", read_check="crc"))


def test_missing_crc32s_are_known_before_the_first_batch_and_by_every_rank_at_opening(copied: Path) -> None:
    (copied / "json" / "crcs" / "shard-00001.crc").unlink()
    with pytest.raises(MissingShard, match=r"1 of 2 shards .*shard-00001\.crc; run: .*verify .* --crcs"):
        load(copied / "json", read_check="crc")
    loader = load(copied / "json", read_check="crc", rank=1, world_size=2)
    with pytest.raises(MissingShard, match=r"shard-00001\.crc is missing, .*verify .* --crcs"):
        epoch(loader)
    assert epoch(load(copied / "json"))


def test_a_shard_without_its_idx_is_not_scanned_instead_where_crc32s_are_compared(copied: Path) -> None:
    (copied / "json" / "shard-00001.idx").unlink()
    assert epoch(load(copied / "json"))
    with pytest.raises(MissingShard, match=r"shard-00001\.idx is missing"):
        epoch(load(copied / "json", read_check="crc"))


def test_what_cannot_be_checked_is_refused(made: Path, prep: Prep, tmp_path: Path) -> None:
    shutil.copy(made / "json" / "shard-00000.tar", tmp_path / "a.tar")
    with pytest.raises(UsageError, match=r"a\.tar is a tar of others, of which there are no crc32s"):
        load(tmp_path / "a.tar", model_id=prep.model_dir, read_check="crc")
    with pytest.raises(UsageError, match="read_check is 'sha256', expected 'none' or 'crc'"):
        load(made / "json", read_check="sha256")


def test_verify_writes_crc32s_once_mends_damaged_ones_and_has_none_of_a_broken_shard(
    copied: Path, prep: Prep
) -> None:
    folder = copied / "npy"
    path = folder / "crcs" / "shard-00001.crc"
    good, written = path.read_bytes(), path.stat().st_ino
    assert prep.command("verify", folder, "--crcs").code == 0
    assert path.stat().st_ino == written, "right ones are left as they are"
    flip(path, len(good) // 2)
    assert prep.command("verify", folder).code == 0, "they are no part of the data set"
    assert path.read_bytes() != good
    assert prep.command("verify", folder, "--crcs").code == 0
    assert path.read_bytes() == good
    path.unlink()
    flip(folder / "shard-00001.tar", 700)
    assert prep.command("verify", folder, "--crcs").code == 65
    assert not path.exists()
    assert prep.temporaries(folder / "crcs") == []


def test_verify_fast_writes_no_crc32s(copied: Path, prep: Prep) -> None:
    shutil.rmtree(copied / "npy" / "crcs")
    ended = prep.command("verify", copied / "npy", "--fast", "--crcs")
    assert ended.code == 2
    assert "--crcs reads every shard, and --fast none" in ended.text
    assert prep.command("verify", copied / "npy").code == 0
    assert not (copied / "npy" / "crcs").exists()


def test_crc32s_that_cannot_be_written_are_73_for_each_shard(copied: Path, prep: Prep) -> None:
    shutil.rmtree(copied / "npy" / "crcs")
    (copied / "npy" / "crcs").write_bytes(b"a file")
    ended = prep.command("verify", copied / "npy", "--crcs")
    assert ended.code == 73
    assert ended.text.count("crcs cannot be made: File exists") == NUM_SHARDS
