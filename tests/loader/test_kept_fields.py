"""``plan --keep_fields``: what is kept of a document is what its record says, wherever the document lies.

Each document is one word again and again, so that any part of it tells which one it is.
"""

from __future__ import annotations

import datetime
import gzip
import json
import random
import shutil
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from pyarrow import ipc
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from loader import get_llama3_dataloader
from preprocess.formats import long_documents
from shardprep.errors import UsageError

if TYPE_CHECKING:
    from tests.conftest import Prep

NUM_DOCUMENTS = 250
NAMES = ("url", "score", "meta.license", "tags", "big", "made")
FORMS: dict[str, dict[str, Any]] = {
    "documents": {},
    "held documents": {"validation_fraction": 0.3, "token_format": "npy", "keep_text": False},
    "concat": {"record": "packed", "seq_len": 32},
    "held concat": {"record": "packed", "seq_len": 32, "validation_fraction": 0.3},
    "best_fit": {"record": "packed", "seq_len": 32, "pack": "best_fit"},
    "held best_fit": {"record": "packed", "seq_len": 32, "pack": "best_fit", "validation_fraction": 0.3},
}


@dataclass(frozen=True)
class Document:
    place: str  # as ``Origin.place`` has it
    fields: dict[str, Any]


def record_of(number: int) -> dict[str, Any]:
    """The record of a document, as JSON has it; every third has no license, and some no score."""
    times = 1 + random.Random(number).choice([0, 3, 20, 90])
    made = datetime.datetime.fromisoformat("2026-01-01") + datetime.timedelta(
        minutes=number, microseconds=number % 2
    )
    record: dict[str, Any] = {
        "text": " ".join([f"w{number}"] * times),
        "url": f'https://예시.kr/"{number}"',
        "score": None if number % 7 == 0 else number / 4,
        "meta": {"license": "mit"} if number % 3 else {},
        "tags": [number, "한국어"],
        "made": made.isoformat(),
    }
    return record | ({"big": 10**25 + number} if number % 5 == 0 else {})


def kept_of(record: dict[str, Any], *, has_big: bool) -> dict[str, Any]:
    values = {name: record.get(name) for name in ("url", "score", "tags", "made")}
    big = record.get("big") if has_big else None
    return {name: values.get(name) for name in NAMES} | {
        "meta.license": record["meta"].get("license"),
        "big": big,
    }


def table_of(records: list[dict[str, Any]]) -> Any:
    rows = [
        {
            **{name: value for name, value in record.items() if name != "big"},
            "made": datetime.datetime.fromisoformat(record["made"]),
            "tags": [str(tag) for tag in record["tags"]],
            "meta": {"license": record["meta"].get("license")},
        }
        for record in records
    ]
    return pa.Table.from_pylist(rows)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Document]]:
    """The folder of the inputs, and their documents: one file of each kind, each with 50 of them."""
    raw = tmp_path_factory.mktemp("raw")
    records = [record_of(number) for number in range(NUM_DOCUMENTS)]
    found: list[Document] = []
    for name, first in (("a.jsonl", 0), ("b.jsonl.gz", 50)):
        lines = [json.dumps(record, ensure_ascii=first == 0) + "\n" for record in records[first : first + 50]]
        offset = 0
        for record, line in zip(records[first : first + 50], lines, strict=True):
            unit = "byte of the text" if name.endswith(".gz") else "byte"
            found.append(Document(f"{name} {unit} {offset}", kept_of(record, has_big=True)))
            offset += len(line.encode())
        data = "".join(lines).encode()
        (raw / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    pyarrow.parquet.write_table(table_of(records[100:150]), raw / "c.parquet", row_group_size=9)
    with ipc.new_file(str(raw / "d.arrow"), table_of(records[150:200]).schema) as writer:
        writer.write_table(table_of(records[150:200]), max_chunksize=8)
    for name, first in (("c.parquet", 100), ("d.arrow", 150)):
        for row, record in enumerate(records[first : first + 50]):
            kept = kept_of(record, has_big=False)
            found.append(Document(f"{name} row {row}", {**kept, "tags": [str(t) for t in record["tags"]]}))
    offset, texts = 0, [record["text"] for record in records[200:]]
    for text in texts:
        found.append(Document(f"e.txt byte {offset}", {}))
        offset += len(text) + 1
    (raw / "e.txt").write_text("\n".join(texts) + "\n")
    return raw, found


@pytest.fixture(scope="module")
def sets(
    prep: Prep, documents: tuple[Path, list[Document]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    root = tmp_path_factory.mktemp("sets")
    words = {f"w{number}": number for number in range(NUM_DOCUMENTS)}
    marks = {"<unk>": NUM_DOCUMENTS, "<eos>": NUM_DOCUMENTS + 1, "<pad>": NUM_DOCUMENTS + 2}
    tokenizer = Tokenizer(models.WordLevel(words | marks, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(root / "tokenizer")
    for name, options in FORMS.items():
        plan_of(prep, documents[0], root / name, root / "tokenizer", **options)
        prep.make(root / name, engine="tokenizers")
    return root


def plan_of(prep: Prep, raw: Path, data: Path, model: Path, **options: Any) -> None:
    given = {"keep_fields": ",".join(NAMES), "num_shards": 4, **options}
    prep.plan(raw, data, model_id=str(model), engine="tokenizers", **given)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        *((form, {}) for form in FORMS),
        ("documents", {"seq_len": 64, "boundaries": "segment_ids"}),
        ("held documents", {"seq_len": 64, "split": "validation"}),
        ("held concat", {"split": "validation"}),
        ("held best_fit", {"split": "validation"}),
    ],
)
def test_each_document_of_a_batch_has_the_fields_of_its_record(
    documents: tuple[Path, list[Document]], sets: Path, form: str, options: dict[str, Any]
) -> None:
    made = {"batch_size": 1, "num_workers": 0, "rank": 0, "world_size": 1, "split": "train", **options}
    if "held" not in form:
        made.pop("split")
    seen = set()
    with get_llama3_dataloader(sets / form, origins=True, **made) as loader:
        for batch in loader:
            ids, origins = batch["input_ids"], batch["origins"].tolist()
            for number, (row, place, *origin) in enumerate(origins):
                later = origins[number + 1] if number + 1 < len(origins) else [row + 1]
                part = ids[row, place : later[1] if later[0] == row else None]
                (word,) = {*part[part < NUM_DOCUMENTS].tolist()} or {None}
                found = loader.origin(*origin)
                if word is None:  # the EOS of a document that fills the row before
                    continue
                seen.add(word)
                expected = documents[1][word]
                assert (found.place, found.fields) == (expected.place, expected.fields)
                assert list(found.fields) in ([], list(NAMES))
        with pytest.raises(UsageError, match="no document 99"):
            loader.origin(0, 0, 0, 99)
    if "held" not in form:  # the last row of documents that the loader joins is dropped where it is not full
        assert len(seen) >= NUM_DOCUMENTS - (9 if options else 0)
    else:
        assert 30 < len(seen) < (120 if options.get("split") == "validation" else 220)


@pytest.mark.processes
def test_conversations_have_theirs(prep: Prep, sets: Path, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "template").write_text(
        "{% for turn in messages %}{% if turn.role == 'assistant' %}{% generation %}{{ turn.content }} "
        "{% endgeneration %}{% else %}{{ turn.content }} {% endif %}{% endfor %}"
    )
    records = []
    for number in range(60):
        turns = [(role, " ".join([f"w{number}"] * (1 + number % 30))) for role in ("user", "assistant")]
        messages = [{"role": role, "content": content} for role, content in turns]
        records.append({"messages": messages if number % 9 else [], "number": number})
    (tmp_path / "raw" / "a.jsonl").write_text("\n".join(map(json.dumps, records[:30])))
    pyarrow.parquet.write_table(pa.Table.from_pylist(records[30:]), tmp_path / "raw" / "b.parquet")
    options: dict[str, Any] = {"record": "chat", "seq_len": 32, "chat_template_file": tmp_path / "template"}
    options |= {"keep_fields": "number", "max_bad_fraction": 0.5}
    prep.plan(tmp_path / "raw", tmp_path / "data", num_shards=2, model_id=str(sets / "tokenizer"), **options)
    prep.make(tmp_path / "data", engine="tokenizers")
    assert prep.command("verify", tmp_path / "data", "--deep", 2).code == 0
    seen = set()
    for line in chain(*((tmp_path / "data" / "fields" / f"shard-0000{n}.jsonl").open() for n in range(2))):
        number, offset, kept = json.loads(line)
        seen.add(kept["number"])
        assert number == kept["number"] // 30
        assert number == 0 or offset == kept["number"] - 30
    assert seen == {number for number in range(60) if number % 9}


@pytest.mark.parametrize("form", FORMS)
def test_the_deep_check_reads_the_same_and_finds_another_value_or_order(
    prep: Prep, sets: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prep.command("verify", sets / form, "--deep", 4).code == 0
    path = sets / form / "fields" / "shard-00001.jsonl"
    data = Path(shutil.copytree(sets / form, tmp_path / "data"))
    lines = path.read_bytes().splitlines(keepends=True)
    changed = {
        "kept fields are not": [lines[0].replace(b"kr", b"us"), *lines[1:]],
        "another order": [*lines[1:], lines[0]],
    }
    assert b"kr" in lines[0]
    for words, of in changed.items():
        (data / path.relative_to(sets / form)).write_bytes(b"".join(of))
        assert "sha256" in (ended := prep.command("verify", data)).text
        assert ended.code == 65
        # Past the hash, as if it had been made so.
        monkeypatch.setattr("preprocess.check.verify.check_hashes", lambda *_, **__: None)
        ended = prep.command("verify", data, "--deep", 4)
        monkeypatch.undo()
        is_seen = not (words == "another order" and "best_fit" in form)
        assert (ended.code, words in ended.text) == ((65, True) if is_seen else (0, False))


def test_tars_are_those_without_kept_fields_and_a_long_document_is_one_like_others(
    prep: Prep,
    documents: tuple[Path, list[Document]],
    sets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("kept", "plain", "long"):
        if name == "long":
            monkeypatch.setattr(long_documents, "LONG_BYTES", 200)
        names = "" if name == "plain" else ",".join(NAMES)
        model = sets / "tokenizer"
        plan_of(prep, documents[0], tmp_path / name, model, num_shards=None, keep_fields=names)
        prep.make(tmp_path / name, engine="tokenizers")
    tars = sorted(path.name for path in (tmp_path / "kept").glob("*.tar"))
    assert len(tars) == 5  # one for each file
    for name in tars:
        data = (tmp_path / "kept" / name).read_bytes()
        assert data == (tmp_path / "plain" / name).read_bytes() == (tmp_path / "long" / name).read_bytes()
        kept = f"fields/{Path(name).stem}.jsonl"
        assert (tmp_path / "kept" / kept).read_bytes() == (tmp_path / "long" / kept).read_bytes()
    assert not (tmp_path / "plain" / "fields").exists()
    for text in ("fields", "keep_fields"):
        assert text not in (tmp_path / "plain" / "shard-00000.json").read_text()


def test_peek_prints_what_is_kept(prep: Prep, documents: tuple[Path, list[Document]], sets: Path) -> None:
    for form in FORMS:
        if "best_fit" in form:  # of which no place of an input is looked for
            assert (
                '--- a document begins\n  {"url": "https://예시.kr/' in prep.command("peek", sets / form).text
            )
            continue
        for number in (3, 120, 170):
            place = documents[1][number].place.replace(" byte ", ":").replace(" row ", ":")
            ended = prep.command("peek", sets / form, place, "--chars", 20)
            assert (ended.code, f'kr/\\"{number}\\"' in ended.text) == (0, True), ended.text


@pytest.mark.parametrize(
    ("names", "words"), [("url,,x", "empty name"), ("url,url", "one twice"), ("a..b", "dots")]
)
def test_names_that_are_none_are_refused(
    prep: Prep, documents: tuple[Path, list[Document]], sets: Path, tmp_path: Path, names: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        plan_of(prep, documents[0], tmp_path / "data", sets / "tokenizer", keep_fields=names)


def test_lines_of_text_alone_have_no_fields_to_keep(prep: Prep, sets: Path, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.txt").write_text("w1 w2\n")
    with pytest.raises(UsageError, match="is text"):
        plan_of(prep, tmp_path / "raw", tmp_path / "data", sets / "tokenizer")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_field_that_no_record_has_is_told_by_plan(
    prep: Prep, sets: Path, tmp_path: Path, suffix: str
) -> None:
    (tmp_path / "raw").mkdir()
    records = [{"text": f"w{number}", "id": f"i{number}", "url": "u" * (number % 2)} for number in range(9)]
    if suffix == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(records), tmp_path / "raw" / "a.parquet")
    else:
        (tmp_path / "raw" / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    given = ["plan", "--input_dir", tmp_path / "raw", "--model_id", sets / "tokenizer", "--dry_run"]
    given += ["--output_dir", tmp_path / "data"]
    ended = prep.command(*given, "--id_field", "idd", "--source_field", "src", "--keep_fields", "url,licence")
    assert ended.code == 0, ended.text
    said = "no record of a sample has a value for --keep_fields licence, --id_field idd, --source_field src;"
    assert said in " ".join(ended.text.split())
    assert "no record" not in prep.command(*given, "--id_field", "id", "--keep_fields", "url,id").text
