"""``shardprep overlap``: what it finds is what a search by brute force finds, in every form of a data set."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardprep.errors import BadInput, BrokenShard, MissingShard, NotFound, Refused, UsageError
from tests.killed_calls import killed_at
from tests.world import World, tokenizer_dir

FORMS: dict[str, dict[str, Any]] = {
    "documents": {"id_field": "id"},
    "digests": {"token_format": "npy", "digests": True, "id_field": "id"},
    "packed": {"record": "packed", "seq_len": 64},
    "best_fit": {"record": "packed", "seq_len": 64, "pack": "best_fit", "validation_fraction": 0.3},
}
# n, words or tokens, units that may differ, and the least share: written down again, from the papers.
RULES = {"gpt3": (13, "words", 0, 0.0), "palm": (8, "tokens", 0, 0.7), "llama": (10, "tokens", 4, 0.0)}
_CHOOSER = random.Random(1)
_ENGLISH = ["".join(_CHOOSER.choices("aeioubdgklmnprstvz", k=2 + n % 7)) for n in range(3000)]
_NOUNS = ["".join(chr(_CHOOSER.randrange(0xAC00, 0xD7A4)) for _ in range(2)) for _ in range(3000)]
_PARTICLES = (("은", "이"), ("을", "도"), ("에서", "에는"), ("의", "와"))


def english(chooser: random.Random, num_words: int) -> str:
    return " ".join(chooser.choice(_ENGLISH) + chooser.choice(("", "", ",", ".")) for _ in range(num_words))


def korean(chooser: random.Random, num_words: int) -> list[tuple[str, int]]:
    """Nouns, each with the number of its particles."""
    return [(chooser.choice(_NOUNS), chooser.randrange(len(_PARTICLES))) for _ in range(num_words)]


def spelled(words: Sequence[tuple[str, int]], changed: Sequence[int] = ()) -> str:
    return " ".join(noun + _PARTICLES[which][n in changed] for n, (noun, which) in enumerate(words))


def planted() -> tuple[list[str], list[str]]:
    """Texts of an evaluation, and documents some of which hold one of them, or most of it, or nearly."""
    chooser = random.Random(7)
    evals, documents = [], [english(chooser, chooser.randrange(60)) for _ in range(150)]
    for number in range(40):
        length = chooser.randrange(14, 45)
        words = korean(chooser, length)
        text = english(chooser, length) if number % 2 else spelled(words)
        cut = " ".join(text.split()[2 : 2 + max(13, length // 2)])
        changed = [
            text,
            cut,
            text.upper().replace(" ", "  \t"),
            unicodedata.normalize("NFD", text).replace(" ", " ! "),
            spelled(words, range(5, length, 6)) if number % 2 == 0 else text.replace(".", ""),
            english(chooser, 150) + " " + text,  # it goes on in other rows
        ][number % 6]
        evals.append(text)
        documents.append(f"{english(chooser, 9)} {changed} {english(chooser, 8)}")
    documents.append(documents[-1])  # a copy, which goes with it
    documents += [spelled(korean(chooser, 30)) for _ in range(20)]
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
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    root = tmp_path_factory.mktemp("data")
    records = [{"id": f"web/{number}", "text": text} for number, text in enumerate(DOCUMENTS)]
    made = {name: World(root, data_dir=root / name).raw({"a.jsonl": records}) for name in FORMS}
    for name, world in made.items():
        world.make(num_shards=3, **FORMS[name])
    return made


def search(world: World, evals: Path, output: Path, *words: object, **options: Any) -> list[dict[str, Any]]:
    """Return the hits of all shards."""
    flags = {"against": evals, "text_field": "question", "output": output, **options}
    ended = world.main("overlap", world.data_dir, *words, **flags)
    assert ended.code == 0, ended.text
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
    worlds: dict[str, World], evals: Path, tmp_path: Path, expected: Any, form: str, rule: str
) -> None:
    hits = search(worlds[form], evals, tmp_path / "out", rule=rule)
    starts = list(itertools.accumulate([0, *map(len, (evals / "quiz.jsonl").read_bytes().splitlines(True))]))
    quiz_of = dict(zip([f"quiz.jsonl:{start}" for start in starts], EVALS, strict=False))
    text_of = {digest(text): text for text in DOCUMENTS}
    pairs = {(hit["sha256"], quiz_of[hit["eval"]["name"]]): (hit["longest"], hit["share"]) for hit in hits}
    assert pairs == expected[rule]
    assert len(pairs) > (15 if rule == "palm" else 30)
    num_copies = sum(DOCUMENTS.count(text_of[each]) for each, _ in pairs)
    assert len(hits) == num_copies


@pytest.mark.parametrize("form", FORMS)
def test_a_hit_names_the_document_by_address_place_and_id(
    worlds: dict[str, World], evals: Path, tmp_path: Path, form: str
) -> None:
    world, text_of = worlds[form], {digest(text): text for text in DOCUMENTS}
    raw = (world.raw_dir / "a.jsonl").read_bytes()
    num_placed = 0
    hits = search(world, evals, tmp_path / "out")
    for hit in hits:
        text = text_of[hit["sha256"]]
        shown = world.main("peek", world.data_dir, hit["document"], chars=0)
        assert shown.code == 0, shown.text
        body = re.sub(
            "⟦.*?⟧|�", "", "".join(line[2:] for line in shown.out.splitlines()[1:] if line[2:5] != "---")
        )
        assert text.replace("\t", "\\t").startswith(body), hit  # of a row it is perhaps the beginning alone
        assert hit["document"].split(":")[:2] == [str(hit["shard"]), str(hit["record"])]
        if hit["place"]:
            num_placed += 1
            line = raw[hit["place"]["byte"] :].partition(b"\n")[0]
            assert json.loads(line)["text"] == text
            assert hit["id"] == (json.loads(line)["id"] if "id_field" in FORMS[form] else None)
    assert num_placed == len(hits) if form in ("documents", "digests") else num_placed > 0


@pytest.mark.processes
def test_the_names_are_taken_by_exclude_and_by_blank_and_nothing_is_found_afterwards(
    worlds: dict[str, World], evals: Path, tmp_path: Path
) -> None:
    world = worlds["documents"]
    hits = search(world, evals, tmp_path / "out", rule="llama")
    names = tmp_path / "out" / "names.txt"
    assert set(names.read_text().split()) == {f"sha256:{hit['sha256']}" for hit in hits}
    without = World(tmp_path, raw_dir=world.raw_dir).make(num_shards=2, exclude=names)
    assert without.left_out()["excluded"] == len({hit["document"] for hit in hits})
    assert search(without, evals, tmp_path / "again", rule="llama") == []
    blanked = world.main("blank", world.data_dir, ids=names, output=tmp_path / "blanked", num_proc=1)
    assert blanked.code == 0, blanked.text
    left = World(tmp_path, raw_dir=world.raw_dir, data_dir=tmp_path / "blanked")
    assert search(left, evals, tmp_path / "left", rule="llama") == []


@pytest.mark.slow
@pytest.mark.processes
def test_a_running_run_goes_on_without_what_was_found_and_the_steps_that_saw_it_are_named(
    worlds: dict[str, World], evals: Path, tmp_path: Path
) -> None:
    world, options = worlds["packed"], {"global_batch_size": 4, "seed": 5, "batch_size": 4}
    search(world, evals, tmp_path / "out")
    names, num_steps = tmp_path / "out" / "names.txt", 12
    with world.loader(**options) as loader:
        batches = list(loader)
        state = loader.state_at(num_steps)
    (tmp_path / "state.json").write_text(json.dumps(state))
    blanked = world.main("blank", world.data_dir, ids=names, output=tmp_path / "blanked", num_proc=1)
    assert blanked.code == 0, blanked.text
    left = World(tmp_path, data_dir=tmp_path / "blanked")
    with left.loader(**options) as loader:
        gone = [(batch["labels"] == -100) for batch in loader]
    saw = {step for step in range(num_steps) if (gone[step] & (batches[step]["labels"] != -100)).any()}
    state_and_hits = ("--state", tmp_path / "state.json", "--ids", tmp_path / "out" / "overlap.jsonl")
    ended = world.main("where", world.data_dir, *state_and_hits, "--json")
    assert ended.code == 0, ended.text
    assert {each["step"] for each in json.loads(ended.out.splitlines()[-1])["steps"]} == saw
    assert 0 < len(saw) < num_steps
    with left.loader(**options) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        rest = list(loader)
    assert len(rest) == len(batches) - num_steps
    for step, batch in enumerate(rest, num_steps):
        is_left = batch["labels"] != -100
        assert (batch["labels"][is_left] == batches[step]["labels"][is_left]).all()
        assert (batch["input_ids"][is_left] == batches[step]["input_ids"][is_left]).all()
        assert (~is_left).equal(gone[step])


def test_documents_whose_ids_do_not_give_back_their_text_are_named_by_place(tmp_path: Path) -> None:
    words = sorted({word for text in [*EVALS, *DOCUMENTS] for word in text.split()})
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*words, "<end>"])}, "<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(tmp_path / "words")
    (tmp_path / "quiz.txt").write_text("\n".join(EVALS), encoding="utf-8")
    for form, options in {"documents": {}, "packed": {"record": "packed", "seq_len": 300}}.items():
        world = World(tmp_path, tokenizer=tmp_path / "words", data_dir=tmp_path / form)
        world.raw({"a.txt": "\n".join(text.replace("\t", " ") for text in DOCUMENTS)}).make(**options)
        out = tmp_path / f"{form}_out"
        hits = search(world, tmp_path / "quiz.txt", out, text_field=None)
        assert len(hits) > 20
        assert all(hit["sha256"] is None for hit in hits)
        places = {f"at:a.txt:{hit['place']['byte']}" for hit in hits if hit["place"]}
        assert set((out / "names.txt").read_text().split()) == places
    assert len(places) < len(hits)  # of rows the idx says less
    excluded = World(tmp_path, tokenizer=tmp_path / "words").plan(
        exclude=tmp_path / "documents_out/names.txt"
    )
    excluded.run().verify()
    assert search(excluded, tmp_path / "quiz.txt", tmp_path / "again", text_field=None) == []


def test_an_evaluation_may_be_a_data_set(worlds: dict[str, World], evals: Path, tmp_path: Path) -> None:
    quiz = World(tmp_path).raw({"quiz.txt": "\n".join(EVALS)}).make(num_shards=2, record="packed", seq_len=32)
    of_file = search(worlds["packed"], evals, tmp_path / "a")
    of_set = search(worlds["packed"], quiz.data_dir, tmp_path / "b", text_field=None)
    names = ("document", "sha256", "longest", "share", "text")
    assert [[hit[name] for name in names] for hit in of_file] == [
        [hit[name] for name in names] for hit in of_set
    ]


def test_a_job_array_makes_the_lists_that_one_call_makes(
    worlds: dict[str, World], evals: Path, tmp_path: Path
) -> None:
    world, one, many = worlds["packed"], tmp_path / "one", tmp_path / "many"
    search(world, evals, one)
    flags = {"against": evals, "text_field": "question", "output": many}
    for shard_id in (2, 0, 1):
        assert not (many / "overlap.jsonl").exists()
        assert world.main("overlap", world.data_dir, shards=shard_id, **flags).code == 0
    assert {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in many.iterdir()
    }


@pytest.mark.processes
def test_a_second_call_looks_into_no_shard_again_but_into_one_that_was_made_anew(
    worlds: dict[str, World], evals: Path, tmp_path: Path
) -> None:
    world, out = worlds["documents"], tmp_path / "out"
    search(world, evals, out)
    before = {path.name: path.stat().st_ino for path in out.glob("shard-*")}
    search(world, evals, out)
    assert before == {path.name: path.stat().st_ino for path in out.glob("shard-*")}
    other = World(tmp_path, raw_dir=world.raw_dir, data_dir=tmp_path / "blanked")
    (tmp_path / "list").write_text("web/3\n")
    words = ("blank", world.data_dir, "--ids", tmp_path / "list", "--output", other.data_dir, "--num_proc", 1)
    assert world.main(*words).code == 0
    search(other, evals, out)
    now = {path.name: path.stat().st_ino for path in out.glob("shard-*")}
    assert [name for name in before if before[name] != now[name]] == ["shard-00000.jsonl"]


def test_a_folder_of_other_settings_or_of_another_evaluation_is_refused(
    worlds: dict[str, World], evals: Path, tmp_path: Path
) -> None:
    world, out = worlds["documents"], tmp_path / "out"
    search(world, evals, out)
    (tmp_path / "quiz.jsonl").write_text(json.dumps({"question": EVALS[0]}))
    for against, options in (
        (evals, {"ngram": 12}),
        (evals, {"rule": "llama"}),
        (tmp_path / "quiz.jsonl", {}),
    ):
        flags = {"against": against, "text_field": "question", "output": out, **options}
        ended = world.main("overlap", world.data_dir, **flags)
        assert (ended.code, type(ended.error)) == (Refused.exit_code, Refused)


@pytest.mark.slow
@pytest.mark.processes
def test_a_kill_at_any_call_of_the_system_leaves_whole_files_and_a_second_call_goes_on(
    worlds: dict[str, World], evals: Path, tmp_path: Path
) -> None:
    world = worlds["packed"]
    search(world, evals, tmp_path / "whole")
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    out, number, was_killed = tmp_path / "out", 1, True
    while was_killed:
        words = ["overlap", world.data_dir, "--against", evals, "--text_field", "question", "--output", out]
        was_killed = killed_at(number, [*map(str, words)]) != 0
        for path in out.iterdir() if out.exists() else ():
            assert path.name.startswith(".") or path.read_bytes() == whole[path.name], number
        number += 3
    assert number > 20
    assert {path.name: path.read_bytes() for path in out.glob("[!.]*")} == whole
    assert not list(out.glob(".shard-*"))


def test_a_damaged_file_of_a_shard_is_refused_with_what_to_type(
    worlds: dict[str, World], evals: Path, tmp_path: Path
) -> None:
    world, out = worlds["documents"], tmp_path / "out"
    search(world, evals, out)
    path = out / "shard-00001.jsonl"
    whole = path.read_bytes()
    for damaged in (b"", b"[]\n", whole.partition(b"\n")[0] + b"\n{}\n", whole + b"no json\n"):
        path.write_bytes(damaged)
        ended = world.main("overlap", world.data_dir, against=evals, text_field="question", output=out)
        assert ended.code == BrokenShard.exit_code
        assert ended.error
        assert ended.error.remedy == f"rm {path}"


def test_the_page_shows_the_texts_and_runs_nothing(worlds: dict[str, World], tmp_path: Path) -> None:
    text = f"<script>alert(1)</script> {EVALS[6]}"
    (tmp_path / "quiz.txt").write_text(text)
    hits = search(worlds["documents"], tmp_path / "quiz.txt", tmp_path / "out", text_field=None)
    page = (tmp_path / "out" / "overlap.html").read_text(encoding="utf-8")
    assert hits[0]["text"][:200] in page
    assert "<script" not in page


@pytest.mark.parametrize(
    ("files", "options", "error"),
    [
        ({}, {"against": "missing"}, NotFound),
        ({"evals/README.md": "nothing that plan takes"}, {}, NotFound),
        ({"evals/a.txt": "\n\n"}, {}, BadInput),
        ({"evals/a.txt": "only a few words"}, {}, BadInput),
        ({"evals/a.jsonl": '{"question": "no text"}'}, {}, BadInput),
        ({}, {"ngram": 1}, UsageError),
        ({}, {"min_share": 1.5}, UsageError),
        ({}, {"shards": "0-9"}, UsageError),
        ({}, {"against": "data", "text_field": "question"}, UsageError),
    ],
)
def test_a_wrong_use_ends_with_its_error_and_writes_nothing(
    worlds: dict[str, World], tmp_path: Path, files: dict[str, str], options: dict[str, Any], error: Any
) -> None:
    world = worlds["documents"]
    for name, text in {"evals/a.txt": EVALS[0], **files}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    if "evals/README.md" in files or "evals/a.jsonl" in files:
        (tmp_path / "evals" / "a.txt").unlink()
    against = options.get("against", "evals")
    flags = {**options, "against": world.data_dir if against == "data" else tmp_path / against}
    ended = world.main("overlap", world.data_dir, output=tmp_path / "out", **flags)
    assert (ended.code, type(ended.error)) == (error.exit_code, error), ended.text
    assert not (tmp_path / "out").exists()


def test_a_shard_that_is_not_made_is_refused_and_the_others_can_be_looked_into(
    evals: Path, tmp_path: Path
) -> None:
    world = World(tmp_path).raw({"a.txt": "\n".join(DOCUMENTS)}).plan(num_shards=2).run(1)
    flags = {"against": evals, "text_field": "question", "output": tmp_path / "out"}
    ended = world.main("overlap", world.data_dir, **flags)
    assert (ended.code, type(ended.error)) == (MissingShard.exit_code, MissingShard)
    assert world.main("overlap", world.data_dir, shards=1, **flags).code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["shard-00001.jsonl"]
