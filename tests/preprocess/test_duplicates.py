"""``shardprep duplicates``: which copies go, beside a dict of all texts, in all forms."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

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
    "sides of documents": {"validation_fraction": 0.3},
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
