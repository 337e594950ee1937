"""``peek`` shows what a data set holds by each kind of address; ``export`` writes it for other tools."""

from __future__ import annotations

import json
import random
import re
import struct
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from tests.plain_reader import plain_records
from tests.world import EOS, Ended, World, call_main, tokenizer_dir

HEAD = re.compile(
    r"^shard-(\d{5}) (?:document|row) (\d+): \d+ tokens(?:, for validation)?, "
    r"(?:begins in the document at|from) .* byte \d+$"
)
_WORDS = ("the", "kettle", "sings", "and", "nobody's", "listening", "12345", "to", "도서관", "읽는다")
LINES = [
    " ".join([str(number), *random.Random(number).choices(_WORDS, k=number % 13)]) for number in range(90)
]
FORMS: dict[str, dict[str, Any]] = {
    "documents": {},
    "packed": {"record": "packed", "seq_len": 64},
    "best_fit": {"record": "packed", "seq_len": 64, "pack": "best_fit"},
    "held": {"record": "packed", "seq_len": 64, "validation_fraction": 0.4},
}
EXPORTED = [name for name in FORMS if name != "held"]
EOS_ID = int(Tokenizer.from_file(str(tokenizer_dir() / "tokenizer.json")).token_to_id(EOS) or 0)
Worlds = dict[str, World]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    root = tmp_path_factory.mktemp("data")
    records = [{"id": f"web/{number}", "text": text} for number, text in enumerate(LINES)]
    worlds = {}
    for name, options in FORMS.items():
        worlds[name] = World(root, data_dir=root / name)
        worlds[name].raw({"a.jsonl": records[:40], "b.jsonl": records[40:]})
        worlds[name].plan(num_shards=3, id_field="id", **options).run()
    return worlds


def peek(world: World, *words: object) -> list[str]:
    """Return the blocks that are printed, one for each sample."""
    ended = world.main("peek", world.data_dir, *words, "--chars", 0).ends(0)
    return ended.out.rstrip("\n").split("\n\n")


def head(block: str) -> tuple[int, int]:
    """Return shard and number of a sample that was printed."""
    found = HEAD.match(block.splitlines()[0])
    assert found, block
    return int(found[1]), int(found[2])


def body(block: str) -> str:
    return re.sub("⟦.*?⟧", "", "".join(line[2:] for line in block.splitlines()[1:] if line[2:5] != "---"))


def test_documents_are_printed_as_the_input_has_them_and_rows_tell_where_they_begin(worlds: Worlds) -> None:
    assert list(map(body, peek(worlds["documents"], "--num", 10**6))) == LINES
    blocks = peek(worlds["packed"], "--num", 10**6)
    assert sum(block.count("  --- a document begins") for block in blocks) == len(LINES)
    # The end of a row may cut a character.
    assert re.findall("[ -~]", "".join(map(body, blocks))) == re.findall("[ -~]", "".join(LINES))
    for block in blocks:
        assert ("--- the rest of a document" in block) == ("begins in the document at" in block)
    assert any("the rest of a document" in block for block in blocks)
    held = worlds["held"]
    num_held = sum(manifest["counts"]["validation"]["num_samples"] for manifest in held.manifests())
    assert sum(", for validation, " in block for block in peek(held, "--num", 10**6)) == num_held > 0


@pytest.mark.parametrize("form", ["documents", "packed", "held"])  # rows of best_fit have no address by byte
def test_each_address_shows_its_document(worlds: Worlds, form: str) -> None:
    """Also one in a row that begins in another input."""
    world = worlds[form]
    inputs = sorted(world.raw_dir.iterdir())
    places = [(path.name, record.offset) for path in inputs for record in plain_records(path)]
    every = {head(block): block for block in peek(world, "--num", 10**6)}
    for number, (name, byte) in [*enumerate(places)][::3]:
        for address in (f"id:web/{number}", f"{name}:{byte}", f"{name}:{byte + 7}"):
            found = peek(world, address)
            assert LINES[number][:6] in "".join(map(body, found)), (address, found)
            assert [every[head(block)] for block in found] == found
    (shard, sample), block = next(
        item for item in every.items() if form == "documents" or item[1].count("  --- ") > 1
    )
    assert peek(world, f"{shard}:{sample}", "--num", 1) == [block]
    title, *documents = re.split(r"^(?=  --- )", block, flags=re.MULTILINE)
    for number, document in enumerate(documents):
        assert peek(world, f"{shard}:{sample}:{number}") == [f"{title}{document}".rstrip("\n")]


def test_grep_chooses_the_samples_that_have_it(worlds: Worlds) -> None:
    found = peek(worlds["documents"], "--grep", "kettle [a-z]", "--num", 10**6)
    assert [body(block) for block in found] == [line for line in LINES if re.search("kettle [a-z]", line)]
    for words in (["id:nobody"], ["0:1:1"], ["--grep", "none"]):
        assert worlds["documents"].main("peek", worlds["documents"].data_dir, *words).code == 66, words


def samples_of(world: World) -> list[list[int]]:
    """Return the documents, or rows without padding, as the loader has them."""
    return [sample["input_ids"] for sample in world.samples()]


def stream_of(world: World) -> list[int]:
    """Return all ids one after another, each document ended by EOS."""
    put = [] if FORMS.get(world.data_dir.name) else [EOS_ID]  # rows hold them
    return list(chain(*(sample + put for sample in samples_of(world))))


def export(world: World, to: str, out: Path, *flags: object) -> Ended:
    return call_main("export", world.data_dir, "--to", to, "--output_dir", out, *flags)


def exported(world: World, to: str, out: Path, *flags: object) -> Path:
    export(world, to, out, *flags).ends(0)
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


@pytest.mark.parametrize("name", EXPORTED)
def test_megatron_has_documents_and_nanogpt_their_stream(worlds: Worlds, tmp_path: Path, name: str) -> None:
    out, stream = exported(worlds[name], "megatron", tmp_path / "out"), stream_of(worlds[name])
    sequences = list(chain(*(megatron_sequences(out, shard_id) for shard_id in range(3))))
    assert list(chain(*sequences)) == stream
    if name != "best_fit":
        assert {sequence[-1] for sequence in sequences} == {EOS_ID}
        assert all(EOS_ID not in sequence[:-1] for sequence in sequences)
    sizes = (out / "data_args.txt").read_text().split()[::2]
    assert sum(map(int, sizes)) == len(stream)
    out = exported(worlds[name], "nanogpt", tmp_path / "of nanogpt")
    assert np.fromfile(out / "train.bin", np.uint16).tolist() == stream
    assert sorted(path.name for path in out.iterdir()) == ["export.json", "train.bin"]


@pytest.mark.slow
def test_a_document_of_more_than_is_read_at_once_is_exported_whole(tmp_path: Path) -> None:
    text = " ".join(map(str, range(150_000)))
    world = World(tmp_path).raw({"a.txt": f"short\n{text}\nshort\n"})
    out = exported(world.plan(num_shards=1).run(), "nanogpt", tmp_path / "out")
    assert (world.data_dir / "shard-00000.tar").stat().st_size > 4 << 20
    assert np.fromfile(out / "train.bin", np.uint16).tolist() == stream_of(world)


@pytest.mark.parametrize("flags", [[], ["--put_eos"]])
@pytest.mark.parametrize("name", ["documents", "packed"])
def test_arrow_files_hold_the_samples(worlds: Worlds, tmp_path: Path, name: str, flags: list[str]) -> None:
    out = exported(worlds[name], "hf", tmp_path / "out", *flags)
    tables = [pa.ipc.open_stream(path.read_bytes()).read_all() for path in sorted(out.glob("*.arrow"))]
    put = [EOS_ID] if flags and name == "documents" else []
    rows = [row + put for row in samples_of(worlds[name])]
    assert list(chain(*(table["input_ids"].to_pylist() for table in tables))) == rows
    assert len(json.loads((out / "state.json").read_text())["_data_files"]) == 3


@pytest.mark.frameworks
def test_datasets_and_megatron_core_read_them(worlds: Worlds, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    out = exported(worlds["packed"], "hf", tmp_path / "hf")
    assert datasets.load_from_disk(str(out))["input_ids"][:] == samples_of(worlds["packed"])
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)
    out = exported(worlds["documents"], "megatron", tmp_path / "megatron")
    found = [indexed.IndexedDataset(str(out / f"shard-{shard_id:05d}_document")) for shard_id in range(3)]
    ids = chain(*(each[number].tolist() for each in found for number in range(len(each))))
    assert list(ids) == stream_of(worlds["documents"])


def test_an_export_into_the_folder_of_another_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    data, out = worlds["documents"], exported(worlds["documents"], "nanogpt", tmp_path / "out")
    before = files(out)
    assert export(data, "megatron", out).code == 78
    assert export(data, "nanogpt", out, "--no-put_eos").code == 78
    for content in ("", "[]", "3", '{"to": 3}', "[" * 10**5, "\0"):
        (out / "export.json").write_text(content)
        assert export(data, "nanogpt", out).code == 78, content
    assert files(out) == before


def test_one_side_of_a_split_is_exported_apart_from_the_whole(worlds: Worlds, tmp_path: Path) -> None:
    for side in ("train", "validation"):
        exported(worlds["held"], "nanogpt", tmp_path / side, "--split", side)
    assert export(worlds["held"], "nanogpt", tmp_path / "train").code == 78
    exported(worlds["held"], "nanogpt", tmp_path / "both")
    sizes = [(tmp_path / name / "train.bin").stat().st_size for name in ("train", "validation", "both")]
    assert sizes[0] + sizes[1] == sizes[2] > max(sizes[:2])
