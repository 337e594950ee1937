"""``shardprep overlap``: what it finds is what a search by brute force finds, in every form of a data set."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shardprep.errors import BrokenShard, NotFound, Refused, UsageError
from tests.word_tokenizers import save_word_tokenizer
from tests.world import Ended, World, tokenizer_dir

FORMS: dict[str, dict[str, Any]] = {
    "documents": {"id_field": "id"},
    "digests": {"token_format": "npy", "digests": True, "id_field": "id"},
    "packed": {"record": "packed", "seq_len": 64},
    "best_fit": {"record": "packed", "seq_len": 64, "pack": "best_fit", "validation_fraction": 0.3},
}
# n, words or tokens, units that may differ, and the least share: written down again, from the papers.
RULES = {"gpt3": (13, "words", 0, 0.0), "palm": (8, "tokens", 0, 0.7), "llama": (10, "tokens", 4, 0.0)}
_CHOOSER = random.Random(1)
_LATIN = ["".join(_CHOOSER.choices("aeioubdgklmnprstvz", k=2 + n % 7)) for n in range(3000)]
_NOUNS = ["".join(chr(_CHOOSER.randrange(0xAC00, 0xD7A4)) for _ in range(2)) for _ in range(3000)]
_ENDS = {True: (("", ""), ("", ","), ("", ".")), False: (("은", "이"), ("을", "도"), ("에서", "에는"))}
Worlds = dict[str, World]
Words = list[tuple[str, tuple[str, str]]]  # a word, and its end in one text and in another


def drawn(chooser: random.Random, num_words: int, *, is_english: bool = True) -> Words:
    words = _LATIN if is_english else _NOUNS
    return [(chooser.choice(words), chooser.choice(_ENDS[is_english])) for _ in range(num_words)]


def spelled(words: Words, changed: Sequence[int] = ()) -> str:
    return " ".join(word + ends[number in changed] for number, (word, ends) in enumerate(words))


def planted() -> tuple[list[str], list[str]]:
    """Texts of an evaluation, and documents some of which hold one of them, or most of it, or nearly."""
    chooser = random.Random(7)
    evals, documents = [], [spelled(drawn(chooser, chooser.randrange(60))) for _ in range(150)]
    for number in range(40):
        length = chooser.randrange(14, 45)
        words = drawn(chooser, length, is_english=number % 2 == 1)
        text = spelled(words)
        changed = [
            text,
            " ".join(text.split()[2 : 2 + max(13, length // 2)]),
            text.upper().replace(" ", "  \t"),
            unicodedata.normalize("NFD", text).replace(" ", " ! "),
            spelled(words, range(5, length, 6)),
            spelled(drawn(chooser, 150)) + " " + text,  # it goes on in other rows
        ][number % 6]
        evals.append(text)
        documents.append(f"{spelled(drawn(chooser, 9))} {changed} {spelled(drawn(chooser, 8))}")
    documents.append(documents[-1])  # a copy, which goes with it
    documents += [spelled(drawn(chooser, 30, is_english=False)) for _ in range(20)]
    chooser.shuffle(documents)
    return [*evals, "too short"], documents


EVALS, DOCUMENTS = planted()


@pytest.fixture(scope="module")
def evals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evals")
    lines = [json.dumps({"question": text}, ensure_ascii=False) for text in EVALS]
    (folder / "quiz.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    root = tmp_path_factory.mktemp("data")
    records = [{"id": f"web/{number}", "text": text} for number, text in enumerate(DOCUMENTS)]
    made = {name: World(root, data_dir=root / name).raw({"a.jsonl": records}) for name in FORMS}
    for name, world in made.items():
        world.make(num_shards=3, **FORMS[name])
    return made


def overlap(world: World, evals: Path, output: Path, **options: Any) -> Ended:
    flags = {"against": evals, "text_field": "question", "output": output, **options}
    return world.main("overlap", world.data_dir, **flags)


def search(world: World, evals: Path, output: Path, **options: Any) -> list[dict[str, Any]]:
    """Return the hits of all shards."""
    overlap(world, evals, output, **options).ends(0)
    return [json.loads(line) for line in (output / "overlap.jsonl").read_text(encoding="utf-8").splitlines()]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_dir() / "tokenizer.json"))


def units_of(text: str, unit: str) -> list[Any]:
    if unit == "tokens":
        return list(tokenizer().encode(text, add_special_tokens=False).ids)
    letters = []
    for char in unicodedata.normalize("NFKC", text).casefold():
        kind = unicodedata.category(char)
        letters.append(char if kind[0] in "LMN" else " " if char.isspace() else "")
    return "".join(letters).split()


def compared(ours: list[Any], theirs: list[Any], rule: str) -> tuple[int, float]:
    """Return the longest shared run and the share of ``theirs`` that is shared: every pair of places."""
    ngram, _, num_gaps, _ = RULES[rule]
    longest, held = 0, set[int]()
    for i, j in itertools.product(range(len(ours) - ngram + 1), range(len(theirs) - ngram + 1)):
        if ours[i : i + ngram] != theirs[j : j + ngram]:
            continue
        equal, differing, at = list(range(ngram)), 0, ngram
        while i + at < len(ours) and j + at < len(theirs):
            if ours[i + at] == theirs[j + at]:
                equal.append(at)
            elif differing == num_gaps:
                break
            else:
                differing += 1
            at += 1
        longest = max(longest, equal[-1] + 1)
        held.update(j + each for each in equal)
    return longest, len(held) / max(1, len(theirs))


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[tuple[str, str], tuple[int, float]]]:
    """By rule: digest of a document and text of an evaluation -> what brute force finds of the pair."""
    found: dict[str, dict[tuple[str, str], tuple[int, float]]] = {}
    for rule, (ngram, unit, _, min_share) in RULES.items():
        pairs = found.setdefault(rule, {})
        quizzes = [units_of(text, unit) for text in EVALS]
        ngrams = [{tuple(each[n : n + ngram]) for n in range(len(each) - ngram + 1)} for each in quizzes]
        for text in dict.fromkeys(DOCUMENTS):
            units = units_of(text, unit)
            own = {tuple(units[n : n + ngram]) for n in range(len(units) - ngram + 1)}
            for quiz, their_units, theirs in zip(EVALS, quizzes, ngrams, strict=True):
                if not own.isdisjoint(theirs):
                    longest, share = compared(units, their_units, rule)
                    if share >= min_share:
                        pairs[digest(text), quiz] = longest, round(share, 4)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", FORMS)
def test_it_finds_the_pairs_that_brute_force_finds_and_no_others(
    worlds: Worlds, evals: Path, tmp_path: Path, expected: Any, form: str, rule: str
) -> None:
    hits = search(worlds[form], evals, tmp_path / "out", rule=rule)
    starts = list(itertools.accumulate([0, *map(len, (evals / "quiz.jsonl").read_bytes().splitlines(True))]))
    quiz_of = dict(zip([f"quiz.jsonl:{start}" for start in starts], EVALS, strict=False))
    text_of = {digest(text): text for text in DOCUMENTS}
    pairs = {(hit["sha256"], quiz_of[hit["eval"]]): (hit["longest"], hit["share"]) for hit in hits}
    assert pairs == expected[rule]
    assert len(pairs) > (15 if rule == "palm" else 30)
    num_copies = sum(DOCUMENTS.count(text_of[each]) for each, _ in pairs)
    assert len(hits) == num_copies


@pytest.mark.parametrize("form", FORMS)
def test_a_hit_names_a_document_and_its_text(worlds: Worlds, evals: Path, tmp_path: Path, form: str) -> None:
    world, out = worlds[form], tmp_path / "out"
    raw = (world.raw_dir / "a.jsonl").read_bytes()
    hits = search(world, evals, out)
    names = (out / "names.txt").read_text().split()
    assert set(names) == {f"sha256:{hit['sha256']}" for hit in hits}, "what --exclude and blank take"
    for hit in hits:
        name, _, byte = hit["document"].rpartition(":")
        record = json.loads(raw[int(byte) :].partition(b"\n")[0])
        assert (name, hit["sha256"]) == ("a.jsonl", digest(record["text"]))
        assert hit["id"] == (record["id"] if "id_field" in FORMS[form] else None)
        run, words = hit["text"].split(), units_of(record["text"], "words")
        assert len(run) == hit["longest"]
        assert any(words[n : n + len(run)] == run for n in range(len(words)))
    if form == "documents":
        shown = world.main("peek", world.data_dir, hits[0]["document"], chars=0)
        assert f"from a.jsonl byte {hits[0]['document'].rpartition(':')[2]}\n" in shown.out


def test_a_tokenizer_that_loses_texts_changes_no_hit(worlds: Worlds, evals: Path, tmp_path: Path) -> None:
    world = World(tmp_path, tokenizer=tmp_path / "model", raw_dir=worlds["packed"].raw_dir)
    save_word_tokenizer(world.tokenizer, 3, splits=True)
    world.make(record="packed", seq_len=300)
    assert search(world, evals, tmp_path / "out") == [
        {**hit, "id": None} for hit in search(worlds["documents"], evals, tmp_path / "expected")
    ]


def test_an_evaluation_may_be_a_data_set(worlds: Worlds, evals: Path, tmp_path: Path) -> None:
    quiz = World(tmp_path).raw({"quiz.txt": "\n".join(EVALS)}).make(num_shards=2, record="packed", seq_len=32)
    of_file = search(worlds["packed"], evals, tmp_path / "a")
    of_set = search(worlds["packed"], quiz.data_dir, tmp_path / "b", text_field=None)
    assert of_file
    assert [{**hit, "eval": ""} for hit in of_file] == [{**hit, "eval": ""} for hit in of_set]


def test_arrays_and_later_calls_make_the_missing_lists(worlds: Worlds, evals: Path, tmp_path: Path) -> None:
    world, one, many = worlds["documents"], tmp_path / "one", tmp_path / "many"
    hits = search(world, evals, one)
    for shard_id in (2, 0, 1):
        assert not (many / "overlap.jsonl").exists()
        assert overlap(world, evals, many, shards=shard_id).code == 0
    files = {path.name: path.read_bytes() for path in one.iterdir()}
    assert {path.name: path.read_bytes() for path in many.iterdir()} == files
    gone, *kept = [(path, path.stat().st_ino) for path in sorted(one.glob("shard-*"))]
    gone[0].unlink()
    assert search(world, evals, one) == hits
    assert [(path, path.stat().st_ino) for path in sorted(one.glob("shard-*"))][1:] == kept
    assert gone[0].exists()
    (tmp_path / "quiz.jsonl").write_text(json.dumps({"question": EVALS[0]}))
    cases: list[tuple[Path, dict[str, Any]]] = [(evals, {"ngram": 12}), (tmp_path / "quiz.jsonl", {})]
    alone = [search(world, of, tmp_path / str(n), **options) for n, (of, options) in enumerate(cases)]
    assert [search(world, of, one, **options) for of, options in cases] == alone
    assert len(list(one.glob("shard-*"))) == 9


def test_a_damaged_list_is_refused_with_what_to_type(worlds: Worlds, evals: Path, tmp_path: Path) -> None:
    search(worlds["documents"], evals, tmp_path / "out")
    path = next((tmp_path / "out").glob("shard-00001.*"))
    whole = path.read_bytes()
    for damaged in (b"[]\n", b"{}\n", whole + b"no json\n", whole[:-9]):
        path.write_bytes(damaged)
        error = overlap(worlds["documents"], evals, tmp_path / "out").error
        assert (type(error), error and error.remedy) == (BrokenShard, f"rm {path}")


def test_a_plan_is_enough_and_an_input_that_changed_since_is_refused(evals: Path, tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "\n".join(DOCUMENTS).replace("\t", " ")}).plan(num_shards=2)
    assert len(search(world, evals, tmp_path / "out")) > 30
    (world.raw_dir / "a.txt").write_text("another text")
    assert type(overlap(world, evals, tmp_path / "again").error) is Refused


@pytest.mark.processes  # plan tries the function in one
def test_texts_are_compared_as_the_plans_function_makes_them(evals: Path, tmp_path: Path) -> None:
    function = tmp_path / "function.py"
    function.write_text("def transform(record):\n    return record['text'].replace('#', ' ')\n")
    hidden = [{"text": text.replace(" ", "#")} for text in (EVALS[1], DOCUMENTS[0])]
    world = World(tmp_path).raw({"a.jsonl": hidden}).plan(num_shards=1, transform=function)
    (tmp_path / "raw").rename(tmp_path / "elsewhere")
    moved: dict[str, Any] = {"input_dir": tmp_path / "elsewhere"}
    hits = search(world, evals, tmp_path / "out", transform=function, **moved)
    assert [(hit["document"], hit["share"]) for hit in hits if hit["share"] == 1] == [("a.jsonl:0", 1)]
    for options, error in ((moved, UsageError), ({"transform": function}, NotFound)):
        assert type(overlap(world, evals, tmp_path / "again", **options).error) is error


def test_the_summary_counts_documents_by_source_and_the_page_runs_nothing(tmp_path: Path) -> None:
    held, others = f"<script>alert(1)</script> {EVALS[1]}", "\n".join(DOCUMENTS[:9])
    (tmp_path / "quiz.txt").write_text(held)
    world = World(tmp_path).raw({"web/a.txt": f"{held}\n{held}", "code/b.txt": held, "c/d.txt": others})
    options = {"against": tmp_path / "quiz.txt", "rule": "llama"}  # which shows texts as they are
    told = world.plan(recursive=True).main("overlap", world.data_dir, **options).out
    found = [line.split()[:2] for line in told.splitlines() if line.startswith("  ")]
    assert found == [["web:", "2"], ["code:", "1"]]
    page = (world.data_dir / "overlap" / "overlap.html").read_text(encoding="utf-8")
    assert ("alert(1)&lt;/script&gt;" in page, "</script" in page) == (True, False)
