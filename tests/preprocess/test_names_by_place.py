"""at:FILE:BYTE in lists of ``plan --exclude`` and ``blank --ids``: one copy goes, equal ones stay."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.world import World, call_main

pytestmark = pytest.mark.processes  # blank makes shards as run does

TEXTS = [f"text {number % 7} of several equal ones" for number in range(40)]
GONE = [0, 3, 17, 39]  # each has equal ones elsewhere


def written(name: str) -> tuple[bytes, list[int]]:
    """The bytes of an input of TEXTS, and the place of each."""
    if name.endswith(".parquet"):
        file = io.BytesIO()
        pq.write_table(pa.table({"text": TEXTS}), file, row_group_size=6)
        return file.getvalue(), list(range(len(TEXTS)))
    lines = [f"{text}\n" if ".txt" in name else f"{json.dumps({'text': text})}\n" for text in TEXTS]
    places = [sum(map(len, lines[:number])) for number in range(len(lines))]
    data = "".join(lines).encode()
    return gzip.compress(data) if name.endswith(".gz") else data, places


@pytest.mark.parametrize("name", ["a.txt", "in a folder/a: b.jsonl", "a.jsonl.gz", "a.parquet"])
@pytest.mark.parametrize("options", [{}, {"record": "packed", "seq_len": 16}], ids=["documents", "packed"])
def test_a_fresh_plan_and_blank_take_exactly_the_documents_at_these_places(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    data, places = written(name)
    names = tmp_path / "names.txt"
    names.write_text("".join(f"at:{name}:{places[number]}\n" for number in GONE))
    # An equal file beside it, of which nothing is named.
    world = World(tmp_path).raw({name: data, f"b{name[name.index('.') :]}": data})
    options = {"num_shards": 3, "recursive": True, "digests": True, **options}
    world.make(**options)
    digests = [hashlib.sha256(text.encode()).digest()[:16] for text in TEXTS]
    blanked = [b"\xff" * 16 if number in GONE else digest for number, digest in enumerate(digests)]
    kept = [digest for number, digest in enumerate(digests) if number not in GONE]

    fresh = World(tmp_path, data_dir=tmp_path / "fresh").make(exclude=names, **options)
    by_file = [kept, digests] if name < "b" else [digests, kept]
    assert digests_of(fresh) == [*by_file[0], *by_file[1]]
    assert {(line["source"], line["source_offset"]) for line in fresh.lines("quarantine")} == {
        (name, places[number]) for number in GONE
    }
    new = World(tmp_path, data_dir=tmp_path / "new")
    ended = call_main("blank", world.data_dir, "--ids", names, "--output", new.data_dir)
    assert ended.code == 0, ended.text
    by_file = [blanked, digests] if name < "b" else [digests, blanked]
    assert digests_of(new) == [*by_file[0], *by_file[1]]


def digests_of(world: World) -> list[bytes]:
    raw = b"".join(path.read_bytes() for path in sorted((world.data_dir / "digests").iterdir()))
    return [raw[place : place + 16] for place in range(0, len(raw), 16)]


def test_places_where_no_document_begins_are_told_and_a_document_of_two_names_is_found_by_both(
    tmp_path: Path,
) -> None:
    data, places = written("a.jsonl")
    world = World(tmp_path).raw({"a.jsonl": data}).make(num_shards=2)
    names = tmp_path / "names.txt"
    lines = [f"at:a.jsonl:{places[5]}", f"sha256:{hashlib.sha256(TEXTS[5].encode()).hexdigest()}"]
    wrong = [f"at:a.jsonl:{places[5] + 1}", "at:b.jsonl:0", f"at:a.jsonl:{10**17}"]
    words = ["blank", world.data_dir, "--ids", names, "--output"]
    names.write_text("\n".join(lines))
    assert call_main(*words, tmp_path / "new").code == 0
    names.write_text("\n".join([*lines, *wrong]))
    ended = call_main(*words, tmp_path / "newer")
    assert ended.code == 66
    assert all(line in ended.out for line in wrong)
    assert not any(line in ended.out.split() for line in lines)


@pytest.mark.parametrize("line", ["at:", "at:a.jsonl", "at:a.jsonl:", "at:a.jsonl:-1", "at::5"])
def test_a_line_that_is_no_place_is_refused(tmp_path: Path, line: str) -> None:
    world = World(tmp_path).raw({"a.jsonl": [{"text": "one", "id": "x"}]})
    (tmp_path / "names.txt").write_text(f"{line}\n")
    ended = world.try_plan(exclude=tmp_path / "names.txt", id_field="id")
    assert (ended.code, ended.error is not None and "FILE:BYTE" in str(ended.error.expected)) == (65, True)
