"""Lists for --exclude are read as people's tools write them, and names that match no document are counted."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.input_writers import table_bytes
from tests.world import World

TEXTS = [f"secret {number}" for number in range(5)]
LEFT = TEXTS[2:]
# How tools write a list of d0 and d1: bytes of the file.
LISTS = {
    "byte order mark": b"\xef\xbb\xbfd0\nd1\n",
    "two files with marks, joined": b"\xef\xbb\xbfd0\n\xef\xbb\xbfd1\n",
    "UTF-16 of Notepad": "\ufeffd0\r\nd1\r\n".encode("utf-16-le"),
    "UTF-16, big-endian": "\ufeffd0\r\nd1".encode("utf-16-be"),
    "UTF-32": "d0\nd1\n".encode("utf-32"),
    "CRLF": b"d0\r\nd1\r\n",
    "CR alone": b"d0\rd1",
    "padded columns": b"  d0    \n\td1\xc2\xa0\n",
    "strings of jq": b'"d0"\n"d1"\n',
    "escaped JSON": b'"\\u0064\\u0030"\n"d1 "\n',
    "CSV with one column": b'"d0"\r\n"d1"\r\n',
}


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Five documents with the ids d0 to d4."""
    records = [{"id": f"d{number}", "text": text} for number, text in enumerate(TEXTS)]
    return World(tmp_path).raw({"a.jsonl": records})


def list_file(world: World, content: bytes) -> Path:
    path = world.raw_dir.with_name("names")
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("how", LISTS)
def test_a_list_means_the_same_however_a_tool_writes_it(world: World, how: str) -> None:
    world.make(id_field="id", exclude=list_file(world, LISTS[how]))
    assert world.texts() == LEFT


def test_padding_around_an_id_in_the_data_does_not_count(tmp_path: Path) -> None:
    ids = [" d0", "d1   ", "d2", "\ufeffd3", "d4"]
    records = [{"id": name, "text": text} for name, text in zip(ids, TEXTS, strict=True)]
    world = World(tmp_path).raw({"a.jsonl": records})
    world.make(id_field="id", exclude=list_file(world, b"d0\nd1   \nd3\n"))
    assert world.texts() == [TEXTS[2], TEXTS[4]]
    assert [name for *_, name in world.lines("ids")] == ["d2", "d4"]


def test_hashes_and_places_are_found_in_any_spelling(tmp_path: Path) -> None:
    """64 hex digits are a sha256 if there are no ids, and a path with a line end is a JSON string."""
    world = World(tmp_path).raw({"a.jsonl": [{"text": text} for text in TEXTS], "b\n c.txt": "one\ntwo"})
    digest = hashlib.sha256(TEXTS[0].encode()).hexdigest()
    place = json.dumps("at:b\n c.txt:4")
    listed = f"{digest}\r\n{place}\r\nsha256:{hashlib.sha256(TEXTS[1].encode()).hexdigest().upper()}"
    world.make(exclude=list_file(world, listed.encode()))
    assert world.texts() == [*LEFT, "one"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"id,why\nd0,spam\nd1,spam\n", "cut -d ',' -f 1"),
        (b"d0;spam\nd1;\n", "cut -d ';' -f 1"),
        (b"d0\tspam\nd1\tspam\n", "cut -f 1"),
        (b'["d0", "d1"]\n', "jq -r '.[]'"),
        (b'[\n "d0",\n "d1"\n]\n', "jq -r '.[]'"),
        (b'{"id": "d0"}\n{"id": "d1"}\n', "'.id'"),
        (b'"d0","spam"\n', "one a line"),
        (b"[" * 100_000, "one name a line"),
        ("d0\nd1\n".encode("utf-16-le"), "save the list as UTF-8"),
        ("\ufeffd0\n".encode("utf-16-le") + b"\n", "utf-16"),
        (b"d0\n\xb0\xa1\n", "line 2"),
        (b'"\\ud800"\n', "line 1"),
    ],
)  # fmt: skip
def test_a_list_that_may_mean_something_else_is_refused(world: World, content: bytes, named: str) -> None:
    world.try_plan(id_field="id", exclude=list_file(world, content)).ends(65, named)
    assert not world.data_dir.exists()


def test_ids_with_separators_are_written_as_json_strings(tmp_path: Path) -> None:
    ids = ["a,0", 'a,"1"', "[2]", "{3", '"4"']
    world = World(tmp_path).raw({"a.jsonl": [{"id": n, "text": t} for n, t in zip(ids, TEXTS, strict=True)]})
    listed = "\n".join(map(json.dumps, ids))
    world.plan(id_field="id", exclude=list_file(world, listed.encode())).run()
    assert world.left_out() == {"excluded": 5}


def test_a_plan_appears_after_the_tokenizer_and_the_lists_that_it_names(world: World) -> None:
    """A task that waits for another task's plan begins when plan.json is there."""
    published: list[str] = []

    def recorded(publish: Any) -> Any:
        def call(old: Any, new: Any, **where: Any) -> None:
            publish(old, new, **where)
            published.append(str(new))

        return call

    rename = mock.patch("os.rename", recorded(os.rename))
    link = mock.patch("os.link", recorded(os.link))
    with rename, link:
        world.plan(id_field="id", exclude=list_file(world, b"d0\n"))
    names = ["tokenizer", "excluded.keys", "excluded.txt", "plan.json"]
    assert [name for name in published if name in names] == names


@pytest.mark.parametrize("num_shards", [1, 3])
def test_plan_and_verify_count_the_names_that_match_no_document(world: World, num_shards: int) -> None:
    path = list_file(world, b"d0\nd9\nat:a.jsonl:1\nsha256:" + b"0" * 64 + b"\nnobody\nd0\n")
    options: dict[str, Any] = {"id_field": "id", "exclude": path, "num_shards": num_shards}
    for ended in (
        world.try_plan(**options).ends(0),
        world.plan(**options).run().main("verify", world.data_dir).ends(0),
        world.main("verify", world.data_dir, fast=True).ends(0),
    ):
        assert "4 of 5 names of --exclude match no document, such as d9, at:a.jsonl:1, " in ended.text
        assert "ids of documents are such as d" in ended.text
    assert world.texts() == TEXTS[1:]


def test_a_bare_hash_beside_ids_is_an_id_and_the_warning_says_how_a_text_is_named(world: World) -> None:
    digest = hashlib.sha256(TEXTS[0].encode()).hexdigest()
    ended = world.try_plan(id_field="id", exclude=list_file(world, digest.encode())).ends(0, digest)
    assert "sha256:HEX" in ended.text


def test_a_number_in_another_spelling_is_reported_with_an_id_of_the_data(tmp_path: Path) -> None:
    """pandas makes floats of numbers if one is missing: the id of a document is 5.0, and the list has 5."""
    rows = [{"id": number / 1, "text": f"text {number}"} for number in range(5, 9)]
    world = World(tmp_path).raw({"a.parquet": table_bytes(rows, "parquet")})
    path = list_file(world, b"5\n6.0\n")
    ended = world.plan(id_field="id", exclude=path).run().main("verify", world.data_dir).ends(0)
    assert "1 of 2 names of --exclude match no document, such as 5; ids of documents are such as" in ended.out
    assert world.texts() == ["text 5", "text 7", "text 8"]


def test_all_names_of_a_copied_document_match_and_a_sample_tells_how_ids_look(tmp_path: Path) -> None:
    """A document that several names match counts for each of them; plan cannot know names of large inputs."""
    records = [{"id": f"d{number}", "text": "long " * 400 + str(number % 1500)} for number in range(1600)]
    world = World(tmp_path).raw({"a.jsonl": records})
    digest = hashlib.sha256(records[1]["text"].encode()).hexdigest()
    options: dict[str, Any] = {
        "id_field": "id",
        "exclude": list_file(world, f"d1\nsha256:{digest}\nd77".encode()),
    }
    planned = world.try_plan(num_shards=2, **options).ends(0, "3 names", "verify says how many")
    assert "match no document," not in planned.text
    world.num_shards = 2
    ended = world.run().main("verify", world.data_dir).ends(0, "all of the 3 names match documents")
    assert "warning" not in ended.text
    assert world.left_out() == {"excluded": 3}


def test_without_the_names_or_with_damaged_lines_verify_still_counts_or_refuses(world: World) -> None:
    world.make(num_shards=1, id_field="id", exclude=list_file(world, b"d0\nd9\n"))
    (world.data_dir / "excluded.txt").write_text("d0\nd1\n[\n")  # altered; only for people
    ended = world.main("verify", world.data_dir).ends(0, "1 of 2 names of --exclude match no document; ids")
    assert "such as d0" not in ended.text
    path = world.data_dir / "quarantine/shard-00000.jsonl"
    before = path.read_bytes()
    path.write_bytes(before.replace(b'"excluded"', b'"excluded.'))
    world.main("verify", world.data_dir, fast=True).ends(65, path)


def test_a_failed_shard_counts_what_is_unusable_without_what_was_excluded(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": f"d{number}", "text": "some text"} for number in range(6)]
    rows += [{"id": f"b{number}", "text": number} for number in range(3)]
    world = World(tmp_path).raw({"a.jsonl": rows})
    keys = tmp_path / "keys.txt"
    keys.write_text("".join(f"d{number}\n" for number in range(5)))
    world.plan(num_shards=1, id_field="id", exclude=keys, max_bad_fraction=1)
    ended = world.try_shard(0, max_bad_fraction=0.5).ends(65, "3 documents (75.00%) left out (wrong_type)")
    assert "excluded" not in ended.err
