"""``overlap`` finds what a brute-force search finds, and ``duplicates`` what a dict of all texts finds."""

from __future__ import annotations

import hashlib
import json
import multiprocessing.util
import random
import shlex
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tokenizers import Tokenizer

from shardprep.errors import BrokenShard, NotFound, Refused, UsageError
from tests.forged import rewrite_json
from tests.plain_reader import plain_records
from tests.world import Ended, World, call_main, tokenizer_dir

pytestmark = pytest.mark.long

FORMS: dict[str, dict[str, Any]] = {
    "documents": {"id_field": "id"},
    "digests": {"token_format": "npy", "digests": True, "id_field": "id"},
    "packed": {"record": "packed", "seq_len": 64},
    "best_fit": {"record": "packed", "seq_len": 64, "pack": "best_fit", "validation_fraction": 0.3},
}
# n, unit, number of units that may differ, and minimum share: taken from the papers, not from the product.
RULES = {"gpt3": (13, "words", 0, 0.0), "palm": (8, "tokens", 0, 0.7), "llama": (10, "tokens", 4, 0.0)}
TOKENIZER = Tokenizer.from_file(str(tokenizer_dir() / "tokenizer.json"))
_CHOOSER = random.Random(1)
_LATIN = ["".join(_CHOOSER.choices("aeioubdgklmnprstvz", k=2 + n % 7)) for n in range(3000)]
_NOUNS = ["".join(chr(_CHOOSER.randrange(0xAC00, 0xD7A4)) for _ in range(2)) for _ in range(3000)]
_ENDS = {True: (("", ""), ("", ","), ("", ".")), False: (("은", "이"), ("을", "도"), ("에서", "에는"))}
Worlds = dict[str, World]
Words = list[tuple[str, tuple[str, str]]]  # a word, and its ending in one text and in another


def drawn(chooser: random.Random, num_words: int, *, is_english: bool = True) -> Words:
    words = _LATIN if is_english else _NOUNS
    return [(chooser.choice(words), chooser.choice(_ENDS[is_english])) for _ in range(num_words)]


def spelled(words: Words, changed: Sequence[int] = ()) -> str:
    return " ".join(word + ends[number in changed] for number, (word, ends) in enumerate(words))


def planted() -> tuple[list[str], list[str]]:
    """Return texts of an evaluation, and documents, some of which contain such a text or a variant of it."""
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
            spelled(drawn(chooser, 150)) + " " + text,  # spans several rows
        ][number % 6]
        evals.append(text)
        documents.append(f"{spelled(drawn(chooser, 9))} {changed} {spelled(drawn(chooser, 8))}")
    documents.append(documents[-1])  # a copy, which must be found, too
    documents += [spelled(drawn(chooser, 30, is_english=False)) for _ in range(20)]
    chooser.shuffle(documents)
    return [*evals, "too short"], documents


EVALS, DOCUMENTS = planted()


@pytest.fixture(scope="module")
def evals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    world = World(tmp_path_factory.mktemp("evals"))
    return world.raw({"quiz.jsonl": [{"question": text} for text in EVALS]}).raw_dir


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


def units_of(text: str, unit: str) -> list[Any]:
    if unit == "tokens":
        return list(TOKENIZER.encode(text, add_special_tokens=False).ids)
    letters = []
    for char in unicodedata.normalize("NFKC", text).casefold():
        kind = unicodedata.category(char)
        letters.append(char if kind[0] in "LMN" else " " if char.isspace() else "")
    return "".join(letters).split()


def compared(ours: list[Any], theirs: list[Any], rule: str) -> tuple[int, float]:
    """Return the longest shared run and the share of ``theirs`` that is shared, by comparing all places."""
    ngram, _, num_gaps, _ = RULES[rule]
    places = defaultdict[tuple[Any, ...], list[int]](list)
    for j in range(len(theirs) - ngram + 1):
        places[tuple(theirs[j : j + ngram])].append(j)
    equal_places = []
    for i in range(len(ours) - ngram + 1):
        equal_places += [(i, j) for j in places.get(tuple(ours[i : i + ngram]), [])]
    longest, held = 0, set[int]()
    for i, j in equal_places:
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
    """Rule -> (digest of a document, text of an evaluation) -> (longest run, share) by brute force."""
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
def test_overlap_finds_exactly_the_pairs_that_brute_force_finds(
    worlds: Worlds, evals: Path, tmp_path: Path, expected: Any, form: str, rule: str
) -> None:
    hits = search(worlds[form], evals, tmp_path / "out", rule=rule)
    quizzes = plain_records(evals / "quiz.jsonl", text_field="question")
    quiz_of = {f"quiz.jsonl:{quiz.offset}": quiz.text for quiz in quizzes}
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
    assert set(names) == {f"sha256:{hit['sha256']}" for hit in hits}, "the input of --exclude and blank"
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


def test_an_evaluation_may_be_a_data_set(worlds: Worlds, evals: Path, tmp_path: Path) -> None:
    quiz = World(tmp_path).raw({"quiz.txt": "\n".join(EVALS)}).make(num_shards=2, record="packed", seq_len=32)
    of_file = search(worlds["packed"], evals, tmp_path / "a")
    of_set = search(worlds["packed"], quiz.data_dir, tmp_path / "b", text_field=None)
    assert of_file
    assert [{**hit, "eval": ""} for hit in of_file] == [{**hit, "eval": ""} for hit in of_set]


def test_arrays_and_later_calls_make_only_missing_lists(worlds: Worlds, evals: Path, tmp_path: Path) -> None:
    world, one, many = worlds["documents"], tmp_path / "one", tmp_path / "many"
    hits = search(world, evals, one)
    for shard_id in (2, 0, 1):
        assert not (many / "overlap.jsonl").exists()
        assert overlap(world, evals, many, shards=shard_id).code == 0
    lines_of = [
        {path.name: sorted(path.read_bytes().split(b"\n")) for path in out.iterdir()} for out in (one, many)
    ]
    assert lines_of[0] == lines_of[1], "equal but for the order of the record"
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


def test_the_hits_of_a_shard_that_were_altered_are_found_again(
    worlds: Worlds, evals: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    hits = search(worlds["documents"], evals, out)
    path = next(out.glob("shard-00001.*"))
    whole = path.read_bytes()
    for altered in (b"", whole[:-9], whole.replace(b"a", b"e", 1)):
        path.write_bytes(altered)
        assert search(worlds["documents"], evals, out) == hits
        assert path.read_bytes() == whole


def test_hits_that_are_forged_with_their_record_are_refused_with_a_remedy(
    worlds: Worlds, evals: Path, tmp_path: Path
) -> None:
    search(worlds["documents"], evals, tmp_path / "out")
    path = next((tmp_path / "out").glob("shard-00001.*"))
    record = tmp_path / "out" / "written.jsonl"
    whole = path.read_bytes()
    hit = json.loads(whole.partition(b"\n")[0])
    changes: list[dict[str, Any]] = [
        {"share": "1"}, {"share": None}, {"longest": []}, {"text": 5}, {"document": 5}, {"eval": {}},
        {"sha256": f"{hit['sha256']}\nat:a.txt:0"},  # another line in the list
    ]  # fmt: skip
    other_values = [{**hit, **change} for change in changes]
    without_share = {name: value for name, value in hit.items() if name != "share"}
    forged = [json.dumps(each).encode() + b"\n" for each in (*other_values, without_share)]
    deep = b"[" * 100_000 + b"]" * 100_000 + b"\n"
    for damaged in (b"[]\n", b"{}\n", whole + b"no json\n", whole[:-9], deep, *forged):
        path.write_bytes(damaged)
        stamp = {"num_bytes": len(damaged), "sha256": hashlib.sha256(damaged).hexdigest()}
        with record.open("a") as file:
            file.write(json.dumps({"name": path.name, **stamp}) + "\n")
        error = overlap(worlds["documents"], evals, tmp_path / "out").error
        assert (type(error), error and error.remedy) == (BrokenShard, f"mv {path} {path}.damaged")


def test_overlap_needs_only_a_plan_and_refuses_changed_inputs(evals: Path, tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "\n".join(DOCUMENTS).replace("\t", " ")}).plan(num_shards=2)
    assert len(search(world, evals, tmp_path / "out")) > 30
    (world.raw_dir / "a.txt").write_text("another text")
    assert type(overlap(world, evals, tmp_path / "again").error) is Refused


@pytest.mark.processes  # plan tries the function in a process
def test_overlap_compares_texts_after_the_plans_transform(evals: Path, tmp_path: Path) -> None:
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


def test_the_summary_counts_documents_by_source_and_the_page_escapes_html(tmp_path: Path) -> None:
    text, others = f"<script>alert(1)</script> {EVALS[1]}", "\n".join(DOCUMENTS[:9])
    (tmp_path / "quiz.txt").write_text(text)
    world = World(tmp_path).raw({"web/a.txt": f"{text}\n{text}", "code/b.txt": text, "c/d.txt": others})
    options = {"against": tmp_path / "quiz.txt", "rule": "llama"}  # this rule shows texts unchanged
    out = world.plan(recursive=True).main("overlap", world.data_dir, **options).out
    found = [line.split()[:2] for line in out.splitlines() if line.startswith("  ")]
    assert found == [["web:", "2"], ["code:", "1"]]
    page = (world.data_dir / "overlap" / "overlap.html").read_text(encoding="utf-8")
    assert ("alert(1)&lt;/script&gt;" in page, "</script" in page) == (True, False)


COPY_FORMS: dict[str, dict[str, Any]] = {
    "documents": {"digests": True},
    "concat": {"digests": True, "record": "packed", "seq_len": 16},
    "best fit": {"digests": True, "record": "packed", "seq_len": 16, "pack": "best_fit"},
    "sides": {"validation_fraction": 0.3, "record": "packed", "seq_len": 16},
}
Place = tuple[str, int]  # input, byte


def texts_of(seed: int, count: int) -> list[str]:
    """Return texts, a third of which occur again, some also with other seeds; some fill several rows."""
    draw = random.Random(seed)
    unique = [f"{seed} {number} " + "and some words " * draw.choice([1, 3, 20]) for number in range(count)]
    common = [f"a common text {number} " * (8 if number % 3 else 1) for number in range(9)]
    texts = unique + draw.choices(common, k=count // 3) + draw.sample(unique, count // 6)
    draw.shuffle(texts)
    return [text.strip() for text in texts]


def with_copies(folder: Path, seed: int, **options: Any) -> tuple[World, list[tuple[Place, str]]]:
    """Make a data set of two source folders. Returns it and its (place, text) in the order of its inputs."""
    files = {"a/one.jsonl": texts_of(seed, 60), "b/two.jsonl": texts_of(seed + 1, 40), "b/empty.jsonl": []}
    world = World(folder).raw({name: [{"text": text} for text in texts] for name, texts in files.items()})
    world.make(num_shards=5, recursive=True, **options)
    documents = [
        ((name, each.offset), each.text)
        for name in sorted(files)
        for each in plain_records(world.raw_dir / name)
    ]
    return world, documents


def copies_in(sets: list[list[tuple[Place, str]]]) -> list[list[Place]]:
    """Return the duplicates of each data set: all but the first of equal texts."""
    seen = set[str]()
    duplicates: list[list[Place]] = []
    for documents in sets:
        duplicates.append([])
        for place, text in documents:
            if text in seen:
                duplicates[-1].append(place)
            seen.add(text)
    return duplicates


def find_copies(*words: object) -> tuple[dict[str, Any], list[list[Place]]]:
    """Run ``duplicates``, and return its JSON and the places in the list of each data set."""
    ended = call_main("duplicates", *words, "--json").ends(0)
    answer, lists = json.loads(ended.out), []
    for each in answer["data_sets"]:
        lines = [line.removeprefix("at:") for line in Path(each["list"]).read_text().splitlines()]
        lists.append([(name, int(byte)) for name, _, byte in (line.rpartition(":") for line in lines)])
    return answer, lists


@pytest.mark.slow
@pytest.mark.parametrize("form", COPY_FORMS)
def test_duplicates_lists_all_copies_except_the_first(tmp_path: Path, form: str) -> None:
    """Across shards and data sets, of which the first one keeps its copy. A plan without them has none."""
    both = [with_copies(tmp_path / str(seed), seed, **COPY_FORMS[form]) for seed in (0, 1)]
    for sets in (both[::-1], both):
        duplicates = copies_in([documents for _, documents in sets])
        folders = [world.data_dir for world, _ in sets]
        answer, lists = find_copies(*folders, "--output", tmp_path / "names.txt")
        assert list(map(sorted, lists)) == list(map(sorted, duplicates))
        counts = [dict(Counter(name.partition("/")[0] for name, _ in places)) for places in duplicates]
        assert [each["sources"] for each in answer["data_sets"]] == counts
    counted = Counter(text for _, documents in both for _, text in documents)
    assert answer["num_documents"] == counted.total()
    assert answer["num_groups"] == sum(count > 1 for count in counted.values())
    assert answer["num_duplicates"] == counted.total() - len(counted) > 50
    for (world, _), data_set, places in zip(both, answer["data_sets"], duplicates, strict=True):
        fresh = World(world.data_dir.with_name("fresh"), raw_dir=world.raw_dir)
        fresh.make(num_shards=2, recursive=True, exclude=data_set["list"], **COPY_FORMS[form])
        assert fresh.left_out()["excluded"] == len(places)
        answer, lists = find_copies(fresh.data_dir, "--output", tmp_path / "none.txt")
        assert (answer["num_duplicates"], lists) == (0, [[]])


@pytest.mark.parametrize("form", ["documents", "concat"])
def test_duplicates_ignores_blanked_documents_and_finds_moved_inputs(tmp_path: Path, form: str) -> None:
    world, documents = with_copies(tmp_path, 0, **COPY_FORMS[form])
    counts = Counter(text for _, text in documents)
    first = next(place for place, text in documents if counts[text] > 2)
    names = tmp_path / "names.txt"
    names.write_text(f"at:{first[0]}:{first[1]}\n")
    new = world.blanked(names, tmp_path / "new")
    (tmp_path / "raw").rename(tmp_path / "moved")
    _, (places,) = find_copies(new.data_dir, "--output", names, "--input_dir", tmp_path / "moved")
    assert places == copies_in([[each for each in documents if each[0] != first]])[0]
    newer = new.blanked(names, tmp_path / "newer", input_dir=tmp_path / "moved")
    answer, _ = find_copies(newer.data_dir, "--output", names)
    assert (answer["num_duplicates"], answer["num_documents"]) == (0, len(counts))


@pytest.mark.processes  # plan tries a function in a process
def test_data_sets_with_other_functions_and_moved_inputs_are_compared(tmp_path: Path) -> None:
    """The flags are repeated, in any order. The inputs have one name and size, the helpers one name."""
    text, worlds, moved, functions = EVALS[1], list[World](), list[Any](), list[Any]()
    for name, mark in (("a", "#"), ("b", "_"), ("c", "")):
        folder = tmp_path / name
        world = World(folder).raw({"x.jsonl": [{"text": f"{mark}{text}"}, {"text": f"{mark}own {name}"}]})
        options: dict[str, Any] = {}
        if mark:
            function = "import helpers\ndef transform(record): return record['text'].strip(helpers.MARK)"
            function += "\nprint('not in the JSON')"
            (folder / "clean.py").write_text(function)
            (folder / "helpers.py").write_text(f"MARK = {mark!r}")
            options["transform"] = folder / "clean.py"
            functions += ["--transform", options["transform"]]
        files = {"transform_files": "helpers.py"} if mark else {}
        worlds.append(world.plan(num_shards=1, digests=True, **files, **options).run(**options))
        world.raw_dir.rename(folder / "moved")
        moved[:0] = ["--input_dir", folder / "moved"]
    folders = [world.data_dir for world in worlds]
    names = ["--output", tmp_path / "names.txt"]
    for order in (functions, [*functions[2:], *functions[:2]]):
        assert list(map(len, find_copies(*folders, *names, *moved, *order)[1])) == [0, 1, 1]
    for data_dir, other in (folders[:2], folders[1::-1]):
        out = tmp_path / f"overlap of {data_dir.parent.name}"
        words = ["overlap", data_dir, "--against", other, "--output", out, *moved[2:], *functions]
        call_main(*words).ends(0)
        assert len((out / "overlap.jsonl").read_text().splitlines()) == 1
    # The command that comes next works as it is printed.
    printed = call_main("duplicates", *folders, *names, *moved, *functions).out
    (blank,) = (
        line.partition("shardprep ")[2].partition("  # ")[0]
        for line in printed.split("\n")
        if f"blank {folders[1]} " in line
    )
    new = tmp_path / "new"
    with mock.patch.object(multiprocessing.util, "spawnv_passfds", side_effect=BlockingIOError):
        assert "--transform" not in call_main(*shlex.split(blank.replace("NEW", str(new)))).err
    assert (new / "transform" / "clean.py").exists()
    # A data set whose function or folder is not among them is named, and so is a flag too many.
    duplicates = ["duplicates", *folders, *names]
    call_main(*duplicates, *moved).ends(2, folders[0], "--transform")
    call_main(*duplicates, *moved, *functions[:2]).ends(78, folders[1], "--transform")
    call_main(*duplicates, *moved[2:], *functions).ends(66, folders[2], "--input_dir")
    (tmp_path / "other.py").write_text("def transform(record): return None")
    call_main(*duplicates, *moved, *functions, "--transform", tmp_path / "other.py").ends(2, "other.py")
    call_main(*duplicates, *moved, *functions, "--input_dir", tmp_path).ends(2, f"--input_dir {tmp_path}")


def test_duplicates_refuses_unsuitable_data_sets_and_leaves_no_list(tmp_path: Path) -> None:
    world, _ = with_copies(tmp_path / "a", 0, digests=True)
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


@pytest.mark.parametrize("digests", [(0, 0), (0, 1), (0, 1 << 64), (0, 1 << 127)])
def test_duplicates_compares_whole_digests(tmp_path: Path, digests: tuple[int, int]) -> None:
    """Two digests are replaced by similar or equal ones. Equal ones of different texts are refused."""
    world, documents = with_copies(tmp_path, 0, digests=True)
    counts = Counter(text for _, text in documents)
    path, found = world.data_dir / "digests" / "shard-00000.digests", world.digests()
    found = found[: path.stat().st_size // 16]
    alone = [number for number in range(len(found)) if counts[documents[number][1]] == 1]
    for number, digest in zip(alone, digests, strict=False):
        found[number] = (digest + 5).to_bytes(16, "big")
    path.write_bytes(b"".join(found))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    rewrite_json(world.data_dir / "shard-00000.json", **{"digests.sha256": sha256})
    if digests == (0, 0):
        ended = call_main("duplicates", world.data_dir, "--output", tmp_path / "names.txt")
        assert (ended.code, type(ended.error)) == (78, Refused)
        assert not (tmp_path / "names.txt").exists()
    else:
        assert find_copies(world.data_dir, "--output", tmp_path / "names.txt")[1] == copies_in([documents])


@pytest.mark.parametrize("has_target", [True, False])
def test_duplicates_replaces_no_link_at_the_lists_name(tmp_path: Path, has_target: bool) -> None:
    """Neither does it read what the link leads to."""
    world = World(tmp_path / "a").raw({"a.txt": "one\none\n"}).plan(num_shards=1, digests=True).run()
    listed, target = tmp_path / "listed", tmp_path / "target"
    if has_target:
        target.write_bytes(b"at:a.txt:0\n")
    listed.symlink_to(target)
    world.main("duplicates", world.data_dir, "--output", listed).ends(65, listed)
    assert listed.is_symlink()
    assert target.exists() == has_target
