"""``verify`` writes index.json for a whole data set, and names each broken shard with what mends it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardprep import files
from shardprep.format import shards
from shardprep.format.idx import read_idx
from shardprep.format.index import read_index
from shardprep.format.plan import need_plan
from tests.children import run_child
from tests.conftest import forge_shard, seal

if TYPE_CHECKING:
    from tests.conftest import Prep

NUM_SHARDS = 5


@pytest.fixture(scope="module")
def raw_dir(sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample text and a bad line, so that a shard has a quarantine file."""
    folder = tmp_path_factory.mktemp("raw")
    shutil.copytree(sample_dir, folder, dirs_exist_ok=True)
    path = sorted(folder.iterdir())[2]
    path.write_bytes(b"\xff\n" + path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def made_dir(prep: Prep, raw_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    prep.plan(raw_dir, folder, num_shards=NUM_SHARDS)
    prep.make(folder)
    return folder


@pytest.fixture
def whole_dir(made_dir: Path, tmp_path: Path) -> Path:
    """A copy to break, in a folder whose name needs quotes in a shell."""
    return Path(shutil.copytree(made_dir, tmp_path / "my data"))


def flip_a_bit(path: Path, place: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 4
    path.write_bytes(data)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.search(old, text)
    path.write_text(re.sub(old, new, text, count=1), encoding="utf-8")
    seal(path)


def test_a_whole_data_set_gets_an_index_of_its_shards(prep: Prep, whole_dir: Path) -> None:
    ended = prep.command("verify", whole_dir)
    assert ended.code == 0, ended.text
    manifests = [json.loads(path.read_bytes()) for path in sorted(whole_dir.glob("shard-*.json"))]
    samples = sum(item["counts"]["num_samples"] for item in manifests)
    tokens = sum(item["counts"]["num_tokens"] for item in manifests)
    line = f"verified 5 shards: {samples:,} samples, {tokens:,} tokens; wrote {whole_dir / 'index.json'}"
    assert ended.text == f"{line}\n"
    index = json.loads((whole_dir / "index.json").read_bytes())
    assert "run" not in json.dumps(index)
    assert index["spec"] == manifests[0]["spec"]
    rows = [dict(zip(index["columns"], row, strict=True)) for row in index["shards"]]
    for row, manifest in zip(rows, manifests, strict=True):
        assert row["tar_sha256"] == manifest["tar"]["sha256"][:16]
        assert row["tar_bytes"] == manifest["tar"]["num_bytes"]
        assert row["num_documents"] == manifest["counts"]["num_documents"]
    assert read_index(whole_dir).column("num_tokens").sum() == tokens
    assert prep.temporaries(whole_dir) == []


@pytest.mark.slow
def test_equal_data_sets_have_equal_indexes(
    prep: Prep, raw_dir: Path, whole_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(raw_dir, tmp_path / "raw")
    other = tmp_path / "other"
    prep.plan(tmp_path / "raw", other, num_shards=NUM_SHARDS)
    prep.make(other, 4, 2, 0, 1, 3, engine="tokenizers")
    for folder in (whole_dir, other):
        assert prep.command("verify", folder).code == 0
    assert (whole_dir / "index.json").read_bytes() == (other / "index.json").read_bytes()


@pytest.mark.slow
def test_the_index_takes_at_most_120_bytes_a_shard(prep: Prep, sample_dir: Path, tmp_path: Path) -> None:
    sizes = {}
    for num_shards in (10, 70):
        folder = tmp_path / str(num_shards)
        prep.plan(sample_dir, folder, num_shards=num_shards)
        prep.make(folder)
        assert prep.command("verify", folder).code == 0
        sizes[num_shards] = (folder / "index.json").stat().st_size
    a_shard = (sizes[70] - sizes[10]) / 60
    wider = 5 * len("000000000")  # figures of a real shard have up to nine digits more each
    assert 20 < a_shard < 120 - wider


Break = Callable[[Path], object]
BROKEN: dict[str, tuple[Break, int, str]] = {
    "tar gone": (lambda data: (data / "shard-00003.tar").unlink(), 66, r"shard-00003\.tar is missing"),
    "idx gone": (lambda data: (data / "shard-00003.idx").unlink(), 66, r"shard-00003\.idx is missing"),
    "manifest gone": (lambda data: (data / "shard-00003.json").unlink(), 66, "shard 00003 is not done"),
    "all gone": (
        lambda data: [path.unlink() for path in data.glob("shard-00003.*")],
        66,
        "shard 00003 is not done",
    ),
    "quarantine gone": (
        lambda data: next((data / "quarantine").iterdir()).unlink(),
        66,
        r"quarantine/shard-\d+\.jsonl is missing",
    ),
    "tar cut short": (
        lambda data: os.truncate(data / "shard-00003.tar", 5120),
        65,
        r"shard-00003\.tar has 5120 of \d+ bytes",
    ),
    "idx cut short": (lambda data: os.truncate(data / "shard-00003.idx", 64), 65, r"idx has 64 of \d+ bytes"),
    "manifest cut short": (
        lambda data: os.truncate(data / "shard-00003.json", 99),
        65,
        r"shard-00003\.json is not JSON",
    ),
    "bit of the tar": (
        lambda data: flip_a_bit(data / "shard-00003.tar"),
        65,
        r"shard-00003\.tar has sha256 \w{12}, its manifest says \w{12}",
    ),
    "bit of the idx": (
        lambda data: flip_a_bit(data / "shard-00003.idx", 70),
        65,
        r"shard-00003\.idx has sha256",
    ),
    "bit of the quarantine": (
        lambda data: flip_a_bit(next((data / "quarantine").iterdir())),
        65,
        r"\.jsonl has sha256",
    ),
    "manifest of another shard": (
        lambda data: shutil.copyfile(data / "shard-00001.json", data / "shard-00003.json"),
        78,
        r"shard-00003\.json is shard 1 of plan \w{12}, expected shard 3 of",
    ),
    "manifest of another plan": (
        lambda data: edit(data / "shard-00003.json", r'"plan_id": "....', '"plan_id": "abcd'),
        78,
        "is shard 3 of plan abcd",
    ),
    "manifest of another spec": (
        lambda data: edit(data / "shard-00003.json", r'"append_eos": false', '"append_eos": true'),
        78,
        "describes another data set",
    ),
    "other input bytes": (
        lambda data: edit(data / "shard-00003.json", r'"input_bytes": \d+', '"input_bytes": 7'),
        65,
        r"was made of 7 input bytes, the plan gives it \d+",
    ),
    "other counts": (
        lambda data: edit(data / "shard-00003.json", r'"num_tokens": \d+', '"num_tokens": 7'),
        65,
        r"the idx of shard 00003 has \d+ samples of \d+ tokens, its manifest says \d+ of 7",
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_shard_is_named_with_a_command_that_mends_it(prep: Prep, whole_dir: Path, name: str) -> None:
    before = prep.contents(whole_dir)
    damage, code, message = BROKEN[name]
    damage(whole_dir)
    ended = prep.command("verify", whole_dir)
    assert ended.code == code, ended.text
    assert re.search(message, ended.text), ended.text
    assert "1 of 5 shards are not right: " in ended.text
    assert not (whole_dir / "index.json").exists()
    command = re.search(r"run: (.*shardprep .*)", ended.text)
    assert command, ended.text
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run_child(["sh", "-c", command[1]], env={**prep.environ(), "PATH": path})
    assert prep.command("verify", whole_dir).code == 0
    assert prep.contents(whole_dir) == before


def test_every_broken_shard_is_named(prep: Prep, whole_dir: Path) -> None:
    (whole_dir / "shard-00000.tar").unlink()
    flip_a_bit(whole_dir / "shard-00002.tar")
    os.truncate(whole_dir / "shard-00003.idx", 64)
    ended = prep.command("verify", whole_dir)
    assert ended.code == 66
    for shard_id in (0, 2, 3):
        assert f"error: shard {shard_id:05d}: " in ended.text
    assert "3 of 5 shards are not right: shards 0,2-3" in ended.text


def test_the_fast_tier_sees_sizes_but_no_bits(prep: Prep, whole_dir: Path) -> None:
    flip_a_bit(whole_dir / "shard-00003.tar")
    assert prep.command("verify", whole_dir, "--fast").code == 0
    assert prep.command("verify", whole_dir).code == 65
    os.truncate(whole_dir / "shard-00003.tar", 1024)
    assert prep.command("verify", whole_dir, "--fast").code == 65


@pytest.mark.parametrize("damage", ["past the end", "out of order"])
def test_an_idx_that_names_other_documents_than_its_shards_is_seen_though_hashes_are_right(
    prep: Prep, whole_dir: Path, damage: str
) -> None:
    records = read_idx(whole_dir, need_plan(whole_dir).spec, 3)
    if damage == "past the end":
        records["source_offset"][0] = 10**9
    else:
        records["source_offset"][:2] = records["source_offset"][1::-1]
    forge_shard(whole_dir, 3, records=records)
    ended = prep.command("verify", whole_dir)
    assert ended.code == 65
    assert "the idx of shard 00003 names sources outside of its part of the plan" in ended.text


@pytest.mark.slow
def test_a_packed_data_set_verifies_too(prep: Prep, sample_dir: Path, tmp_path: Path) -> None:
    for pack in ("concat", "best_fit"):
        folder = tmp_path / pack
        prep.plan(sample_dir, folder, num_shards=3, record="packed", seq_len=256, pack=pack)
        prep.make(folder)
        ended = prep.command("verify", folder)
        assert ended.code == 0, ended.text


def num_read_bytes() -> int:
    """Bytes that the system calls of this process have read so far."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["json", "npy", "packed"])
@pytest.mark.parametrize("piece_bytes", [64, 4 << 20])
def test_each_tar_is_read_once_by_verify_with_its_crcs(
    prep: Prep, sample_dir: Path, tmp_path: Path, form: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms: dict[str, dict[str, Any]] = {
        "json": {},
        "npy": {"token_format": "npy"},
        "packed": {"record": "packed", "seq_len": 1024},
    }
    raw, data = tmp_path / "raw", tmp_path / "data"
    raw.mkdir()
    text = b"".join(path.read_bytes() for path in sorted(sample_dir.iterdir()))
    (raw / "a.txt").write_bytes(6 * text)
    prep.plan(raw, data, num_shards=2, **forms[form])
    prep.make(data)
    monkeypatch.setattr(shards, "READ_BYTES", piece_bytes)
    monkeypatch.setattr(files, "HASH_BLOCK_BYTES", max(piece_bytes, 4096))
    num_bytes = sum(path.stat().st_size for path in data.glob("*.tar"))
    begin = num_read_bytes()
    ended = prep.command("verify", data)
    assert ended.code == 0, ended.text
    assert num_bytes <= num_read_bytes() - begin < 1.5 * num_bytes
