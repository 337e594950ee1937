"""``duplicates`` finds copies beside a dict of all texts; at:FILE:BYTE of a list names one copy alone."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardprep.errors import Refused
from tests.forged import rewrite_json
from tests.killed_calls import killed_at
from tests.world import World, call_main

pytestmark = pytest.mark.processes  # blank makes shards as run does

FORMS: dict[str, dict[str, Any]] = {
    "documents": {"digests": True},
    "concat": {"digests": True, "record": "packed", "seq_len": 16},
    "best fit": {"digests": True, "record": "packed", "seq_len": 16, "pack": "best_fit"},
    "sides": {"validation_fraction": 0.3, "record": "packed", "seq_len": 16},
}
Place = tuple[str, int]  # input, byte


def texts_of(seed: int, count: int) -> list[str]:
    """Texts of which a third stand elsewhere, too, also in those of other seeds; some fill several rows."""
    draw = random.Random(seed)
    unique = [f"{seed} {number} " + "and some words " * draw.choice([1, 3, 20]) for number in range(count)]
    common = [f"a common text {number} " * (8 if number % 3 else 1) for number in range(9)]
    texts = unique + draw.choices(common, k=count // 3) + draw.sample(unique, count // 6)
    draw.shuffle(texts)
    return [text.strip() for text in texts]


def made(folder: Path, seed: int, **options: Any) -> tuple[World, list[tuple[Place, str]]]:
    """A data set of two source folders, and its documents in the order of its inputs, with their places."""
    files = {"a/one.jsonl": texts_of(seed, 60), "b/two.jsonl": texts_of(seed + 1, 40), "b/empty.jsonl": []}
    documents, raw = [], dict[str, Any]()
    for name, texts in sorted(files.items()):
        lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
        raw[name] = b"".join(lines)
        for number, text in enumerate(texts):
            documents.append(((name, sum(map(len, lines[:number]))), text))
    world = World(folder).raw(raw).make(num_shards=5, recursive=True, **options)
    return world, documents


def expected(sets: list[list[tuple[Place, str]]]) -> list[list[Place]]:
    """What goes of each data set: all but the first of equal texts."""
    seen = set[str]()
    going: list[list[Place]] = []
    for documents in sets:
        going.append([])
        for place, text in documents:
            if text in seen:
                going[-1].append(place)
            seen.add(text)
    return going


def listed(path: Path) -> list[Place]:
    found = [re.fullmatch("at:(.*):([0-9]+)", line) for line in path.read_text().splitlines()]
    return [(each[1], int(each[2])) for each in found if each is not None]


def run(*words: object) -> Any:
    ended = call_main("duplicates", *words, "--json")
    assert ended.code == 0, ended.text
    return json.loads(ended.out)


@pytest.mark.parametrize("form", FORMS)
def test_all_copies_but_the_first_go_across_shards_and_data_sets(tmp_path: Path, form: str) -> None:
    worlds, sets = zip(*(made(tmp_path / str(n), n, **FORMS[form]) for n in (0, 1)), strict=True)
    run(*(world.data_dir for world in worlds[::-1]), "--output", tmp_path / "names.txt")
    for places, path in zip(expected(list(sets)[::-1]), ("names.txt", "names.2.txt"), strict=True):
        assert sorted(listed(tmp_path / path)) == sorted(places), "the set that is named first keeps its copy"
    answer = run(*(world.data_dir for world in worlds), "--output", tmp_path / "names.txt")
    going = expected(list(sets))
    for places, path in zip(going, ("names.txt", "names.2.txt"), strict=True):
        assert sorted(listed(tmp_path / path)) == sorted(places)
    counts = Counter(text for documents in sets for _, text in documents)
    assert answer["num_documents"] == counts.total()
    assert answer["num_groups"] == sum(count > 1 for count in counts.values())
    assert answer["num_duplicates"] == sum(count - 1 for count in counts.values()) > 50
    for number, world in enumerate(worlds):
        of = answer["data_sets"][number]
        places = going[number]
        assert of["sources"] == dict(Counter(name.partition("/")[0] for name, _ in places))
        fresh = World(tmp_path / "fresh" / str(number), raw_dir=world.raw_dir)
        fresh.make(num_shards=2, recursive=True, exclude=of["list"], **FORMS[form])
        assert fresh.left_out()["excluded"] == len(places)
        assert run(fresh.data_dir, "--output", tmp_path / "none.txt")["num_duplicates"] == 0
        assert (tmp_path / "none.txt").read_bytes() == b""


@pytest.mark.parametrize("form", ["documents", "concat"])
def test_a_blanked_document_is_neither_kept_nor_listed(tmp_path: Path, form: str) -> None:
    world, documents = made(tmp_path, 0, **FORMS[form])
    counts = Counter(text for _, text in documents)
    text = next(text for text, count in counts.items() if count > 2)
    first = next(place for place, each in documents if each == text)
    (tmp_path / "first.txt").write_text(f"at:{first[0]}:{first[1]}\n")
    new, newer = tmp_path / "new", tmp_path / "newer"
    assert call_main("blank", world.data_dir, "--ids", tmp_path / "first.txt", "--output", new).code == 0
    run(new, "--output", tmp_path / "names.txt")
    left = [each for each in documents if each[0] != first]
    assert listed(tmp_path / "names.txt") == expected([left])[0]
    assert call_main("blank", new, "--ids", tmp_path / "names.txt", "--output", newer).code == 0
    answer = run(newer, "--output", tmp_path / "again.txt")
    assert (answer["num_duplicates"], answer["num_documents"]) == (0, len(counts))


def test_what_cannot_be_compared_is_refused_and_no_list_is_left(tmp_path: Path) -> None:
    world, _ = made(tmp_path / "a", 0, digests=True)
    plain, _ = made(tmp_path / "b", 0)
    copy = world.copy(tmp_path / "c")
    damaged = world.copy(tmp_path / "d")
    path = damaged.data_dir / "digests" / "shard-00003.digests"
    path.write_bytes(bytes(16) + path.read_bytes()[16:])
    unmade = world.copy(tmp_path / "e", but=["shard-00002.json"])
    moved = World(tmp_path / "f").raw({"a.txt": "one\none\n"}).make(digests=True, record="packed", seq_len=16)
    (moved.raw_dir / "a.txt").unlink()
    output = tmp_path / "names.txt"
    for folders, code in (
        ([plain.data_dir], 2),
        ([world.data_dir, plain.data_dir], 2),
        ([world.data_dir, copy.data_dir], 2),
        ([damaged.data_dir], 65),
        ([unmade.data_dir], 66),
        ([moved.data_dir], 66),
        ([tmp_path], 66),
    ):
        assert call_main("duplicates", *folders, "--output", output).code == code, folders
    assert call_main("duplicates", world.data_dir, "--output", tmp_path / "none" / "names.txt").code == 73
    assert not output.exists()
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_packed_rows_are_looked_up_in_an_input_that_moved(tmp_path: Path) -> None:
    world, documents = made(tmp_path, 0, **FORMS["concat"])
    (tmp_path / "raw").rename(tmp_path / "elsewhere")
    run(world.data_dir, "--output", tmp_path / "names.txt", "--input_dir", tmp_path / "elsewhere")
    assert listed(tmp_path / "names.txt") == expected([documents])[0]


def test_a_kill_at_any_call_leaves_the_list_of_before_or_the_new_one(tmp_path: Path) -> None:
    world, documents = made(tmp_path, 0, digests=True)
    output = tmp_path / "out" / "names.txt"
    output.parent.mkdir()
    output.write_text("of before")
    words = [*map(str, ["duplicates", world.data_dir, "--output", output])]
    at = num_killed = 1
    while os.WIFSIGNALED(killed_at(at, words)):
        num_killed += 1
        if output.read_text() != "of before":
            assert listed(output) == expected([documents])[0]
        names = {path.name for path in output.parent.iterdir()} - {output.name}
        assert all(name.startswith(".names.txt.") for name in names), "parts have no name"
        at = at * 4 // 3 + 1
    assert num_killed > 5
    assert listed(output) == expected([documents])[0]


@pytest.mark.parametrize(
    ("digests", "are_equal"),
    [((0, 0), True), ((0, 1), False), ((0, 1 << 64), False), ((0, 1 << 127), False)],
)
def test_documents_are_equal_if_all_of_their_digests_is_and_digests_of_no_document_are_refused(
    tmp_path: Path, digests: tuple[int, int], are_equal: bool
) -> None:
    """Digests that are equal in part, of which no texts are known, are put in the places of two others."""
    world, documents = made(tmp_path, 0, digests=True)
    counts = Counter(text for _, text in documents)
    path = world.data_dir / "digests" / "shard-00000.digests"
    found = [path.read_bytes()[place : place + 16] for place in range(0, path.stat().st_size, 16)]
    alone = [number for number in range(len(found)) if counts[documents[number][1]] == 1]
    for number, digest in zip(alone, digests, strict=False):
        found[number] = (digest + 5).to_bytes(16, "big")
    path.write_bytes(b"".join(found))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    rewrite_json(world.data_dir / "shard-00000.json", **{"digests.sha256": sha256})
    ended = call_main("duplicates", world.data_dir, "--output", tmp_path / "names.txt")
    if are_equal:
        assert (ended.code, type(ended.error)) == (78, Refused)
        assert not (tmp_path / "names.txt").exists()
    else:
        assert ended.code == 0
        assert listed(tmp_path / "names.txt") == expected([documents])[0]


# Names by place. --------------------------------------------------------------------------------------

TEXTS = [f"text {number % 7} of several equal ones" for number in range(40)]
PACKED = {"record": "packed", "seq_len": 16}
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


@pytest.mark.parametrize(
    ("name", "options"),
    [("a.txt", PACKED), ("in a folder/a: b.jsonl", {}), ("a.jsonl.gz", {}), ("a.parquet", PACKED)],
)
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


def test_names_of_no_document_are_told_and_two_names_of_one_are_both_found(tmp_path: Path) -> None:
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
