"""What a data set holds is what a slow, separate reader finds in the raw files (tests/plain_reader.py)."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard
from tokenizers import Tokenizer

from tests.plain_reader import plain_records
from tests.world import World, hostile_text, hostile_texts, tokenizer_dir

ODD_LINES = [
    "", "   ", "{", "[1]", '{"text": null}', '{"text": 3}', '{"a": 1}', '{"text": "\\ud800"}', '{"text": ""}',
    '{"text": "a", "te\\u0078t": "b"}', '{"te\\u0078t": "\\"text\\":"}', '{"text": "a", "n": 1e999}',
    '{"text": "a", "n": NaN}', '{"a": {"text": 1}, "text"\t: "c"}', '{"text": "\\u0000 \\n both"}\r',
    '\t{"text": "blanks around"} ', '{"text": "a\x00b"}',
]  # fmt: skip


def text_lines() -> bytes:
    """Lines with every end, bad bytes in some, and a mark before the first one."""
    bad = b"a bad \xff byte\r\n\r\r\n\n\xea\xb0\nhalf a letter above\n"
    return "\ufeff".encode() + hostile_text(80, seed=11).encode() + b"\n" + bad + "끝, no line end".encode()


def json_lines() -> bytes:
    """Records with ids and sources, odd ones between them."""
    records = [
        {"id": number, "meta": {"kind": f"k{number % 3}"}, "text": text, "title": f"제목 {number}"}
        for number, text in enumerate(hostile_texts(60, seed=12))
    ]
    lines = [json.dumps(record, ensure_ascii=number % 2 == 0) for number, record in enumerate(records)]
    lines[20:20] = ODD_LINES
    return "\n".join(lines).encode() + b'\n{"text": "bad \xff byte"}\n{"text": "no line end"}'


def table() -> pyarrow.Table:
    texts: list[Any] = hostile_texts(60, seed=13)
    texts[5:5] = [None, "", " \n ", "line\nends\r\ninside"]
    meta = [{"kind": f"k{number % 3}"} if number % 5 else None for number in range(len(texts))]
    return pyarrow.table(
        {"id": range(len(texts)), "text": texts, "meta": meta, "title": ["제목"] * len(texts)}
    )


def parquet() -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table(), sink, row_group_size=9)
    return sink.getvalue()


def arrow(new: Callable[..., Any]) -> bytes:
    sink = io.BytesIO()
    with new(sink, table().schema) as writer:
        writer.write_table(table(), max_chunksize=9)
    return sink.getvalue()


TEMPLATE = {"text_template": r"{title}\n\n{text} {{}}"}
CASES: dict[str, tuple[Callable[[], bytes], dict[str, str]]] = {
    "a.txt": (text_lines, {}),
    "b.txt.gz": (lambda: gzip.compress(text_lines()), {}),
    "c.txt.zst": (lambda: zstandard.ZstdCompressor().compress(text_lines()), {}),
    "d.TEXT.bz2": (lambda: bz2.compress(text_lines()), {}),
    "e.txt": (text_lines, {"encoding": "utf-8-sig"}),
    "f.txt": (text_lines, {"doc": "file", "encoding": "latin-1"}),
    "g.txt": (lambda: "한글 문장\r\n끝 \n\n".encode("cp949") * 30 + b"\xff\n", {"encoding": "cp949"}),
    "h.jsonl": (json_lines, {"id_field": "id"}),
    "i.jsonl.xz": (lambda: lzma.compress(json_lines()), TEMPLATE),
    "j.json": (json_lines, {"text_field": "title"}),
    "k.parquet": (parquet, {"id_field": "id"}),
    "l.arrow": (lambda: arrow(pyarrow.ipc.new_file), TEMPLATE),
    "m.feather": (lambda: arrow(pyarrow.ipc.new_stream), {"text_field": "meta.kind"}),
}


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_documents_are_those_that_a_separate_reader_finds(tmp_path: Path, name: str, num_shards: int) -> None:
    write, options = CASES[name]
    world = World(tmp_path).raw({name: write()})
    world.make(num_shards=num_shards, max_bad_fraction=1, **options)
    records = list(plain_records(world.raw_dir / name, **options))
    documents = [(line, record) for line, record in enumerate(records) if record.text]
    assert documents

    tokenizer = Tokenizer.from_file(str(tokenizer_dir() / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # names of control tokens in a text stay text
    found = world.documents()
    where = f"{name} in {num_shards} shards"
    for number, ((key, text, ids), (line, record)) in enumerate(zip(found, documents, strict=False)):
        assert text == record.text, f"{where}: document {number} has another text"
        assert ids == tokenizer.encode(text).ids, f"{where}: document {number} has other ids"
        if num_shards == 1:
            assert key == f"sample_0_{line:08d}", f"{where}: document {number} is named for another line"
    assert len(found) == len(documents), f"{where}: the number of documents"

    left_out = [(record.offset, record.reason) for record in records if record.reason]
    told = [(item["source_offset"], item["reason"]) for item in world.lines("quarantine")]
    assert told == left_out
    if "id_field" in options:
        assert world.lines("ids") == [[0, record.offset, record.id] for _, record in documents]
