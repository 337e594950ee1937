"""The report's hint of documents that are alike, against every pair's runs of tokens compared one by one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from preprocess.plan.plan_file import need_plan
from slurm.report.near_duplicates import near_duplicates

if TYPE_CHECKING:
    from tests.conftest import Prep


def write_documents(raw: Path) -> list[str]:
    """200 documents of their own, 20 copies, 20 with a word in 100 changed, 20 with half of them changed."""
    chooser = random.Random(7)
    words = [
        "다리는",
        "겨울이",
        "오기",
        "전에",
        "the",
        "bridge",
        "until",
        "1234",
        "didn't",
        "open",
        "문을",
        "닫는다.",
    ]
    own = [chooser.choices(words, k=chooser.randrange(30, 200)) for _ in range(200)]
    documents = [*own]
    for share, source in ((0.0, own[:20]), (0.01, own[20:40]), (0.5, own[40:60])):
        for document in source:
            changed = set(chooser.sample(range(len(document)), int(share * len(document) + 0.99)))
            documents.append(
                [f"other{place}" if place in changed else word for place, word in enumerate(document)]
            )
    lines = [" ".join(document) for document in documents]
    raw.mkdir()
    (raw / "a.txt").write_text("\n".join([*lines, "short", "short"]) + "\n")
    return [*lines, "short", "short"]


def runs_of(ids: list[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[at : at + 5]) for at in range(len(ids) - 4)}


def jaccard(one: set[tuple[int, ...]], two: set[tuple[int, ...]]) -> float:
    return len(one & two) / len(one | two) if one | two else 0.0


def test_equal_and_nearly_equal_documents_are_those_that_share_their_runs(prep: Prep, tmp_path: Path) -> None:
    lines = write_documents(tmp_path / "raw")
    prep.plan(tmp_path / "raw", tmp_path / "data", num_shards=1)
    prep.make(tmp_path / "data")
    found = near_duplicates(tmp_path / "data", need_plan(tmp_path / "data").spec, 0, 1000)
    tokenizer = Tokenizer.from_file(str(tmp_path / "data/tokenizer/tokenizer.json"))
    runs = [runs_of(tokenizer.encode(line).ids) for line in lines]
    assert (found["num_documents"], found["num_copies"]) == (len(lines), 21)
    pairs = {
        (each["kind"], *(int(each[name].split(":")[1]) for name in ("address", "like")))
        for each in found["examples"]
    }
    for kind, number, other in pairs:
        assert other < number
        assert (lines[number] == lines[other]) == (kind == "copy")
        assert kind == "copy" or jaccard(runs[number], runs[other]) > 0.5
    is_near = [any(jaccard(of, before) > 0.9 for before in runs[:number]) for number, of in enumerate(runs)]
    wanted = {
        number for number in range(len(lines)) if is_near[number] and lines[number] not in lines[:number]
    }
    assert len(wanted) >= 10
    near = {number for kind, number, _ in pairs if kind == "near"}
    assert len(wanted & near) >= 0.8 * len(wanted), "16 hashes find most of them"
    assert not near & {*range(200), *range(240, len(lines))}, "what is alike by half is not near"


@pytest.mark.parametrize("pack", ["concat", "best_fit"])
def test_addresses_of_rows_are_those_that_peek_takes(prep: Prep, tmp_path: Path, pack: str) -> None:
    lines = write_documents(tmp_path / "raw")
    prep.plan(tmp_path / "raw", tmp_path / "data", num_shards=1, record="packed", seq_len=2048, pack=pack)
    prep.make(tmp_path / "data")
    found = near_duplicates(tmp_path / "data", need_plan(tmp_path / "data").spec, 0, 3)
    copies = [each for each in found["examples"] if each["kind"] == "copy"]
    assert len(copies) == 3
    for each in copies:
        texts = [
            prep.command("peek", tmp_path / "data", each[name], "--chars", 0).text
            for name in ("address", "like")
        ]
        one, two = (text.partition("begins\n")[2] for text in texts)
        assert one == two
        assert any(line in one for line in lines)
