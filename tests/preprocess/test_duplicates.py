"""By the digests of texts ``duplicates`` finds copies, and documents are held out for validation."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from shardprep.errors import Refused
from tests import chat_tokenizers
from tests.forged import rewrite_json
from tests.world import World, call_main

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


def run(*words: object) -> tuple[dict[str, Any], list[list[Place]]]:
    """Return the answer, and the places in the list of each data set."""
    ended = call_main("duplicates", *words, "--json").ends(0)
    answer, lists = json.loads(ended.out), []
    for each in answer["data_sets"]:
        lines = [line.removeprefix("at:") for line in Path(each["list"]).read_text().splitlines()]
        lists.append([(name, int(byte)) for name, _, byte in (line.rpartition(":") for line in lines)])
    return answer, lists


@pytest.mark.parametrize(
    "form",
    ["documents", "sides", *(pytest.param(form, marks=pytest.mark.slow) for form in ("concat", "best fit"))],
)
def test_all_copies_but_the_first_go_across_shards_and_data_sets(tmp_path: Path, form: str) -> None:
    """The set that is named first keeps its copy, and a fresh plan without those listed has none."""
    both = [made(tmp_path / str(seed), seed, **FORMS[form]) for seed in (0, 1)]
    for sets in (both[::-1], both):
        folders, going = [world.data_dir for world, _ in sets], expected([documents for _, documents in sets])
        answer, lists = run(*folders, "--output", tmp_path / "names.txt")
        assert list(map(sorted, lists)) == list(map(sorted, going))
        counts = [dict(Counter(name.partition("/")[0] for name, _ in places)) for places in going]
        assert [each["sources"] for each in answer["data_sets"]] == counts
    counted = Counter(text for _, documents in both for _, text in documents)
    assert answer["num_documents"] == counted.total()
    assert answer["num_groups"] == sum(count > 1 for count in counted.values())
    assert answer["num_duplicates"] == counted.total() - len(counted) > 50
    for (world, _), of, places in zip(both, answer["data_sets"], going, strict=True):
        fresh = World(world.data_dir.with_name("fresh"), raw_dir=world.raw_dir)
        fresh.make(num_shards=2, recursive=True, exclude=of["list"], **FORMS[form])
        assert fresh.left_out()["excluded"] == len(places)
        answer, lists = run(fresh.data_dir, "--output", tmp_path / "none.txt")
        assert (answer["num_duplicates"], lists) == (0, [[]])


@pytest.mark.parametrize("form", ["documents", "concat"])
def test_a_blanked_document_is_neither_kept_nor_listed_in_a_moved_input(tmp_path: Path, form: str) -> None:
    world, documents = made(tmp_path, 0, **FORMS[form])
    counts = Counter(text for _, text in documents)
    first = next(place for place, text in documents if counts[text] > 2)
    names = tmp_path / "names.txt"
    names.write_text(f"at:{first[0]}:{first[1]}\n")
    new = world.blanked(names, tmp_path / "new")
    (tmp_path / "raw").rename(tmp_path / "moved")
    _, (places,) = run(new.data_dir, "--output", names, "--input_dir", tmp_path / "moved")
    assert places == expected([[each for each in documents if each[0] != first]])[0]
    newer = new.blanked(names, tmp_path / "newer", input_dir=tmp_path / "moved")
    answer, _ = run(newer.data_dir, "--output", names)
    assert (answer["num_duplicates"], answer["num_documents"]) == (0, len(counts))


def test_what_cannot_be_compared_is_refused_and_no_list_is_left(tmp_path: Path) -> None:
    world, _ = made(tmp_path / "a", 0, digests=True)
    copy, damaged = world.copy(tmp_path / "b"), world.copy(tmp_path / "c")
    path = damaged.data_dir / "digests" / "shard-00003.digests"
    path.write_bytes(bytes(16) + path.read_bytes()[16:])
    unmade = world.copy(tmp_path / "d", but=["shard-00002.json"])
    moved = World(tmp_path / "e").raw({"a.txt": "one\none\n"}).make(digests=True, record="packed", seq_len=16)
    (moved.raw_dir / "a.txt").unlink()
    for worlds, code in (([world, copy], 2), ([damaged], 65), ([unmade], 66), ([moved], 66)):
        folders = [each.data_dir for each in worlds]
        assert call_main("duplicates", *folders, "--output", tmp_path / "names.txt").code == code, folders
    assert call_main("duplicates", world.data_dir, "--output", tmp_path / "none" / "names.txt").code == 73
    assert {path.name for path in tmp_path.iterdir()} == {*"abcde"}


@pytest.mark.parametrize(
    ("digests", "are_equal"),
    [((0, 0), True), ((0, 1), False), ((0, 1 << 64), False), ((0, 1 << 127), False)],
)
def test_documents_are_equal_if_all_of_their_digests_is(
    tmp_path: Path, digests: tuple[int, int], are_equal: bool
) -> None:
    """Digests that are equal in part, of which no texts are known, are put in the places of two others."""
    world, documents = made(tmp_path, 0, digests=True)
    counts = Counter(text for _, text in documents)
    path, found = world.data_dir / "digests" / "shard-00000.digests", world.digests()
    found = found[: path.stat().st_size // 16]
    alone = [number for number in range(len(found)) if counts[documents[number][1]] == 1]
    for number, digest in zip(alone, digests, strict=False):
        found[number] = (digest + 5).to_bytes(16, "big")
    path.write_bytes(b"".join(found))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    rewrite_json(world.data_dir / "shard-00000.json", **{"digests.sha256": sha256})
    if are_equal:
        ended = call_main("duplicates", world.data_dir, "--output", tmp_path / "names.txt")
        assert (ended.code, type(ended.error)) == (78, Refused)
        assert not (tmp_path / "names.txt").exists()
    else:
        assert run(world.data_dir, "--output", tmp_path / "names.txt")[1] == expected([documents])


def test_digests_change_no_sample_and_are_kept_only_where_they_are_asked_for(tmp_path: Path) -> None:
    plain, documents = made(tmp_path / "plain", 0, record="packed", seq_len=16)
    kept, _ = made(tmp_path / "kept", 0, digests=True, record="packed", seq_len=16)
    assert kept.members() == plain.members()
    assert (len(kept.digests()), plain.digests()) == (len(documents), [])
    assert {(each["digests"], each["counts"]["validation"]) for each in plain.manifests()} == {(None, None)}


@pytest.mark.parametrize("pack", ["concat", "best_fit"])
def test_which_documents_are_held_out_follows_from_their_texts_alone(tmp_path: Path, pack: str) -> None:
    """Whatever the shards and the tokenizer; tests/oracle packs both sides and freezes their batches."""
    options: dict[str, Any] = {"validation_fraction": 0.2, "record": "packed", "seq_len": 32, "pack": pack}
    world, documents = made(tmp_path, 0, **options)
    model = chat_tokenizers.save_tokenizer("bytes", tmp_path / "bytes")
    other = World(tmp_path / "other", raw_dir=world.raw_dir, tokenizer=model)
    digests = [hashlib.sha256(text.encode()).digest()[:16] for _, text in documents]
    for each in (world, other.make(num_shards=30, recursive=True, **options)):
        found = iter(each.digests())
        sides: tuple[list[bytes], list[bytes]] = ([], [])
        for counts in (manifest["counts"] for manifest in each.manifests()):
            num_held = counts["validation"]["num_documents"]
            sides[0].extend(next(found) for _ in range(counts["num_documents"] - num_held))
            sides[1].extend(next(found) for _ in range(num_held))
        assert 20 < len(sides[1]) < len(sides[0])
        for side, is_held in zip(sides, (False, True), strict=True):
            wanted = [
                digest
                for digest in digests
                if (Fraction(int.from_bytes(digest[:8], "big"), 1 << 64) < Fraction(0.2)) == is_held
            ]
            assert side == wanted if pack == "concat" else sorted(side) == sorted(wanted)
