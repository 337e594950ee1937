"""``shardprep peek``: samples decoded, with boundaries and places, by each kind of address."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.world import World

HEAD = re.compile(
    r"^shard-(\d{5}) (?:document|row) (\d+): \d+ tokens(?:, for validation)?, "
    r"(?:begins in the document at|from) .* byte \d+$"
)
_WORDS = ("the", "kettle", "sings", "and", "nobody's", "listening", "12345", "to", "도서관", "읽는다")
LINES = [
    " ".join([str(number), *random.Random(number).choices(_WORDS, k=number % 13)]) for number in range(90)
]
FORMS: dict[str, dict[str, Any]] = {
    "documents": {},
    "packed": {"record": "packed", "seq_len": 64},
    "held": {"record": "packed", "seq_len": 64, "validation_fraction": 0.4},
}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    root = tmp_path_factory.mktemp("data")
    records = [{"id": f"web/{number}", "text": text} for number, text in enumerate(LINES)]
    worlds = {}
    for name, options in FORMS.items():
        worlds[name] = World(root, data_dir=root / name).raw({"a.jsonl": records})
        worlds[name].plan(num_shards=3, id_field="id", **options).run()
    return worlds


def peek(world: World, *words: object) -> list[str]:
    """Return the blocks that are printed, one for each sample."""
    ended = world.main("peek", world.data_dir, *words, "--chars", 0)
    assert ended.code == 0, ended.text
    return ended.out.rstrip("\n").split("\n\n")


def head(block: str) -> tuple[int, int]:
    """Return shard and number of a sample that was printed."""
    found = HEAD.match(block.splitlines()[0])
    assert found, block
    return int(found[1]), int(found[2])


def body(block: str) -> str:
    return re.sub("⟦.*?⟧", "", "".join(line[2:] for line in block.splitlines()[1:] if line[2:5] != "---"))


def test_a_document_is_printed_as_its_input_has_it_and_rows_tell_where_documents_begin(
    worlds: dict[str, World],
) -> None:
    assert list(map(body, peek(worlds["documents"], "--num", 10**6))) == LINES
    blocks = peek(worlds["packed"], "--num", 10**6)
    assert sum(block.count("  --- a document begins") for block in blocks) == len(LINES)
    # The end of a row may cut a character.
    assert re.findall("[ -~]", "".join(map(body, blocks))) == re.findall("[ -~]", "".join(LINES))
    for block in blocks:
        assert ("--- the rest of a document" in block) == ("begins in the document at" in block)
    assert any("the rest of a document" in block for block in blocks)
    held = peek(worlds["held"], "--num", 10**6)
    num_held = sum(manifest["counts"]["validation"]["num_samples"] for manifest in worlds["held"].manifests())
    assert sum(", for validation, " in block for block in held) == num_held > 0


@pytest.mark.parametrize("form", FORMS)
def test_each_address_shows_its_document(worlds: dict[str, World], form: str) -> None:
    world, raw = worlds[form], (worlds[form].raw_dir / "a.jsonl").read_bytes().splitlines(keepends=True)
    every = {head(block): block for block in peek(world, "--num", 10**6)}
    for number in range(0, len(LINES), 9):
        byte = sum(map(len, raw[:number]))
        for address in (f"id:web/{number}", f"a.jsonl:{byte}", f"a.jsonl:{byte + 7}"):
            found = peek(world, address)
            assert LINES[number][:6] in "".join(map(body, found)), (address, found)
            assert [every[head(block)] for block in found] == found
    (shard, sample), block = next(
        item for item in every.items() if form == "documents" or item[1].count("  --- ") > 1
    )
    assert peek(world, f"{shard}:{sample}", "--num", 1) == [block]
    title, *documents = re.split(r"^(?=  --- )", block, flags=re.MULTILINE)
    for number, document in enumerate(documents):
        assert peek(world, f"{shard}:{sample}:{number}") == [f"{title}{document}".rstrip("\n")]


def test_grep_chooses_the_samples_that_have_it(worlds: dict[str, World]) -> None:
    found = peek(worlds["documents"], "--grep", "kettle [a-z]", "--num", 10**6)
    assert [body(block) for block in found] == [line for line in LINES if re.search("kettle [a-z]", line)]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--chars -1", 2),
        ("0:1 --grep a", 2),
        ("id:", 2),
        ("--grep none", 66),
        ("0:1:1", 66),
        ("id:nobody", 66),
    ],
)
def test_what_is_not_there_is_66_and_no_address_2(worlds: dict[str, World], words: str, code: int) -> None:
    ended = worlds["documents"].main("peek", worlds["documents"].data_dir, *words.split())
    assert (ended.code, ended.out) == (code, "")


@pytest.mark.parametrize("held", [{}, {"validation_fraction": 0.4}], ids=["all", "held"])
def test_a_document_is_found_in_a_row_that_begins_in_another_input(
    tmp_path: Path, held: dict[str, Any]
) -> None:
    lines = [[f"the kettle {n * 111:03} sings\n", f"second line {n * 111:03}\n"] for n in range(9)]
    world = World(tmp_path).raw({f"{number}.txt": "".join(each) for number, each in enumerate(lines)})
    world.plan(num_shards=1, record="packed", seq_len=4096, **held).run()
    for number, (first, second) in enumerate(lines):
        for place, text in ((0, first), (len(first), second)):
            assert text.strip() in "".join(map(body, peek(world, f"{number}.txt:{place}")))
