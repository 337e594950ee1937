"""``plan --transform FILE``: a function that is applied to each document and frozen with the plan."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.checkout import ROOT
from tests.children import fork_functions
from tests.documented import examples_of
from tests.input_writers import table_bytes
from tests.plain_reader import plain_records
from tests.world import World

pytestmark = [pytest.mark.long, pytest.mark.processes]  # plan tries a function in a process, too

INPUTS: dict[str, Any] = {
    "a.jsonl": [{"id": str(n), "text": f"line {n}", "lang": "ko" if n % 3 else "en"} for n in range(30)],
    "b.txt": "".join(f"plain {n}\n" for n in range(20)),
}
FUNCTION = """
def transform(record):
    if record.get("lang") == "en":
        return None
    return f"{record['text'].upper()} of {record.input_path} at {record.input_offset}"
"""


def planned(folder: Path, function: str, raw: Any = INPUTS, **options: Any) -> World:
    world = World(folder).raw(raw)
    (folder / "clean.py").write_text(function)
    with pytest.MonkeyPatch.context() as patch:
        fork_functions(patch)
        return world.plan(**{"num_shards": 1, "transform": folder / "clean.py", **options})


def made(folder: Path, function: str, raw: Any = INPUTS, **options: Any) -> World:
    return planned(folder, function, raw, **options).run(transform=folder / "clean.py")


def test_each_document_is_the_return_value_of_the_function(tmp_path: Path) -> None:
    """Manifest and report state its CPU time."""
    function = FUNCTION.replace("return f", "sum(range(200_000))\n    return f")
    world = made(tmp_path, function, num_shards=2, id_field="id").verify()
    assert world.texts() == [
        f"{record.text.upper()} of {name} at {record.offset}"
        for name in INPUTS
        for number, record in enumerate(plain_records(world.raw_dir / name))
        if name == "b.txt" or number % 3
    ]
    assert world.left_out() == {"transform": 10}
    assert len(world.lines("quarantine")) == 10
    assert (world.data_dir / "transform" / "clean.py").read_text() == function
    world.verify(deep=2, transform=tmp_path / "clean.py")
    runs = [manifest["run"] for manifest in world.manifests()]
    assert all(0.01 < run["transform_cpu_s"] <= run["cpu_s"] + 0.01 for run in runs)
    work = json.loads(world.main("report", world.data_dir, "--json").ends(0).out)["work"]
    assert work["transform_cpu_s"] == round(sum(run["transform_cpu_s"] for run in runs), 1)


def test_with_record_chat_the_function_returns_messages_from_fields_of_any_name(tmp_path: Path) -> None:
    function = """
def transform(record):
    return [{"role": "user", "content": record["input"]}, {"role": "assistant", "content": record["place"]}]
"""
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    raw = {"a.jsonl": [{"input": f"ask {n}", "place": f"say {n}"} for n in range(5)]}
    options = {"record": "chat", "seq_len": 1024, "chat_template_file": tmp_path / "chat.jinja"}
    world = made(tmp_path, function, raw, **options)
    shown = re.sub("[⟪⟫]|\n  ", "", world.main("peek", world.data_dir, num=99, chars=0).out)
    assert all(f"user: ask {n}assistant: say {n}" in shown for n in range(5)), shown


# Fields that a name of ours could hide: those that the function once got, attributes, and methods of dicts.
OWN_FIELDS = ("input", "place", "input_path", "input_offset", "record", "items", "__class__")
RECORDS = [{"text": "the text", **{name: f"own {name} {n}" for name in OWN_FIELDS}} for n in range(3)]
ALL_FIELDS = "import json\ndef transform(record): return json.dumps({**record})"


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_the_function_gets_exactly_the_fields_of_the_data_and_the_place_as_attributes(
    tmp_path: Path, form: str
) -> None:
    columns = {name: [record[name] for record in RECORDS] for name in RECORDS[0]}
    raw = {"a.jsonl": RECORDS} if form == "jsonl" else {"a.parquet": table_bytes(columns, "parquet")}
    world = made(tmp_path, ALL_FIELDS, raw)
    assert list(map(json.loads, world.texts())) == RECORDS


def test_a_line_of_text_has_one_field_and_its_place(tmp_path: Path) -> None:
    function = "def transform(record): return f'{dict(record)} {record.input_path} {record.input_offset}'"
    world = made(tmp_path, function, {"sub/a.txt": "one\ntwo\n"}, recursive=True)
    assert world.texts() == ["{'text': 'one'} sub/a.txt 0", "{'text': 'two'} sub/a.txt 4"]


NUMBERED = {"a.txt": "".join(f"line {number}\n" for number in range(300))}
TABLE = {"n": [1, 2, None], "words": [["a", "b"], [], ["c"]], "lang": ["ko", "en", "ko"]}
REASONS = """
from shardprep import LeaveOut
def transform(record):
    number = int(record["text"].split()[1])
    raise LeaveOut(f"score {number}" if number < 5 else "too\\nshort" if number % 2 else "")
"""
# A function, its input, its texts, and the number of documents left out by reason, or the number of reasons.
LEFT: dict[str, tuple[str, dict[str, Any], list[str] | None, Any]] = {
    "rows of tables come with all their columns": (
        "def transform(record): return f\"{record['n']} {record['words']} {record['lang']}\"",
        {"a.parquet": table_bytes(TABLE, "parquet")}, ["1 ['a', 'b'] ko", "2 [] en", "None ['c'] ko"], {},
    ),
    "reasons are counted": (
        REASONS, INPUTS, [],
        {"transform": 19, "transform: too short": 21, **{f"transform: score {n}": 2 for n in range(5)}},
    ),
    "too many reasons are not counted one by one": (
        "import shardprep\ndef transform(record): raise shardprep.LeaveOut(record['text'])", NUMBERED, [], 101
    ),
    "a few failures are within the limit of bad documents": (
        "def transform(record): return str(1 / int(record['text'].split()[1]))", NUMBERED, None,
        {"transform_error": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_what_a_function_leaves_out_is_counted_by_its_reason(tmp_path: Path, case: str) -> None:
    function, raw, texts, reasons = LEFT[case]
    world = made(tmp_path, function, raw)
    left_out = world.left_out()
    assert reasons in (left_out, len(left_out))
    assert texts is None or world.texts() == texts


def test_only_the_function_that_was_planned_runs_and_none_out_of_data(tmp_path: Path) -> None:
    world = planned(tmp_path, FUNCTION, num_shards=2)
    own, other, moved = (tmp_path / name for name in ("clean.py", "other.py", "moved.py"))
    other.write_text(FUNCTION + "\n")
    moved.write_text(FUNCTION)
    (world.data_dir / "transform" / "clean.py").write_text("raise SystemExit(99)\n")
    for options, code in (({}, 2), ({"transform": other}, 78), ({"transform": tmp_path / "none.py"}, 66)):
        world.try_shard(0, **options).ends(code)
    assert not list(world.data_dir.glob("shard-*"))
    world.try_shard(0, transform=moved).ends(0)
    assert world.try_plan(num_shards=2).code == 78
    assert world.try_plan(num_shards=2, transform=other).code == 78
    assert world.try_plan(transform=own, text_field="text", output_dir=tmp_path / "both").code == 2
    without = World(tmp_path / "without").raw(INPUTS).plan(num_shards=1)
    assert without.try_shard(0, transform=own).code == 2


def test_files_that_the_function_reads_must_be_named_and_are_frozen(tmp_path: Path) -> None:
    (tmp_path / "sibling_of_clean.py").write_text("WORD = 'one'\n")
    (tmp_path / "table.txt").write_text("1\n")
    function = """
from pathlib import Path
import sibling_of_clean
TABLE = Path(__file__).with_name("table.txt").read_text().strip()
def transform(record):
    return sibling_of_clean.WORD + TABLE
"""
    (tmp_path / "clean.py").write_text(function)
    world = World(tmp_path).raw(INPUTS)
    function_file, beside = tmp_path / "clean.py", "sibling_of_clean.py,table.txt"
    assert world.try_plan(transform=function_file).code == 2
    world.plan(num_shards=1, transform=function_file, transform_files=beside).run(transform=function_file)
    assert set(world.texts()) == {"one1"}
    (tmp_path / "table.txt").write_text("2\n")
    (world.data_dir / "shard-00000.json").unlink()
    assert world.try_shard(0, transform=function_file).code == 78


# A wrong function -> the exit code of plan, or of the shard if plan accepts it.
WRONG: dict[str, tuple[str, int]] = {
    "is missing": ("", 2),
    "is not a function": ("transform = 3", 2),
    "is a class": ("class transform:\n  def __init__(self, record): pass", 65),
    "is a generator": ("def transform(record):\n  yield record['text']", 65),
    "has a syntax error": ("def transform(record):\n  return (", 2),
    "needs a file to be loaded": ("open('/nowhere/words.txt')\ndef transform(record): return ''", 2),
    "cannot be loaded for now": ("raise OSError(116, 'Stale')\ndef transform(record): return ''", 74),
    "raises at import": ("1/0\ndef transform(record): return ''", 2),
    "ends the program": ("import sys\ndef transform(record): sys.exit(0)", 65),
    "ends the process": ("import os\ndef transform(record): os._exit(0)", 2),
    "depends on the order": ("seen = []\ndef transform(_):\n  seen.append(1)\n  return str(len(seen))", 2),
    "depends on the order of a set": ("def transform(record): return ' '.join(set('abcdefghijklm'))", 2),
    "raises": ("def transform(record):\n  x = 1\n  return record['nothing']", 65),
    "raises StopIteration": ("def transform(record): raise StopIteration", 65),
    "raises an error whose text fails": (
        "class E(Exception):\n  def __str__(self): raise ValueError\ndef transform(record): raise E()", 65
    ),
    "returns bytes": ("def transform(record): return b'a'", 65),
    "returns half of a pair": ("def transform(record): return '\\ud800'", 65),
    "returns more than a document may have": (
        "def transform(record): return 'x' * (65 << 20 if record['text'] == 'line 7' else 1)", 65
    ),
    "leaves out with a reason that is not a text": (
        "from shardprep import LeaveOut\ndef transform(record): raise LeaveOut(3, 4)", 0
    ),
    "panics": ("class Panic(BaseException): pass\ndef transform(record): raise Panic('None')", 65),
    "raises half of a pair": ("def transform(record): raise ValueError('\\udc80')", 65),
    "ends the process when it is loaded": ("import os\nos._exit(0)\ndef transform(record): return 'a'", 2),
    "kills the process": ("import os\ndef transform(record): os.kill(os.getpid(), 9)", 2),
    "starts processes": (
        "import multiprocessing\ndef transform(record): return multiprocessing.Pool(1).apply(str, ('a',))", 65
    ),
    "sets a signal's handler": (
        "import signal\ndef transform(record): return str(signal.signal(signal.SIGALRM, signal.SIG_IGN))", 65
    ),
    "lacks a library": ("def transform(record):\n  import no_such_library", 2),
    "reads a file that is missing": ("def transform(record): return open('/nowhere/words.txt').read()", 74),
    "changes the folder": ("import os\nos.chdir('/')\ndef transform(record): return record['text']", 0),
    "returns a str of its own": ("class S(str): pass\ndef transform(record): return S(record['text'])", 0),
    "changes its record": ("def transform(record):\n  record.clear()\n  return 'a'", 0),
    "returns white space": ("def transform(record): return ' \\n '", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_function_makes_no_shard_and_its_error_is_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    function, code = WRONG[name]
    if name != "depends on the order of a set":  # which differs in a new Python only
        fork_functions(monkeypatch)
    world = World(tmp_path).raw(INPUTS)
    (tmp_path / "clean.py").write_text(function)
    ended = world.try_plan(transform=tmp_path / "clean.py", num_shards=1)
    if ended.code == 0:
        ended = world.try_shard(0, transform=tmp_path / "clean.py")
    ended.ends(code)
    assert not code or not list(world.data_dir.glob("shard-*"))
    if name == "raises":
        assert re.search(r"KeyError.*clean\.py line 3.*a\.jsonl:0", ended.err)


def test_a_passing_error_ends_the_task_and_the_next_one_has_all_documents(tmp_path: Path) -> None:
    function = """
from pathlib import Path
def transform(record):
    if record["text"] == "plain 7" and Path(__file__).with_name("away").exists():
        raise ValueError("no words") from OSError(116, "Stale file handle")
    return record["text"]
"""
    world = planned(tmp_path, function)
    (tmp_path / "away").touch()
    world.try_shard(0, transform=tmp_path / "clean.py").ends(74, "clean.py line 5", "b.txt:")
    assert not list(world.data_dir.glob("shard-*"))
    (tmp_path / "away").unlink()
    world.run(transform=tmp_path / "clean.py").verify()
    assert len(world.texts()) == 50
    assert not world.left_out()


def test_a_named_package_is_copied_for_readers_and_versions_of_libraries_are_in_the_manifest(
    tmp_path: Path,
) -> None:
    """A copy without some documents has the files, too."""
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "__init__.py").write_text("import orjson\n")
    (tmp_path / "rules" / "words.txt").write_text("one\n")
    function = "def transform(record):\n  import rules\n  return record['text']"
    assert (
        planned(tmp_path / "bare", "def transform(record): return 'a'")
        .run(transform=tmp_path / "bare" / "clean.py")
        .manifests()[0]["run"]
        .get("libraries")
        is None
    )
    world, file = planned(tmp_path, function, transform_files="rules", digests=True), tmp_path / "clean.py"
    world.run(transform=file)
    assert [*world.manifests()[0]["run"]["libraries"]] == ["orjson"]
    (tmp_path / "ids.txt").write_text(f"sha256:{hashlib.sha256(b'line 3').hexdigest()}\n")
    new = world.blanked(tmp_path / "ids.txt", tmp_path / "new", transform=file)
    for folder in (world.data_dir, new.data_dir):
        copies = {
            path.relative_to(folder / "transform").as_posix(): path.read_text()
            for path in (folder / "transform").rglob("*.*")
        }
        assert copies == {
            "clean.py": function,
            "rules/__init__.py": "import orjson\n",
            "rules/words.txt": "one\n",
        }
    versions = json.loads(world.main("report", world.data_dir, "--json").ends(0).out)["again"]["versions"]
    assert versions["orjson"] == {orjson.__version__: 1}


def test_a_table_that_changes_while_a_shard_is_made_makes_no_shard(tmp_path: Path) -> None:
    function = """
from pathlib import Path
TABLE = Path(__file__).with_name("table.txt")
def transform(record):
    if record["text"] == "plain 7" and TABLE.with_name("edited").exists():
        TABLE.write_text("two")
    return TABLE.read_text() + record["text"]
"""
    (tmp_path / "table.txt").write_text("one")
    world = planned(tmp_path, function, transform_files="table.txt")
    (tmp_path / "edited").touch()
    world.try_shard(0, transform=tmp_path / "clean.py").ends(78, "table.txt")
    assert not list(world.data_dir.glob("shard-*"))


def test_what_a_function_prints_is_not_in_the_output_of_plan(tmp_path: Path) -> None:
    function = "print('spoiled')\ndef transform(record):\n  print('spoiled')\n  return record['text']"
    World(tmp_path).raw(INPUTS)
    (tmp_path / "clean.py").write_text(function)
    ended = World(tmp_path).try_plan(transform=tmp_path / "clean.py").ends(0)
    assert "spoiled" not in ended.out
    assert "spoiled" in ended.err


def test_limit_counts_only_documents_that_the_function_keeps(tmp_path: Path) -> None:
    texts = ["x" * (number % 10 + 1) for number in range(50)]
    function = "def transform(record):\n  text = record['text']\n  return text if len(text) > 2 else None"
    raw = {"a.jsonl": [{"text": text} for text in texts]}
    world = made(tmp_path, function, raw, num_shards=2, limit=15).verify()
    kept = [text for text in texts if len(text) > 2]
    assert world.texts()[:8] == kept[:8]
    assert len(world.texts()) == 15


def test_run_and_blank_apply_the_function(tmp_path: Path) -> None:
    world, transform = planned(tmp_path, FUNCTION, num_shards=2, id_field="id"), tmp_path / "clean.py"
    world.main("run", world.data_dir, transform=transform, num_proc=2).ends(0)
    (tmp_path / "ids.txt").write_text("1\n")
    new = world.blanked(tmp_path / "ids.txt", tmp_path / "new", transform=transform)
    assert new.texts()[1:] == world.texts()[1:]
    assert new.texts()[0] != world.texts()[0]


def test_the_example_functions_of_the_docs_work(tmp_path: Path) -> None:
    pytest.importorskip("ftfy", exc_type=ImportError)
    raw = {"a.jsonl": [{"text": text} for text in DOCUMENTED]}
    functions = [each for each in examples_of("inputs.md") if "def transform" in each]
    files = [ROOT / "examples" / name for name in ("web_filters.py", "korean_text.py")]
    functions += [file.read_text(encoding="utf-8") for file in files]
    assert len(functions) >= 3
    for number, function in enumerate(functions):
        world = made(tmp_path / str(number), function, raw)
        assert sum(world.left_out().values()) + len(world.texts()) == len(DOCUMENTED)
        assert world.left_out()


DOCUMENTED = [
    "a",
    "한국어로 쓴 글은 그대로 남는다. " * 20,
    "The kettle sings, and it is the one that we have had in the house of them. " * 40,
    "e\u0301 decomposed",
    "ÃƒÂ© was read twice wrongly",
    "buy buy buy buy " * 200,
]
