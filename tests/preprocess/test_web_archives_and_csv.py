"""WET, WARC, CSV and TSV: their documents equal those of a reader by hand, wherever shards begin."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import pytest

from tests.world import World

TEXTS = [f'문서 {number}\nthe kettle, "sings"\n' + "twice " * (number % 50) for number in range(120)]
PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n<p>the kettle %d</p>"


def record_bytes(kind: str, body: bytes, number: int) -> bytes:
    head = {
        "WARC-Type": kind,
        "WARC-Record-ID": f"<urn:uuid:{number:032}>",
        "WARC-Date": "2026-01-02T03:04:05Z",
        "WARC-Target-URI": f"http://example.org/{number}",
        "Content-Type": "application/http; msgtype=response" if kind == "response" else "text/plain",
        "Content-Length": str(len(body)),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return b"WARC/1.0\r\n" + lines.encode() + b"\r\n" + body + b"\r\n\r\n"


def wet(texts: list[str]) -> list[bytes]:
    records = [record_bytes("conversion", text.encode(), number) for number, text in enumerate(texts)]
    return [record_bytes("warcinfo", b"software: test\r\n", 999), *records]


@pytest.fixture(autouse=True)
def _libraries() -> None:
    pytest.importorskip("fastwarc", reason="it is not installed")


@pytest.mark.parametrize("num_shards", [1, 5])
@pytest.mark.parametrize("name", ["a.warc.wet.gz", "a.wet"])
def test_the_texts_of_a_wet_file_are_its_documents(tmp_path: Path, name: str, num_shards: int) -> None:
    members = [gzip.compress(each) if name.endswith("gz") else each for each in wet(TEXTS)]
    world = World(tmp_path).raw({name: b"".join(members)})
    world.make(num_shards=num_shards, id_field="id", source_field="date").verify(deep=True)
    assert world.texts() == TEXTS
    places = [sum(map(len, members[: number + 1])) for number in range(len(TEXTS))]
    assert world.lines("ids") == [
        [0, place, f"<urn:uuid:{number:032}>"] for number, place in enumerate(places)
    ]
    begins = [byte for _, byte, *_ in world.plan_json()["cuts"][1:-1] if byte]
    assert len(begins) == (num_shards - 1 if name.endswith("gz") else 0)
    assert set(begins) <= {0, *places}


@pytest.mark.processes
def test_pages_of_a_warc_file_go_to_the_users_function(tmp_path: Path) -> None:
    pages = [record_bytes("response", PAGE % number, number) for number in range(9)]
    pages.insert(3, record_bytes("request", b"GET / HTTP/1.1\r\n\r\n", 77))
    pages.insert(5, record_bytes("response", PAGE.replace(b"text/html", b"image/png") % 1, 78))
    function = "def transform(record):\n    return record['url'] + record['html'].decode()\n"
    (tmp_path / "f.py").write_text(function)
    world = World(tmp_path).raw({"a.warc.gz": b"".join(map(gzip.compress, pages))})
    world.try_plan().ends(65, "--transform")
    world.plan(num_shards=2, transform=tmp_path / "f.py").run(transform=tmp_path / "f.py")
    assert world.texts() == [f"http://example.org/{n}<p>the kettle {n}</p>" for n in range(9)]


WHOLE = b"".join(map(gzip.compress, wet(TEXTS[:5])))
DAMAGED = {
    "cut in a record": WHOLE[:-30],
    "cut in a header": b"".join(map(gzip.compress, wet(TEXTS[:5])[:-1]))
    + gzip.compress(b"WARC/1.0\r\nWARC-Ty")[:-9],
    "another byte": WHOLE[:-40] + bytes([WHOLE[-40] ^ 1]) + WHOLE[-39:],
    "one member for all": gzip.compress(b"".join(wet(TEXTS[:5]))),
    "no archive": gzip.compress(b"a text\n" * 99),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_web_archive_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    world = World(tmp_path).raw({"a.wet.gz": DAMAGED[kind]})
    ended = world.try_plan(num_shards=1)
    if not ended.code:
        ended = world.try_shard()
    ended.ends(65, "a.wet.gz")


def table(delimiter: str, rows: list[list[str]]) -> str:
    with io.StringIO(newline="") as file:
        csv.writer(file, delimiter=delimiter, lineterminator="\r\n").writerows(rows)
        return file.getvalue()


@pytest.mark.parametrize(("suffix", "delimiter"), [("csv", ","), ("tsv", "\t")])
def test_rows_of_csv_and_tsv_are_documents(tmp_path: Path, suffix: str, delimiter: str) -> None:
    rows = [["id", "본문", "n"], *([f"d{number}", text, "7"] for number, text in enumerate(TEXTS))]
    text = table(delimiter, rows)
    world = World(tmp_path).raw({
        f"a.{suffix}": "\ufeff" + text,
        f"b.{suffix}": text.encode("cp949"),
        f"c.{suffix}.gz": gzip.compress(text.encode()),
        f"d.{suffix}": table(delimiter, [["n", "본문"], ["1", "a"], ["2", ""]]),
    })  # fmt: skip
    options = {"text_field": "본문", "id_field": "id", "encoding": "auto"}
    assert "d." in world.try_plan(dry_run=True, **options).ends(0).text
    world.make(num_shards=3, **options).verify(deep=True)
    assert sorted(world.texts()) == sorted([*TEXTS, *TEXTS, *TEXTS, "a"])
    assert [line[1] for line in world.lines("ids") if line[0] == 0] == list(range(len(TEXTS)))


WRONG_CSV = {
    "another delimiter": (b"id;text\n1;a\n", "semicolons"),
    "no such column": (b"id,body\n1,a\n", "body"),
    "a row too long": (b"id,text\n" + b"1,a\n" * 9 + b"1,a,b\n", "Row #11"),
    "an open quote": (b'id,text\n1,"a\n2,b\n', "quote"),
}


@pytest.mark.parametrize("kind", WRONG_CSV)
def test_a_wrong_csv_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    content, words = WRONG_CSV[kind]
    world = World(tmp_path).raw({"w.csv": content, "right.txt": "a line\n" * 9})
    world.try_plan().ends(65, "w.csv", words)
