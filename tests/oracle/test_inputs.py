"""Documents, counts, quarantine and ids of a data set equal what an independent reader finds in raw files.

The reader is tests/plain_reader.py, and the ids are those of ``tokenizers``.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from tokenizers import Tokenizer

from tests.input_writers import table_bytes
from tests.plain_reader import plain_records
from tests.random_inputs import ODD_LINES
from tests.world import World, hostile_text, hostile_texts, tokenizer_dir

TOKENIZER = Tokenizer.from_file(str(tokenizer_dir() / "tokenizer.json"))
TOKENIZER.encode_special_tokens = True  # control-token strings inside a text stay text
ROW_TOKENS = 16
FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "append_eos": True},
    "concat": {"record": "packed", "seq_len": ROW_TOKENS},
    "best_fit": {"record": "packed", "seq_len": ROW_TOKENS, "pack": "best_fit"},
}


def text_lines() -> bytes:
    """Return lines with all line ends, some with bad bytes, and a byte order mark before the first."""
    bad = b"a bad \xff byte\r\n\r\r\n\n\xea\xb0\nhalf a letter above\n"
    return "\ufeff".encode() + hostile_text(80, seed=11).encode() + b"\n" + bad + "끝, no line end".encode()


def json_lines() -> bytes:
    """Return JSON lines with ids and sources, and odd lines between them."""
    records = [
        {"id": number, "meta": {"kind": f"k{number % 3}"}, "text": text, "title": f"제목 {number}"}
        for number, text in enumerate(hostile_texts(60, seed=12))
    ]
    lines = [json.dumps(each, ensure_ascii=number % 2 == 0).encode() for number, each in enumerate(records)]
    return b"\n".join([*lines[:20], *ODD_LINES, *lines[20:], b'{"text": "no line end"}'])


def table() -> pyarrow.Table:
    texts: list[Any] = hostile_texts(60, seed=13)
    texts[5:5] = [None, "", " \n ", "line\nends\r\ninside"]
    ids, titles = range(len(texts)), ["제목"] * len(texts)
    meta = [{"kind": f"k{number % 3}"} if number % 5 else None for number in range(len(texts))]
    return pyarrow.table({"id": ids, "text": texts, "meta": meta, "title": titles})


TEMPLATE = {"text_template": r"{title}\n\n{text} {{}}"}
CASES: dict[str, tuple[Callable[[], bytes], dict[str, str]]] = {
    "a.txt": (text_lines, {}),
    "f.TEXT": (text_lines, {"doc": "file", "encoding": "latin-1"}),
    "h.JsonLines": (json_lines, {"id_field": "id"}),
    "i.ndjson.xz": (lambda: lzma.compress(json_lines()), TEMPLATE),
    "j.json": (json_lines, {"text_field": "title"}),
    "k.Pq": (lambda: table_bytes(table(), "parquet", 9), {"id_field": "id"}),
    "l.ipc": (lambda: table_bytes(table(), "file.arrow", 9), TEMPLATE),
    "m.feather": (lambda: table_bytes(table(), "stream.arrow", 9), {"text_field": "meta.kind"}),
}


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_documents_equal_those_of_an_independent_reader(tmp_path: Path, name: str, num_shards: int) -> None:
    write, options = CASES[name]
    world = World(tmp_path).raw({name: write()})
    world.make(num_shards=num_shards, max_bad_fraction=1, **options)
    records = list(plain_records(world.raw_dir / name, **options))
    documents = [(line, record) for line, record in enumerate(records) if record.text]
    assert documents

    found = world.documents()
    where = f"{name} in {num_shards} shards"
    for number, ((key, text, ids), (line, record)) in enumerate(zip(found, documents, strict=False)):
        assert text == record.text, f"{where}: document {number} has another text"
        assert ids == TOKENIZER.encode(text).ids, f"{where}: document {number} has other ids"
        if num_shards == 1:
            assert key == f"sample_0_{line:08d}", f"{where}: document {number} is named after another line"
    assert len(found) == len(documents), f"{where}: wrong number of documents"

    left_out = [(record.offset, record.reason) for record in records if record.reason]
    quarantined = [(item["input_offset"], item["reason"]) for item in world.lines("quarantine")]
    assert quarantined == left_out
    if "id_field" in options:
        assert world.lines("ids") == [[0, record.offset, record.id] for _, record in documents]


def numbers_of(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Yield the dotted name and the value of each number in a JSON value."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers_of(inner, f"{name}.{key}")
    elif isinstance(value, int):
        yield name, value


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_counts_of_manifests_and_index_and_lines_of_side_files_match_the_input(
    tmp_path: Path, form: str, num_shards: int
) -> None:
    texts = [{"id": f"e{number}", "text": text} for number, text in enumerate(hostile_texts(50, seed=4))]
    world = World(tmp_path).raw({"en/a.jsonl": texts, "ko/b.jsonl": json_lines()})
    options = {"recursive": True, "id_field": "id", "digests": True, "max_bad_fraction": 1, **FORMS[form]}
    world.make(num_shards=num_shards, **options)
    found = Counter[str]()
    for manifest in world.manifests():
        found.update(dict(numbers_of(manifest["counts"], "counts")))
        found.update(dict(numbers_of(manifest["run"]["texts"], "texts")))
    index = json.loads((world.data_dir / "index.json").read_bytes())
    found.update(dict(numbers_of(index["sources"], "index")))

    is_packed, expected = "seq_len" in FORMS[form], Counter[str]()
    ids, digests, left_out, lines = [], [], [], []
    for number, name in enumerate(world.inputs()):
        path, source = world.raw_dir / name, name.partition("/")[0]
        records = [*plain_records(path, id_field="id")]
        ends = [*(record.offset for record in records), path.stat().st_size]
        for record, (begin, end) in zip(records, pairwise(ends), strict=True):
            counts = Counter(num_lines=1, input_bytes=end - begin)
            of_source = Counter(num_bytes=end - begin)
            if record.reason:
                left_out.append((name, begin, record.reason, end - begin))
                lines.append(expected["counts.num_lines"])
                counts[f"quarantined.{record.reason}"] = of_source["num_quarantined"] = 1
            elif not record.text:
                counts["num_empty_lines"] = 1
            else:
                ids.append([number, begin, record.id])
                digests.append(hashlib.sha256(record.text.encode()).digest()[:16])
                size = len(TOKENIZER.encode(record.text).ids) + (form != "json")  # with EOS
                counts += Counter({f"length_histogram.{size.bit_length()}": 1})
                counts["num_documents"] = of_source["num_documents"] = 1
                counts["num_tokens"] = of_source["num_tokens"] = size
                # Token of its row at which the document begins.
                place = expected["counts.num_tokens"] % ROW_TOKENS if form == "concat" else 0
                counts["num_documents_across_rows"] = is_packed and place + size > ROW_TOKENS
                counts["num_samples"] = not is_packed
                low = size >> max(size.bit_length() - 4, 0) << max(size.bit_length() - 4, 0)
                of_texts = {f"lengths.{low}.0": 1, f"lengths.{low}.1": size, "num_chars": len(record.text)}
                of_texts["num_bytes"] = len(record.text.encode())
                expected.update({f"texts.{source}.{name}": count for name, count in of_texts.items()})
            expected.update({f"counts.{name}": count for name, count in counts.items()})
            for table in ("counts.sources", "index"):
                expected.update({f"{table}.{source}.{name}": count for name, count in of_source.items()})
    if is_packed:
        num_rows, num_tokens = found["counts.num_samples"], expected["counts.num_tokens"]
        assert form == "best_fit" or num_shards > 1 or num_rows == -(-num_tokens // ROW_TOKENS)
        expected["counts.num_samples"] = num_rows
        expected["counts.num_pad_tokens"] = num_rows * ROW_TOKENS - num_tokens
    if form == "concat" and num_shards > 1:  # not computed here, as each shard begins its own rows
        del found["counts.num_documents_across_rows"], expected["counts.num_documents_across_rows"]
    assert +found == +expected

    bad = world.lines("quarantine")
    fields = ("input", "input_offset", "reason", "num_bytes")
    assert [tuple(each[field] for field in fields) for each in bad] == left_out
    assert num_shards > 1 or [each["line"] for each in bad] == lines
    assert world.lines("ids") == ids
    is_in_order = form != "best_fit"  # which writes digests in the order of its rows
    assert world.digests() == digests if is_in_order else sorted(world.digests()) == sorted(digests)


def test_with_source_field_a_source_counts_the_bytes_of_its_texts(tmp_path: Path) -> None:
    rows = [{"text": "가 b", "from": "web"}, {"text": "c", "from": "code"}, {"text": "de", "from": "web"}]
    world = World(tmp_path).raw({"a.jsonl": rows}).make(num_shards=1, source_field="from")
    sources = world.manifests()[0]["counts"]["sources"]
    found = {name: (source["num_documents"], source["num_bytes"]) for name, source in sources.items()}
    assert found == {"web": (2, 7), "code": (1, 1)}
