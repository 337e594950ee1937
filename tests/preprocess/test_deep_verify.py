"""``verify --deep``: a second reader of the input finds what agrees with itself, but not with the input."""

from __future__ import annotations

import codecs
import dataclasses
import gzip
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import zstandard

from preprocess.check.plain_reader import plain_records
from preprocess.formats import documents
from preprocess.formats.format import DocumentBatch
from preprocess.make import shard_writer, worker
from preprocess.make.engines import Engine, TokenBatch, tokenizers_engine
from tests import random_inputs
from tests.chat_sets import TAGGED, chat_model, conversations, write_chats
from tests.checkout import ROOT

if TYPE_CHECKING:
    from tests.conftest import Prep

FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "keep_text": False},
    "packed": {"record": "packed", "seq_len": 64},
    "best_fit": {"record": "packed", "seq_len": 64, "pack": "best_fit"},
}
COMPRESSED = [form for form in random_inputs.FORMATS if form.startswith("jsonl.")]


@pytest.fixture(scope="module")
def folders(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = prep.make_forms(sample_dir, tmp_path_factory.mktemp("data"), FORMS, num_shards=3)
    return {name: root / name for name in FORMS}


@pytest.mark.parametrize("name", FORMS)
def test_right_shards_are_equal_and_nothing_is_written(
    prep: Prep, folders: dict[str, Path], name: str
) -> None:
    assert prep.command("verify", folders[name]).code == 0
    before = {path: path.read_bytes() for path in folders[name].rglob("*") if path.is_file()}
    ended = prep.command("verify", folders[name], "--deep", 3)
    assert ended.code == 0, ended.text
    assert (
        "a second reader finds the same in the input of 3 shards (0-2): 840 documents, 0 left out, "
        in ended.text
    )
    after = {path: path.read_bytes() for path in folders[name].rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.processes
def test_the_second_reader_imports_nothing_of_the_first_one() -> None:
    code = (
        "import sys, preprocess.check.plain_reader\n"
        "print(*(name for name in sys.modules if name.startswith('preprocess.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert "preprocess.check.plain_reader" in names
    named = {f"preprocess.formats.{name}" for name in ("inputs", "text_changes", "text_fields")}
    assert {name for name in names if name.startswith("preprocess.formats.")} == named


# --- A worker that errs, and agrees with itself

Change = Callable[[DocumentBatch], DocumentBatch]


def lose(batch: DocumentBatch) -> DocumentBatch:
    return batch.only(np.delete(np.arange(len(batch.texts)), [3, 5]))


def alter(batch: DocumentBatch) -> DocumentBatch:
    return dataclasses.replace(batch, texts=[*batch.texts[:4], batch.texts[4][::-1], *batch.texts[5:]])


def join(batch: DocumentBatch) -> DocumentBatch:
    """As where a line end is not seen."""
    joined = f"{batch.texts[4]}\n{batch.texts[5]}"
    rest = batch.only(np.delete(np.arange(len(batch.texts)), 5))
    return dataclasses.replace(rest, texts=[*rest.texts[:4], joined, *rest.texts[5:]])


def double(batch: DocumentBatch) -> DocumentBatch:
    twice = batch.only(np.sort([*range(len(batch.texts)), 4]))
    return dataclasses.replace(twice, num_lines=batch.num_lines + 1)


def swap(batch: DocumentBatch) -> DocumentBatch:
    texts = list(batch.texts)
    texts[4], texts[5] = texts[5], texts[4]
    return dataclasses.replace(batch, texts=texts)


def misplace(batch: DocumentBatch) -> DocumentBatch:
    return dataclasses.replace(batch, input_offsets=batch.input_offsets + 1)


def misnumber(batch: DocumentBatch) -> DocumentBatch:
    return dataclasses.replace(batch, lines=batch.lines + 1)


def miscount(batch: DocumentBatch) -> DocumentBatch:
    return dataclasses.replace(batch, num_lines=batch.num_lines + 1)


def misname(batch: DocumentBatch) -> DocumentBatch:
    assert batch.ids is not None
    return dataclasses.replace(batch, ids=[*batch.ids[:4], "another", *batch.ids[5:]])


def missource(batch: DocumentBatch) -> DocumentBatch:
    assert batch.sources is not None
    return dataclasses.replace(batch, sources=["x"] * len(batch.sources))


def pass_over(batch: DocumentBatch) -> DocumentBatch:
    """What is left out is not told."""
    return dataclasses.replace(batch, bad=batch.bad[1:])


def misreason(batch: DocumentBatch) -> DocumentBatch:
    return dataclasses.replace(batch, bad=[dataclasses.replace(one, reason="no_field") for one in batch.bad])


RECORDS = [{"id": f"id {n}", "of": ("even", "odd")[n % 2], "text": f"line {n} of a file"} for n in range(30)]
LINES = [f"{line}\n" for line in (*map(json.dumps, RECORDS), '{"text": 1}', '{"text": "a\\ud800"}', "{")]


def at(number: int) -> str:
    return f"a.jsonl byte {len(''.join(LINES[:number]))}"


LOST = f"2 documents of the input are missing ({at(3)} 'line 3 of a file'; {at(5)} 'line 5 of a file')"
OTHERS = (
    "documents whose text, digest, side, or ids by the reference engine, are others "
    f"({at(4)} 'line 4 of a file'"
)
MOVED = f"30 documents in another order, or with another line or place (document 0 of {at(0)};"
UNTOLD = f"1 documents of the input are bad, and not in quarantine with that reason ({at(30)}: wrong_type)"
FORGED = f"3 documents are in quarantine, and are not bad for that reason ({at(30)}: no_field; {at(31)}: no"
ERRORS: dict[str, tuple[Change, str]] = {
    "lost": (lose, LOST),
    "altered": (alter, f"1 {OTHERS}"),
    "joined": (join, f"1 documents of the input are missing ({at(5)} 'line 5 of a file')"),
    "doubled": (double, f"1 documents are not in the input (document 5 at {at(4)})"),
    "swapped": (swap, f"2 {OTHERS}"),
    "misplaced": (misplace, "documents are not in the input (document 0 at a.jsonl byte 1;"),
    "misnumbered": (misnumber, MOVED),
    "miscounted": (miscount, "2 counts of its manifest are others (num_lines 34, the input gives 33;"),
    "misnamed": (
        misname,
        f"1 kept ids are not those of the input ({at(4)}: 'another', the input has 'id 4')",
    ),
    "of another source": (missource, "num_documents of source even 0, the input gives 15"),
    "left out without a word": (pass_over, UNTOLD),
    "left out for another reason": (misreason, FORGED),
}
IN_ROWS = {"lost", "altered", "joined", "doubled", "swapped", "misplaced", "miscounted"}
KINDS = [
    ("documents", {}, ERRORS.keys()),
    ("ids alone", {"keep_text": False, "token_format": "npy"}, {"lost", "altered"}),
    ("packed", FORMS["packed"], IN_ROWS),
    ("best_fit", FORMS["best_fit"], IN_ROWS - {"swapped", "misplaced"}),
]


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [(name, options, error) for name, options, errors in KINDS for error in sorted(errors)],
)
def test_what_a_reader_loses_or_alters_is_named_though_all_hashes_agree(
    prep: Prep,
    tmp_path: Path,
    raw: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: Any,
    error: str,
) -> None:
    data = tmp_path / "data"
    (raw / "a.jsonl").write_text("".join(LINES))
    prep.plan(raw, data, num_shards=1, id_field="id", source_field="of", max_bad_fraction=0.5, **options)
    prep.make(data)
    assert prep.command("verify", data, "--deep", 1).code == 0
    (data / "shard-00000.json").unlink()
    change, words = ERRORS[error]
    original = documents.read_documents

    def erring(*args: Any, **settings: Any) -> Iterator[Any]:
        for item in original(*args, **settings):
            assert isinstance(item, DocumentBatch)
            yield change(item)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "read_documents", erring)
        prep.make(data)
    assert prep.command("verify", data).code == 0, "the hashes agree"
    ended = prep.command("verify", data, "--deep", 1)
    assert ended.code == 65, ended.text
    assert "error: shard 00000: it is not what its input gives: " in ended.text
    assert "rm " in ended.text
    assert "&& shardprep --shard_id 0" in ended.text
    if name == "documents":
        assert words in ended.text
    elif error == "lost":
        assert LOST in ended.text


def test_ids_that_are_not_the_references_are_found(
    prep: Prep, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Path(shutil.copytree(folders["packed"], tmp_path / "data"))
    (data / "shard-00001.json").unlink()
    original = Engine.encode_documents

    def erring(self: Engine, texts: list[str], **settings: Any) -> TokenBatch:
        tokens = original(self, texts, **settings)
        ids = tokens.ids.copy()
        ids[1000] += 1
        return TokenBatch(ids=ids, offsets=tokens.offsets)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "encode_documents", erring)
        prep.make(data, 1)
    assert prep.command("verify", data).code == 0
    ended = prep.command("verify", data, "--deep", 3)
    assert ended.code == 65, ended.text
    assert "error: shard 00001: it is not what its input gives: " in ended.text
    assert "documents of the input are missing (" in ended.text
    assert "shard 00000:" not in ended.text


def test_another_idx_than_the_tar_has_is_found(
    prep: Prep, sample_dir: Path, tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two documents of equal size change places: neither the sizes nor the hashes tell."""
    data = tmp_path / "data"
    (raw / "a.txt").write_text("".join(f"line {number} of a file\n" for number in range(10, 20)))
    prep.plan(raw, data, num_shards=1, token_format="npy")
    original = shard_writer.ShardWriter._write

    def erring(self: Any, pieces: Any) -> None:
        def swapped() -> Iterator[Any]:
            for piece in pieces:
                if len(piece.records) > 1:
                    piece.records["offset"][[0, 1]] = piece.records["offset"][[1, 0]]
                yield piece

        original(self, swapped())

    with monkeypatch.context() as patch:
        patch.setattr(shard_writer.ShardWriter, "_write", erring)
        prep.make(data)
    ended = prep.command("verify", data, "--deep", 1)
    assert ended.code == 65, ended.text
    assert "shard-00000.tar has a sample of (offset, bytes, tokens) " in ended.text


# --- The second reader

MALAYALAM = [
    f"{number} മലയാളം ഭാഷ{'☀' * (number % 5 == 0)}{'─────' * (number % 7 == 0)}" for number in range(3_000)
]
MARKS = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE, "utf-32-le": codecs.BOM_UTF32_LE}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize("codec", MARKS)
@pytest.mark.parametrize("has_mark", [False, True])
def test_compressed_utf_16_has_each_line_at_its_place(
    prep: Prep, tmp_path: Path, raw: Path, codec: str, has_mark: bool, end: str
) -> None:
    lines = MALAYALAM
    text = (MARKS[codec] if has_mark else b"") + end.join(lines).encode(codec)
    (raw / "a.txt.gz").write_bytes(gzip.compress(text))
    encoding = codec.rpartition("-")[0] if has_mark else codec
    plan = prep.plan(raw, tmp_path / "data", num_shards=1, encoding=encoding)
    found = list(plain_records(plan, 0))
    assert [record.text for record in found] == lines
    for record in found[::500]:
        assert text[record.offset :].startswith(record.text.encode(codec))


def test_a_file_with_the_other_suffix_of_its_format_is_read_alike_by_both_readers(
    prep: Prep, tmp_path: Path, raw: Path
) -> None:
    data = tmp_path / "data"
    lines = b'{"text": "a kettle"}\n{"text": "another"}\n'
    (raw / "a.text").write_bytes(b"a kettle\n")
    (raw / "b.jsonlines").write_bytes(lines)
    (raw / "c.jsonl.gzip").write_bytes(gzip.compress(lines))
    (raw / "d.txt.zstd").write_bytes(zstandard.compress(b"a kettle\n"))
    (raw / "e.md").write_bytes(b"plain text\n")
    pyarrow.feather.write_feather(pyarrow.table({"text": ["one", "two"]}), raw / "f.feather")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), raw / "g.pq")
    prep.plan(raw, data, num_shards=2, also="*.md")
    prep.make(data)
    ended = prep.command("verify", data, "--deep", 2)
    assert ended.code == 0, ended.text


OPTIONS: list[dict[str, Any]] = [
    {},
    {"limit": 7},
    {"id_field": "id", "source_field": "text"},
    {"text_template": "{id}\\n{{}}{text}"} ,
    {"normalize": "NFKC", "min_chars": 3, "max_chars": 300},
    {"fix_text": True},
    {"record": "packed", "seq_len": 16},
    {"record": "packed", "seq_len": 16, "pack": "best_fit", "append_eos": False, "limit": 30},
    {"token_format": "npy", "keep_text": False, "append_eos": True},
]  # fmt: skip
TEXT_OPTIONS: list[dict[str, Any]] = [{"doc": "file"}, {"encoding": "utf-8-sig"}, {"encoding": "cp949"}]


@pytest.mark.parametrize("seed", range(16))
def test_random_inputs_of_every_format_are_read_alike_by_both_readers(
    prep: Prep, tmp_path: Path, raw: Path, seed: int
) -> None:
    """Cut anywhere that their formats allow, with bad records, and with each option that changes texts."""
    rng = random.Random(seed)
    data = tmp_path / "data"
    is_text = rng.random() < 0.5
    forms = [form for form in random_inputs.FORMATS if form.startswith("txt") == is_text]
    num_files = rng.randint(1, 6)
    for number in range(num_files):
        form = rng.choice(forms)
        name = random_inputs.file_name(form)
        content = random_inputs._whole_file(form, random.Random(f"{seed} {number}"))
        (raw / f"{number}.{name}").write_bytes(content)
    options = dict(rng.choice([*OPTIONS, *(TEXT_OPTIONS if is_text else [])]))
    if is_text:
        for name in ("id_field", "source_field", "text_template"):
            options.pop(name, None)
    elif "text_template" in options:
        options["text_template"] = "{text}\\n{{}}{text}"
    prep.plan(raw, data, num_shards=rng.choice([1, 2, 5, 12]), max_bad_fraction=1.0, **options)
    prep.make(data)
    assert prep.command("verify", data).code == 0
    ended = prep.command("verify", data, "--deep", 12)
    assert ended.code == 0, (options, ended.text)


@pytest.mark.processes
def test_conversations_are_compared_with_their_masks(prep: Prep, tmp_path: Path) -> None:
    model = chat_model(prep.model_dir, tmp_path / "model", TAGGED)
    raw, data = write_chats(tmp_path / "raw", conversations(40)), tmp_path / "data"
    with (raw / "chats.jsonl").open("a") as file:
        file.write('{"messages": []}\n{"messages": [{"role": "elf", "content": ""}]}\n{"messages": 1}\n\n')
    settings: dict[str, Any] = {
        "record": "chat",
        "seq_len": 64,
        "model_id": str(model),
        "max_bad_fraction": 0.5,
    }
    prep.plan(raw, data, num_shards=2, id_field="id", **settings)
    prep.make(data)
    assert prep.command("verify", data).code == 0
    ended = prep.command("verify", data, "--deep", 2)
    assert ended.code == 0, ended.text
    assert "40 documents, 3 left out" in ended.text


def test_an_engine_of_another_version_that_gives_other_ids_is_refused(
    prep: Prep, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tokenizers_engine

    def other(*args: Any, **options: Any) -> Any:
        engine = original(*args, **options)

        def shifted(texts: Sequence[str]) -> TokenBatch:
            tokens = engine.encode(texts)
            return TokenBatch(ids=tokens.ids + 1, offsets=tokens.offsets)

        return dataclasses.replace(engine, encode=shifted)

    monkeypatch.setattr("preprocess.make.worker.tokenizers_engine", other)
    ended = prep.command("verify", folders["json"], "--deep", 1)
    assert ended.code == 78
    assert "encodes the plan's probe to other ids than at planning" in ended.text


def test_an_input_that_moved_is_named_and_one_that_is_gone_is_66(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    raw = Path(shutil.copytree(sample_dir, tmp_path / "raw"))
    prep.plan(raw, tmp_path / "data", num_shards=2)
    prep.make(tmp_path / "data")
    raw.rename(tmp_path / "moved")
    gone = prep.command("verify", tmp_path / "data", "--deep")
    assert (gone.code, "if the raw folder moved, pass --input_dir" in gone.text) == (66, True)
    there = prep.command("verify", tmp_path / "data", "--deep", "--input_dir", tmp_path / "moved")
    assert there.code == 0, there.text
    path = next((tmp_path / "moved").iterdir())
    path.write_bytes(path.read_bytes() + b"more\n")
    changed = prep.command("verify", tmp_path / "data", "--deep", "--input_dir", tmp_path / "moved")
    assert changed.code == 78
    assert f"input {path} changed since it was planned" in changed.text
    assert prep.command("verify", tmp_path / "data", "--deep", "0").code == 2
