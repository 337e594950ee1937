"""``peek`` shows what a data set holds by each kind of address; ``export`` writes it for other tools."""

from __future__ import annotations

import json
import os
import random
import re
import struct
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from tests.world import EOS, Ended, World, call_main, hostile_text, tokenizer_dir

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


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    root = tmp_path_factory.mktemp("data")
    records = [{"id": f"web/{number}", "text": text} for number, text in enumerate(LINES)]
    worlds = {}
    for name, options in FORMS.items():
        worlds[name] = World(root, data_dir=root / name).raw({"a.jsonl": records})
        worlds[name].plan(num_shards=3, id_field="id", **options).run()
    return worlds


# peek ---------------------------------------------------------------------------------------------------


def peek(world: World, *words: object) -> list[str]:
    """Return the blocks that are printed, one for each sample."""
    ended = world.main("peek", world.data_dir, *words, "--chars", 0)
    assert ended.code == 0, ended.text
    return ended.out.rstrip("\n").split("\n\n")


def head(block: str) -> tuple[int, int]:
    """Return shard and number of a sample that was printed."""
    found = HEAD.match(block.splitlines()[0])
    assert found, block
    return int(found[1]), int(found[2])


def body(block: str) -> str:
    return re.sub("⟦.*?⟧", "", "".join(line[2:] for line in block.splitlines()[1:] if line[2:5] != "---"))


def test_a_document_is_printed_as_its_input_has_it_and_rows_tell_where_documents_begin(
    worlds: dict[str, World],
) -> None:
    assert list(map(body, peek(worlds["documents"], "--num", 10**6))) == LINES
    blocks = peek(worlds["packed"], "--num", 10**6)
    assert sum(block.count("  --- a document begins") for block in blocks) == len(LINES)
    # The end of a row may cut a character.
    assert re.findall("[ -~]", "".join(map(body, blocks))) == re.findall("[ -~]", "".join(LINES))
    for block in blocks:
        assert ("--- the rest of a document" in block) == ("begins in the document at" in block)
    assert any("the rest of a document" in block for block in blocks)
    held = peek(worlds["held"], "--num", 10**6)
    num_held = sum(manifest["counts"]["validation"]["num_samples"] for manifest in worlds["held"].manifests())
    assert sum(", for validation, " in block for block in held) == num_held > 0


@pytest.mark.parametrize("form", ["documents", "packed", "held"])  # rows of best_fit have no address by byte
def test_each_address_shows_its_document(worlds: dict[str, World], form: str) -> None:
    world, raw = worlds[form], (worlds[form].raw_dir / "a.jsonl").read_bytes().splitlines(keepends=True)
    every = {head(block): block for block in peek(world, "--num", 10**6)}
    for number in range(0, len(LINES), 9):
        byte = sum(map(len, raw[:number]))
        for address in (f"id:web/{number}", f"a.jsonl:{byte}", f"a.jsonl:{byte + 7}"):
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


def test_grep_chooses_the_samples_that_have_it(worlds: dict[str, World]) -> None:
    found = peek(worlds["documents"], "--grep", "kettle [a-z]", "--num", 10**6)
    assert [body(block) for block in found] == [line for line in LINES if re.search("kettle [a-z]", line)]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--chars -1", 2),
        ("0:1 --grep a", 2),
        ("id:", 2),
        ("--grep none", 66),
        ("0:1:1", 66),
        ("id:nobody", 66),
    ],
)
def test_what_is_not_there_is_66_and_no_address_2(worlds: dict[str, World], words: str, code: int) -> None:
    ended = worlds["documents"].main("peek", worlds["documents"].data_dir, *words.split())
    assert (ended.code, ended.out) == (code, "")


@pytest.mark.parametrize("held", [{}, {"validation_fraction": 0.4}], ids=["all", "held"])
def test_a_document_is_found_in_a_row_that_begins_in_another_input(
    tmp_path: Path, held: dict[str, Any]
) -> None:
    lines = [[f"the kettle {n * 111:03} sings\n", f"second line {n * 111:03}\n"] for n in range(9)]
    world = World(tmp_path).raw({f"{number}.txt": "".join(each) for number, each in enumerate(lines)})
    world.plan(num_shards=1, record="packed", seq_len=4096, **held).run()
    for number, (first, second) in enumerate(lines):
        for place, text in ((0, first), (len(first), second)):
            assert text.strip() in "".join(map(body, peek(world, f"{number}.txt:{place}")))


# export -------------------------------------------------------------------------------------------------


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
    ended = export(world, to, out, *flags)
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


@pytest.mark.parametrize("name", EXPORTED)
def test_megatrons_files_hold_the_documents_ended_by_eos_and_nanogpts_is_their_stream(
    worlds: dict[str, World], tmp_path: Path, name: str
) -> None:
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
def test_arrow_files_hold_the_stored_samples(
    worlds: dict[str, World], tmp_path: Path, name: str, flags: list[str]
) -> None:
    out = exported(worlds[name], "hf", tmp_path / "out", *flags)
    tables = [pa.ipc.open_stream(path.read_bytes()).read_all() for path in sorted(out.glob("*.arrow"))]
    put = [EOS_ID] if flags and name == "documents" else []
    rows = [row + put for row in samples_of(worlds[name])]
    assert list(chain(*(table["input_ids"].to_pylist() for table in tables))) == rows
    assert len(json.loads((out / "state.json").read_text())["_data_files"]) == 3


@pytest.mark.frameworks
def test_datasets_and_megatron_core_read_them(worlds: dict[str, World], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    out = exported(worlds["packed"], "hf", tmp_path / "hf")
    assert datasets.load_from_disk(str(out))["input_ids"][:] == samples_of(worlds["packed"])
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)
    out = exported(worlds["documents"], "megatron", tmp_path / "megatron")
    found = [indexed.IndexedDataset(str(out / f"shard-{shard_id:05d}_document")) for shard_id in range(3)]
    ids = chain(*(each[number].tolist() for each in found for number in range(len(each))))
    assert list(ids) == stream_of(worlds["documents"])


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
    worlds: dict[str, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, call: str
) -> None:
    """tests/faults/races.py holds equal ones beside each other."""
    data, codes, flag = worlds["documents"], list[int](), "--no-put_eos"
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


def test_an_export_into_the_folder_of_another_is_refused(worlds: dict[str, World], tmp_path: Path) -> None:
    data, out = worlds["documents"], exported(worlds["documents"], "nanogpt", tmp_path / "out")
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
        out = exported(world, "nanogpt", tmp_path / side, "--split", side)
        sizes.append((out / "train.bin").stat().st_size)
    assert export(world, "nanogpt", tmp_path / "train").code == 78
    whole = exported(world, "nanogpt", tmp_path / "both") / "train.bin"
    assert sum(sizes) == whole.stat().st_size
    assert min(sizes) > 0
