"""``shardprep export``: other tools read the loader's tokens; one that was stopped goes on."""

from __future__ import annotations

import struct
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from preprocess.look import export as layouts
from shardprep.errors import ReadWriteError
from shardprep.format.plan import need_plan
from shardprep.format.shards import ShardSamples

if TYPE_CHECKING:
    from tests.conftest import Prep

FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "append_eos": True},
    "packed": {"record": "packed", "seq_len": 64},
    "best_fit": {"record": "packed", "seq_len": 64, "pack": "best_fit"},
}


@pytest.fixture(scope="module")
def folders(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = prep.make_forms(sample_dir, tmp_path_factory.mktemp("data"), FORMS, num_shards=3)
    return {name: root / name for name in FORMS}


def rows_of(folder: Path) -> list[list[int]]:
    """The stored samples of all shards, without padding: what the loader's batches are made of."""
    plan, rows = need_plan(folder), []
    for shard_id in range(plan.num_shards):
        with ShardSamples(folder, plan.spec, shard_id) as samples:
            rows += [samples.ids(number).tolist() for number in range(len(samples.records))]
    return rows


def stream_of(folder: Path) -> list[int]:
    """All ids one after another, each document ended by EOS."""
    plan = need_plan(folder)
    rows = rows_of(folder)
    eos = [] if plan.options.append_eos else [plan.tokenizer.eos_token_id or 0]
    return list(chain(*(row + eos for row in rows)))


def export(prep: Prep, folder: Path, to: str, out: Path, *flags: object) -> Path:
    ended = prep.command("export", folder, "--to", to, "--output_dir", out, *flags)
    assert ended.code == 0, ended.text
    return out


def megatron_sequences(out: Path, shard_id: int) -> list[list[int]]:
    """As megatron-core documents its files."""
    raw = (out / f"shard-{shard_id:05d}_document.idx").read_bytes()
    magic, version, code, num_sequences, num_documents = struct.unpack_from("<9sQBQQ", raw)
    assert (magic, version, code) == (b"MMIDIDX\x00\x00", 1, 8)
    assert num_documents == num_sequences + 1
    lengths = np.frombuffer(raw, "<i4", num_sequences, 34)
    offsets = np.frombuffer(raw, "<i8", num_sequences, 34 + lengths.nbytes)
    documents = np.frombuffer(raw, "<i8", num_documents, 34 + lengths.nbytes + offsets.nbytes)
    assert documents.tolist() == list(range(num_documents))
    ids = (out / f"shard-{shard_id:05d}_document.bin").read_bytes()
    assert len(ids) == 2 * int(lengths.sum())
    return [np.frombuffer(ids, "<u2", n, at).tolist() for n, at in zip(lengths, offsets, strict=True)]


@pytest.mark.parametrize("name", FORMS)
def test_megatrons_files_hold_the_documents_ended_by_eos(
    prep: Prep, folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    out = export(prep, folders[name], "megatron", tmp_path / "out")
    sequences = list(chain(*(megatron_sequences(out, shard_id) for shard_id in range(3))))
    assert list(chain(*sequences)) == stream_of(folders[name])
    spec = need_plan(folders[name]).tokenizer
    if name != "best_fit":
        assert {sequence[0] for sequence in sequences} == {spec.bos_token_id}
        assert {sequence[-1] for sequence in sequences} == {spec.eos_token_id}
    weights = (out / "data_args.txt").read_text().split()
    assert sum(map(int, weights[::2])) == len(stream_of(folders[name]))


@pytest.mark.parametrize("name", FORMS)
def test_nanogpts_file_is_the_stream(prep: Prep, folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    out = export(prep, folders[name], "nanogpt", tmp_path / "out")
    assert np.memmap(out / "train.bin", np.uint16, "r").tolist() == stream_of(folders[name])
    assert names_of(out) == ["export.json", "train.bin"]


def names_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("to", ["megatron", "nanogpt", "hf"])
def test_a_stopped_export_goes_on_with_the_shards_that_are_missing(
    prep: Prep, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    whole = export(prep, folders["json"], to, tmp_path / "whole")
    written: list[int] = []
    kind, original = layouts.EXPORTERS[to], layouts.EXPORTERS[to].write

    def write(self: Any, shard: Any) -> None:
        if len(written) == 1:
            raise ReadWriteError("the disk is full")
        original(self, shard)
        written.append(shard.samples.shard_id)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "write", write)
        ended = prep.command("export", folders["json"], "--to", to, "--output_dir", tmp_path / "part")
        assert (ended.code, written) == (74, [0])
    monkeypatch.setattr(
        kind, "write", lambda self, shard: written.append(shard.samples.shard_id) or original(self, shard)
    )
    export(prep, folders["json"], to, tmp_path / "part")
    assert written == [0, 1, 2]
    files = [path.name for path in whole.iterdir() if path.name != "data_args.txt"]
    assert names_of(tmp_path / "part") == names_of(whole)
    for name in files:
        assert (tmp_path / "part" / name).read_bytes() == (whole / name).read_bytes(), name
    export(prep, folders["json"], to, tmp_path / "part")
    assert written == [0, 1, 2], "what is done is left alone"


def test_an_export_that_was_killed_before_its_settings_stood_begins_anew_and_leaves_nothing_of_it(
    prep: Prep, folders: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    left = [out / ".export.json.node-1-123-0a1b2c3d.tmp", out / ".shard-00000_document.bin.n-1-0a1b2c3d.tmp"]
    for path in left:
        path.write_bytes(b"half of it")
    export(prep, folders["json"], "megatron", out)
    assert [path.name for path in left if path.exists()] == []
    assert megatron_sequences(out, 0)


def test_an_export_to_nanogpt_that_was_killed_while_it_marked_a_shard_goes_on(
    prep: Prep, folders: dict[str, Path], tmp_path: Path
) -> None:
    export(prep, folders["json"], "nanogpt", tmp_path / "whole")
    out = tmp_path / "out"
    (out / ".done").mkdir(parents=True)
    (out / "export.json").write_bytes((tmp_path / "whole" / "export.json").read_bytes())
    (out / ".done" / ".shard-00000.node-1-123-0a1b2c3d.tmp").touch()
    export(prep, folders["json"], "nanogpt", out)
    assert names_of(out) == names_of(tmp_path / "whole")
    assert (out / "train.bin").read_bytes() == (tmp_path / "whole" / "train.bin").read_bytes()


def test_another_export_another_folder_and_missing_shards_are_refused(
    prep: Prep, folders: dict[str, Path], data_dir: Path, tmp_path: Path
) -> None:
    export(prep, folders["json"], "nanogpt", tmp_path / "out")
    for flags in (["--to", "megatron"], ["--to", "nanogpt", "--no-put_eos"]):
        ended = prep.command("export", folders["json"], *flags, "--output_dir", tmp_path / "out")
        assert (ended.code, "holds another export" in ended.text) == (78, True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").write_text("mine")
    mine = prep.command("export", folders["json"], "--to", "hf", "--output_dir", tmp_path / "full")
    assert (mine.code, "holds a.txt and no export.json" in mine.text) == (78, True)
    missing = prep.command("export", data_dir, "--to", "hf", "--output_dir", tmp_path / "none")
    assert (missing.code, "shard 00000 is not done" in missing.text) == (66, True)
    assert not (tmp_path / "none").exists()


def test_a_folder_that_megatron_could_not_read_again_is_refused_before_anything_is_written(
    prep: Prep, folders: dict[str, Path], tmp_path: Path
) -> None:
    flags = ["--to", "megatron", "--output_dir", tmp_path / "my data"]
    ended = prep.command("export", folders["json"], *flags)
    assert (ended.code, "white space" in ended.text) == (2, True)
    assert not (tmp_path / "my data").exists()
    export(prep, folders["json"], "nanogpt", tmp_path / "my data")


@pytest.mark.slow
def test_eos_is_put_where_it_is_asked_for(prep: Prep, folders: dict[str, Path], tmp_path: Path) -> None:
    out = export(prep, folders["json"], "nanogpt", tmp_path / "without", "--no-put_eos")
    assert np.memmap(out / "train.bin", np.uint16, "r").tolist() == list(chain(*rows_of(folders["json"])))
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    out = export(prep, folders["json"], "hf", tmp_path / "with", "--put_eos")
    tables = [pa.ipc.open_stream(path.read_bytes()).read_all() for path in sorted(out.glob("*.arrow"))]
    eos = need_plan(folders["json"]).tokenizer.eos_token_id
    rows = list(chain(*(table["input_ids"].to_pylist() for table in tables)))
    assert rows == [[*row, eos] for row in rows_of(folders["json"])]


@pytest.mark.frameworks
@pytest.mark.parametrize("name", ["json", "packed"])
def test_datasets_reads_the_stored_samples(
    prep: Prep, folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    out = export(prep, folders[name], "hf", tmp_path / "out")
    found = datasets.load_from_disk(str(out))
    assert found["input_ids"][:] == rows_of(folders[name])


@pytest.mark.parametrize("name", ["json", "packed"])
def test_arrow_files_hold_the_stored_samples(
    prep: Prep, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    monkeypatch.setattr(layouts, "_ARROW_ROWS_TOKENS", 2000)
    out = export(prep, folders[name], "hf", tmp_path / "out")
    tables = [pa.ipc.open_stream(path.read_bytes()).read_all() for path in sorted(out.glob("*.arrow"))]
    assert list(chain(*(table["input_ids"].to_pylist() for table in tables))) == rows_of(folders[name])
    assert len(tables[0].to_batches()) > 1


@pytest.mark.frameworks
@pytest.mark.parametrize("name", FORMS)
def test_megatron_core_reads_the_documents(
    prep: Prep, folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)
    out = export(prep, folders[name], "megatron", tmp_path / "out")
    ids: list[int] = []
    for shard_id in range(3):
        found = indexed.IndexedDataset(str(out / f"shard-{shard_id:05d}_document"))
        ids += chain(*(found[number].tolist() for number in range(len(found))))
    assert ids == stream_of(folders[name])
