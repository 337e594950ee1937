"""``shardprep export``: other tools read the tokens; one that was stopped goes on; two at once agree."""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.world import EOS, Ended, World, call_main, hostile_text, tokenizer_dir

FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "packed": {"record": "packed", "seq_len": 64},
    "best_fit": {"record": "packed", "seq_len": 64, "pack": "best_fit"},
}
EOS_ID = int(Tokenizer.from_file(str(tokenizer_dir() / "tokenizer.json")).token_to_id(EOS) or 0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("data")
    for name, options in FORMS.items():
        world = World(root, data_dir=root / name).raw(
            {"a.txt": hostile_text(120), "b.txt": hostile_text(80, 1)}
        )
        world.plan(num_shards=3, **options).run()
    return {name: root / name for name in FORMS}


def samples_of(folder: Path) -> list[list[int]]:
    """Return the stored documents, or rows without padding, as the tars have them."""
    samples: list[list[int]] = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        for name, raw in members.items():
            if name.endswith(".json"):
                samples.append(json.loads(raw))
            elif name.endswith(".token_ids.npy"):
                ids = np.load(io.BytesIO(raw))
                lengths = members.get(name.replace("token_ids", "row_tokens"))
                full = [ids.shape[-1]] * len(ids)
                of_rows = np.load(io.BytesIO(lengths)).tolist() if lengths else full
                rows = ids[None] if ids.ndim == 1 else ids
                samples += [row[:size].tolist() for row, size in zip(rows, of_rows, strict=False)]
    return samples


def stream_of(folder: Path) -> list[int]:
    """Return all ids one after another, each document ended by EOS."""
    put = [EOS_ID] if folder.name == "json" else []
    return list(chain(*(sample + put for sample in samples_of(folder))))


def export(folder: Path, to: str, out: Path, *flags: object) -> Ended:
    return call_main("export", folder, "--to", to, "--output_dir", out, *flags)


def exported(folder: Path, to: str, out: Path, *flags: object) -> Path:
    ended = export(folder, to, out, *flags)
    assert ended.code == 0, ended.text
    return out


def files(folder: Path) -> dict[str, bytes]:
    """Return what an export holds, but its settings, and the list that holds paths."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    return {name: found[name] for name in found if name not in ("export.json", "data_args.txt")}


def megatron_sequences(out: Path, shard_id: int) -> list[list[int]]:
    """Read a shard as megatron-core documents its files."""
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
def test_megatrons_files_hold_the_documents_ended_by_eos_and_nanogpts_is_their_stream(
    folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    out, stream = exported(folders[name], "megatron", tmp_path / "out"), stream_of(folders[name])
    sequences = list(chain(*(megatron_sequences(out, shard_id) for shard_id in range(3))))
    assert list(chain(*sequences)) == stream
    if name != "best_fit":
        assert {sequence[-1] for sequence in sequences} == {EOS_ID}
        assert all(EOS_ID not in sequence[:-1] for sequence in sequences)
    sizes = (out / "data_args.txt").read_text().split()[::2]
    assert sum(map(int, sizes)) == len(stream)
    out = exported(folders[name], "nanogpt", tmp_path / "of nanogpt")
    assert np.fromfile(out / "train.bin", np.uint16).tolist() == stream
    assert sorted(path.name for path in out.iterdir()) == ["export.json", "train.bin"]


@pytest.mark.slow
def test_a_document_of_more_than_is_read_at_once_is_exported_whole(tmp_path: Path) -> None:
    text = " ".join(map(str, range(150_000)))
    world = World(tmp_path, data_dir=tmp_path / "json").raw({"a.txt": f"short\n{text}\nshort\n"})
    out = exported(world.plan(num_shards=1).run().data_dir, "nanogpt", tmp_path / "out")
    assert (world.data_dir / "shard-00000.tar").stat().st_size > 4 << 20
    assert np.fromfile(out / "train.bin", np.uint16).tolist() == stream_of(world.data_dir)


@pytest.mark.parametrize("flags", [[], ["--put_eos"]])
@pytest.mark.parametrize("name", ["json", "packed"])
def test_arrow_files_hold_the_stored_samples(
    folders: dict[str, Path], tmp_path: Path, name: str, flags: list[str]
) -> None:
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    out = exported(folders[name], "hf", tmp_path / "out", *flags)
    tables = [pa.ipc.open_stream(path.read_bytes()).read_all() for path in sorted(out.glob("*.arrow"))]
    put = [EOS_ID] if flags and name == "json" else []
    rows = [row + put for row in samples_of(folders[name])]
    assert list(chain(*(table["input_ids"].to_pylist() for table in tables))) == rows
    assert len(json.loads((out / "state.json").read_text())["_data_files"]) == 3


@pytest.mark.frameworks
def test_datasets_and_megatron_core_read_them(folders: dict[str, Path], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    out = exported(folders["packed"], "hf", tmp_path / "hf")
    assert datasets.load_from_disk(str(out))["input_ids"][:] == samples_of(folders["packed"])
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)
    out = exported(folders["json"], "megatron", tmp_path / "megatron")
    found = [indexed.IndexedDataset(str(out / f"shard-{shard_id:05d}_document")) for shard_id in range(3)]
    ids = chain(*(each[number].tolist() for each in found for number in range(len(each))))
    assert list(ids) == stream_of(folders["json"])


def at_call(name: str, number: int, folder: Path, meanwhile: Callable[[], object]) -> Callable[..., Any]:
    """Return a call of os that does something else just before its ``number``-th file of a folder."""
    real, left = getattr(os, name), [number]

    def called(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).startswith(str(folder)):
            left[0] -= 1
            if left[0] == 0:
                meanwhile()
        return real(path, *args, **kwargs)

    return called


@pytest.mark.parametrize("to", ["nanogpt", "megatron"])
@pytest.mark.parametrize("call", ["open", "rename"])
def test_at_whatever_file_another_export_comes_both_end_well_with_bytes_of_one(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, call: str
) -> None:
    """tests/faults/races.py holds equal ones beside each other."""
    data, codes, flag = folders["json"], list[int](), "--no-put_eos"
    first = files(exported(data, to, tmp_path / "first", "--put_eos"))
    other = files(exported(data, to, tmp_path / "other", flag))
    for number in range(1, 40):
        out = tmp_path / "out" / str(number)
        codes.clear()
        with monkeypatch.context() as patch:

            def meanwhile(out: Path = out) -> None:
                codes.append(export(data, to, out, flag).code)

            patch.setattr(os, call, at_call(call, number, out, meanwhile))
            codes.append(export(data, to, out, "--put_eos").code)
        if len(codes) == 1:
            break
        assert sorted(codes) == [0, 78], number
        assert files(out) == (first if codes[-1] == 0 else other), number
    assert number > 3


def test_an_export_into_the_folder_of_another_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    data, out = folders["json"], exported(folders["json"], "nanogpt", tmp_path / "out")
    before = files(out)
    assert export(data, "megatron", out).code == 78
    assert export(data, "nanogpt", out, "--no-put_eos").code == 78
    for content in ("", "[]", "3", '{"to": 3}', "[" * 10**5, "\0"):
        (out / "export.json").write_text(content)
        assert export(data, "nanogpt", out).code == 78, content
    assert files(out) == before


def test_one_side_of_a_split_is_exported_apart_from_the_whole(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": hostile_text(60)})
    world.plan(num_shards=1, validation_fraction=0.3).run()
    sizes = []
    for side in ("train", "validation"):
        out = exported(world.data_dir, "nanogpt", tmp_path / side, "--split", side)
        sizes.append((out / "train.bin").stat().st_size)
    assert export(world.data_dir, "nanogpt", tmp_path / "train").code == 78
    whole = exported(world.data_dir, "nanogpt", tmp_path / "both") / "train.bin"
    assert sum(sizes) == whole.stat().st_size
    assert min(sizes) > 0
