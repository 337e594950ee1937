"""``plan`` looks at each input: what nothing can be made of is refused by name, and what differs is named."""

from __future__ import annotations

import gzip
import json
import os
import random
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.input_writers import table_bytes
from tests.world import Ended, World, type_in

KOREAN = ["바닷가 마을의 겨울은 길다.", "도서관 창가 자리에서 책을 읽는다.", "오늘은 비가 오고 바람이 분다."]
ENGLISH = ["The kettle sings.", "Nobody is listening.", "Red, green and blue."]
RIGHT = [{"text": text} for text in KOREAN + ENGLISH]
INDENTED = json.dumps({"dataset": {"name": "a"}, "data": RIGHT}, ensure_ascii=False, indent=2)
# A file of which nothing can be made -> words of what is said about it.
WRONG: dict[str, tuple[str, bytes, list[str]]] = {
    "a list": ("w.json", json.dumps(RIGHT, indent=1).encode(), ["one list", "jq -cn 'inputs | .[]'"]),
    "a list in a line": ("w.jsonl", json.dumps(RIGHT).encode(), ["one list", "jq -cn 'inputs | .[]'"]),
    "a compressed list": (
        "w.json.gz",
        gzip.compress(json.dumps(RIGHT).encode()),
        ["zcat", "jq -cn 'inputs | .[]'"],
    ),
    "an object over lines": ("w.json", INDENTED.encode(), ["several lines", "jq -cn 'inputs | .data[]'"]),
    "an object with another field": (
        "w.json",
        json.dumps({"id": 1, "body": "a text"}, indent=1).encode(),
        ["jq -cn 'inputs | .'", "--text_field text,body"],
    ),
    "another field": (
        "w.jsonl",
        b'{"id": 1, "content": "a text"}\n' * 9,
        ["id, content", "--text_field content"],
    ),
    "texts in a list of records in an object": (
        "w.json",
        json.dumps({"data": [{"id": "a", "paragraphs": [{"form": "a text"}]}]}, indent=1).encode(),
        ["jq -cn 'inputs | .data[]'", "--transform FILE", "record['paragraphs']"],
    ),
    "texts in a list": (
        "w.jsonl",
        b'{"id": "of a", "files": [{"code": "def f(): return 1"}, {"code": "x = 2"}]}\n' * 9,
        ["--transform FILE", "record['files']"],
    ),
    "addresses alone": ("w.jsonl", b'{"id": "a3", "url": "http://a.org/b"}\n' * 9, ["--text_field NAME"]),
    "no field": ("w.jsonl", b'{"text": 7}\n' * 9, ["w.jsonl", "a string"]),
    "CP949": ("w.txt", "\n".join(KOREAN * 3).encode("cp949"), ["CP949", "--encoding auto"]),
    "JSON in CP949": (
        "w.jsonl",
        b"".join(json.dumps(each, ensure_ascii=False).encode("cp949") + b"\n" for each in RIGHT[:3] * 3),
        ["CP949", "--encoding auto"],
    ),
    "CP949 in a few lines": (
        "w.txt",
        "\n".join(ENGLISH * 90 + KOREAN).encode("cp949"),
        ["CP949", "--encoding auto"],
    ),
    "another encoding": ("w.txt", "это русский текст\n".encode("koi8-r") * 9, ["neither UTF-8 nor", "iconv"]),
    "a PDF": ("w.txt", b"%PDF-1.7\n%\xe2\xe3\n", ["a PDF document", "pdftotext"]),
    "a zip archive": ("w.jsonl", b"PK\x03\x04\x14\x00\x00\x00" + bytes(90), ["zip archive", "unzip"]),
    "UTF-16": ("w.txt", "a text\n".encode("utf-16") * 9, ["UTF-16", "iconv -f utf-16"]),
    "a gzip file": ("w.txt", gzip.compress(b"a text\n" * 99), ["compressed", ".txt.gz"]),
    "half of a line": ("w.jsonl", b'{"text": "a\n' * 9, ["w.jsonl", "bad_json"]),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_file_of_which_nothing_can_be_made_is_refused_with_what_mends_it(tmp_path: Path, kind: str) -> None:
    name, content, words = WRONG[kind]
    world = World(tmp_path).raw({"right.jsonl": RIGHT, "right.txt": "\n".join(ENGLISH), name: content})
    ended = world.try_plan(dry_run=True).ends(65, name, *words)
    assert "--max_bad_fraction" not in ended.err


def test_a_file_in_utf_8_that_is_planned_as_cp949_is_refused_as_what_it_is(tmp_path: Path) -> None:
    for name, text in (
        ("w.txt", KOREAN[0]),
        ("w.jsonl", json.dumps({"text": KOREAN[0]}, ensure_ascii=False)),
    ):
        world = World(tmp_path / name).raw({name: f"{text}\n" * 9})
        world.try_plan(encoding="cp949", dry_run=True).ends(65, name, "--encoding utf-8")


def remedy_of(ended: Ended) -> str:
    """Return what an error says to type."""
    assert ended.error is not None
    assert ended.error.remedy is not None
    return ended.error.remedy


def test_flags_for_all_files_are_told_at_once(tmp_path: Path) -> None:
    world = World(tmp_path).raw({
        "a.jsonl": [{"text": "a right one"}],
        "b.jsonl": [{"TEXT": "in upper case", "id": 1}],
        "c.parquet": table_bytes({"content": ["of a table", "and another"], "id": ["x", "y"]}, "parquet"),
        "d.csv": "no,body\n1,of a row\n",
        "e.txt": "\n".join(KOREAN * 3).encode("cp949"),
    })  # fmt: skip
    refused = world.try_plan(dry_run=True).ends(65, "b.jsonl", "c.parquet", "d.csv", "e.txt")
    remedy = remedy_of(refused)
    ended = world.main("plan", *world.words_of_plan(num_shards=1), *shlex.split(remedy))
    ended.ends(0, "TEXT 1", "content 2", "body 1", "text 1")
    world.run(0)
    others = ["a right one", "in upper case", "of a table", "and another", "of a row"]
    assert sorted(world.texts()) == sorted(others + KOREAN * 3)


def test_flags_for_all_files_keep_the_field_of_files_with_another_fault(tmp_path: Path) -> None:
    lines = b"".join(json.dumps(each, ensure_ascii=False).encode("cp949") + b"\n" for each in RIGHT[:3] * 3)
    others = {"b.jsonl": [{"content": "a line"}]}
    for name, content in (("a.jsonl", lines), ("a.json", json.dumps(RIGHT).encode())):
        world = World(tmp_path / name).raw({name: content, **others})
        world.try_plan(dry_run=True).ends(65, "--text_field text,content")


@pytest.mark.processes
@pytest.mark.parametrize("encoding", ["utf-8-sig", "cp949"])
def test_one_command_makes_lines_of_all_objects(tmp_path: Path, encoding: str) -> None:
    if not shutil.which("jq"):
        pytest.skip("jq is not installed")
    texts = [f"{text} {number}" for number, text in enumerate(KOREAN * 4)]
    files: dict[str, Any] = {"a.txt": "right"}
    for number in range(6):
        records = [{"text": text} for text in texts[2 * number : 2 * number + 2]]
        content = json.dumps({"name": "a", "data": records}, ensure_ascii=False, indent=2)
        files[f"it's here/{number}.json"] = content.encode(encoding)
    world = World(tmp_path).raw(files)
    refused = world.try_plan(num_shards=1, recursive=True).ends(65, "0.json", "5.json")
    assert "--also" not in paste(refused).ends(0).text
    assert world.run(0).texts() == ["right", *texts]


@pytest.mark.processes
def test_what_a_refusal_says_to_type_mends_all_files_and_plans(tmp_path: Path) -> None:
    if not shutil.which("jq"):
        pytest.skip("jq is not installed")
    world = World(tmp_path).raw({
        "a.json": json.dumps({"my text": "a text"}, indent=1),
        "b.json": json.dumps({"data": [{"body": "a body"}]}, indent=1),
        "c.jsonl": [{"content": "a line"}],
        "d.txt": "\n".join(KOREAN * 3).encode("cp949"),
    })  # fmt: skip
    paste(world.try_plan(num_shards=1)).ends(0)
    assert sorted(world.run(0).texts()) == sorted(["a text", "a body", "a line", *KOREAN * 3])


@pytest.mark.processes
@pytest.mark.parametrize("broken", [b"7", b'[{"text": "a', b"\xff"])
def test_what_mends_files_leaves_all_as_they_were_if_one_of_them_fails(tmp_path: Path, broken: bytes) -> None:
    if not shutil.which("jq"):
        pytest.skip("jq is not installed")
    files: dict[str, Any] = {f"-{name}.json": json.dumps(RIGHT).encode("cp949") for name in "a'\n"}
    world = World(tmp_path).raw(files)
    mending, _, _ = remedy_of(world.try_plan(num_shards=1).ends(65)).rpartition(" && ")
    place = world.raw_dir / "-'.json"
    place.write_bytes(broken)
    assert subprocess.run(["bash", "-c", mending], check=False, capture_output=True).returncode
    assert {path.name for path in world.raw_dir.iterdir()} - files.keys() <= {"objects.jsonl.part"}
    place.write_bytes(files[place.name])
    subprocess.run(["bash", "-c", mending], check=True)
    assert sorted(path.name for path in world.raw_dir.iterdir()) == sorted(
        [*(f"{name}.whole" for name in files), "objects.jsonl"]
    )
    assert len((world.raw_dir / "objects.jsonl").read_text().splitlines()) == len(RIGHT) * 3


def paste(refused: Ended) -> Ended:
    """Type what an error says to type, in a shell, but for the ``plan`` at its end."""
    mending, _, planning = remedy_of(refused).rpartition(" && ")
    subprocess.run(["bash", "-c", mending], check=True)
    return type_in(planning)


@pytest.mark.parametrize("seed", range(30))
def test_wrong_files_among_right_ones_are_each_named(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    files: dict[str, Any] = {f"{number}.jsonl": RIGHT for number in range(rng.randrange(1, 9))}
    files["a.parquet"] = table_bytes(RIGHT, "parquet")
    files["t.txt"] = "\n".join(KOREAN)
    wrong = rng.sample([*WRONG], rng.randrange(1, 5))
    names = [f"{place}-{WRONG[kind][0]}" for place, kind in enumerate(wrong)]
    for name, kind in zip(names, wrong, strict=True):
        files[name] = WRONG[kind][1]
    World(tmp_path).raw(files).try_plan(dry_run=True).ends(65, *names)


def test_auto_reads_utf_8_and_cp949_and_guesses_nothing_else(tmp_path: Path) -> None:
    texts = [f"{text} {number}" for number, text in enumerate(KOREAN * 4)]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    world = World(tmp_path).raw({
        "a.txt": "\n".join(texts).encode("cp949"),
        "b.txt": "\n".join(texts).encode(),
        "c.jsonl": "\n".join(lines).encode("cp949"),
        "d.jsonl.gz": gzip.compress("\n".join(lines).encode("cp949")),
        "e.txt": "\n".join(ENGLISH),
    })  # fmt: skip
    ended = world.try_plan(encoding="auto", dry_run=True).ends(0, "CP949 in 3 files")
    assert "warning" not in ended.text
    world.make(encoding="auto", num_shards=3).verify(deep=True)
    assert sorted(world.texts()) == sorted(texts * 4 + ENGLISH)
    for name, codec in (("fr", "latin-1"), ("ja", "euc_jp"), ("zh", "gbk"), ("ru", "cp1251")):
        text = {
            "fr": "été à Noël, déjà vu\n",
            "ja": "これは日本語の文章です\n",
            "zh": "这是一个中文句子\n",
        }.get(name)
        raw = {f"{name}.txt": (text or "это русский текст\n").encode(codec) * 30, "right.txt": "right\n"}
        World(tmp_path / name).raw(raw).try_plan(encoding="auto").ends(65, f"{name}.txt", "latin-1")
    mixed = (KOREAN[0] + "\n").encode() * 20 + (KOREAN[1] + "\n").encode("cp949") * 20
    World(tmp_path / "mixed").raw({"m.txt": mixed}).try_plan(encoding="auto").ends(65, "m.txt", "not clear")


def test_encodings_are_named_by_patterns(tmp_path: Path) -> None:
    world = World(tmp_path).raw(
        {"ko/a.txt": KOREAN[0].encode("cp949"), "b.txt": KOREAN[1], "c.log": b"caf\xe9"}
    )
    options = {"encoding": "ko/*=cp949,*.log=latin-1,utf-8", "also": "*.log", "recursive": True}
    assert world.make(num_shards=1, **options).texts() == [KOREAN[1], "café", KOREAN[0]]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_byte_order_mark_that_stands_first_is_dropped_by_plan(tmp_path: Path, name: str) -> None:
    content = KOREAN[0] if name == "a.txt" else json.dumps({"text": KOREAN[0]})
    world = World(tmp_path).raw({name: b"\xef\xbb\xbf" + content.encode() + b"\n"})
    assert world.make(num_shards=1).texts() == [KOREAN[0]]


def test_a_shard_without_a_plan_has_the_first_line_as_python_reads_it(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": b"\xef\xbb\xbf" + KOREAN[0].encode() + b"\n"})
    words = {"input_dir": world.raw_dir, "output_dir": world.data_dir, "model_id": world.tokenizer}
    world.main("shard", shard_id=0, **words).ends(0)
    assert world.texts() == ["\ufeff" + KOREAN[0]]


def test_the_first_of_several_fields_that_a_record_has_is_its_text(tmp_path: Path) -> None:
    lines = [
        {"text": "a"},
        {"TEXT": "b"},
        {"text": None, "TEXT": "c"},
        {"TEXT": "d", "text": "e"},
        {"x": "f"},
    ]
    table = pyarrow.table({"text": pyarrow.array([None, "h"], pyarrow.string()), "content": ["i", "j"]})
    world = World(tmp_path).raw({
        "a.jsonl": lines,
        "b.jsonl": [{"TEXT": f"k{number}"} for number in range(9)],
        "c.parquet": table_bytes(table, "parquet"),
        "d.parquet": table_bytes({"content": ["m"]}, "parquet"),
        "p.jsonl": [{"text": "no", "plain_text": "n"}],
    })  # fmt: skip
    fields = "text,TEXT,content,p.jsonl:plain_text"
    told = world.try_plan(num_shards=1, text_field=fields, max_bad_fraction=0.5, json=True).ends(0)
    assert any("TEXT 11" in note for note in json.loads(told.out)["notes"])
    world.run(0)
    assert world.texts() == ["a", "b", "c", "e", *(f"k{n}" for n in range(9)), "i", "h", "m", "n"]
    counts = json.loads((world.data_dir / "shard-00000.json").read_bytes())["counts"]
    assert counts["num_of_field"] == {"TEXT": 11, "content": 2, "plain_text": 1, "text": 3}
    world.main("report", world.data_dir, "--json").ends(0)
    (left_out,) = world.lines("quarantine")
    assert (left_out["line"], left_out["reason"]) == (4, "no_field")


def test_a_file_with_other_fields_than_its_neighbours_is_named(tmp_path: Path) -> None:
    right = {f"{number}.jsonl": [{"text": "a", "id": 1, "url": "u"}] for number in range(5)}
    world = World(tmp_path).raw(
        {**right, "odd.jsonl": [{"text": "b", "prompt": "c", "score": 1, "lang": "d"}]}
    )
    (line,) = [line for line in world.try_plan().ends(0).text.splitlines() if "odd.jsonl" in line]
    assert "prompt" in line


PROSE = ["One line\nand another one.", "바닷가 마을의\n겨울은 길다.", "The third", "four\n  five"]


@pytest.mark.parametrize("num_shards", [1, 3, 7])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_paragraphs_and_texts_between_separators_are_documents(
    tmp_path: Path, end: str, num_shards: int
) -> None:
    texts = [f"{text} {number}" for number, text in enumerate(PROSE * 9)]
    blank = "\n \t\n\n".join(texts).replace("\n", end)
    world = World(tmp_path / "a").raw({"a.txt": end + blank + end, "b.txt.gz": gzip.compress(blank.encode())})
    world.make(num_shards=num_shards, doc="paragraph").verify(deep=True)
    assert world.texts() == texts * 2
    marked = "<|endoftext|>\n".join(texts).replace("\n", end)
    world = World(tmp_path / "b").raw({"a.txt": marked, "b.txt": marked.encode("cp949")})
    world.make(num_shards=num_shards, separator="<|endoftext|>", encoding="auto").verify(deep=True)
    assert world.texts() == texts * 2
    begins = [byte for _, byte, *_ in world.plan_json()["cuts"][1:-1] if byte]
    assert begins or num_shards == 1
    World(tmp_path / "c").raw({"a.txt": marked}).try_plan().ends(0, "--separator")
    World(tmp_path / "d").raw({"a.txt": "a\n"}).try_plan(doc="file", separator="x").ends(2)


def test_prose_with_lines_that_go_on_is_told_once(tmp_path: Path) -> None:
    words = ("the kettle sings and nobody is listening to a store of red, " * 40).split()
    rng = random.Random(0)
    paragraphs = []
    for _ in range(6):
        rng.shuffle(words)
        lines = [" ".join(words[first : first + 12]) for first in range(0, 120, 12)]
        paragraphs.append("\n".join(lines) + ".")
    text = "\n\n".join(paragraphs)
    said = World(tmp_path / "a").raw({"a.txt": text, "b.txt": text}).try_plan().ends(0).text
    assert said.count("--doc paragraph") == 1
    others = World(tmp_path / "b").raw({"a.txt": "\n".join(ENGLISH * 30)}).try_plan().ends(0).text
    assert "--doc paragraph" not in others


def test_plan_prints_short_lines_or_json(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "\n".join(ENGLISH * 9), "b.jsonl": RIGHT})
    lines = world.try_plan(dry_run=True, num_shards=2).ends(0).out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["inputs:", "plan", "about"]
    assert max(map(len, lines[:3])) <= 80
    (line,) = world.try_plan(num_shards=2, json=True).ends(0).out.splitlines()
    told = json.loads(line)
    assert (told["num_inputs"], told["num_shards"]) == (2, 2)
    assert told["plan_id"] == world.plan_json()["plan_id"]


def test_many_small_shards_are_told(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "a line\n" * 5000})
    world.try_plan(dry_run=True, num_shards=1000).ends(0, "--num_shards 1?")
    assert "--num_shards 1?" not in world.try_plan(dry_run=True, num_shards=9).ends(0).text


def test_a_line_longer_than_what_plan_looks_at_is_not_refused(tmp_path: Path) -> None:
    line = json.dumps({"other": "x" * 3_000_000, "text": "a text"}) + "\n"
    World(tmp_path).raw({"a.jsonl": line * 2}).try_plan(dry_run=True).ends(0)


def test_plan_asks_for_the_status_of_an_input_when_it_is_opened_and_after_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []  # lists, because appending by several threads loses nothing
    asked: list[str] = []
    real_open = os.open
    real_fstat = os.fstat

    def noted_open(path: Any, *rest: Any, **named: Any) -> int:
        opened.append(Path(path).name)
        return real_open(path, *rest, **named)

    def noted_fstat(handle: int) -> os.stat_result:
        asked.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        return real_fstat(handle)

    world = World(tmp_path).raw({f"raw-{number}.txt": "\n".join(ENGLISH) for number in range(9)})
    monkeypatch.setattr(os, "open", noted_open)
    monkeypatch.setattr(os, "fstat", noted_fstat)
    world.try_plan(dry_run=True, num_shards=3).ends(0)
    for number in range(9):
        name = f"raw-{number}.txt"
        assert 1 <= opened.count(name) <= asked.count(name) <= 2 * opened.count(name)
