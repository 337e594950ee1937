"""The recipes of docs/architecture.md, followed by the files that they list, in a copy of the packages."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.children import environ_of_children, run_child
from tests.world import World, call_main

PACKAGES = ("shardprep", "preprocess", "loader", "slurm", "lustre")
# Runs commands one after the other.
DRIVER = """
import json, sys
from shardprep.__main__ import main
for words in json.load(sys.stdin):
    print("=====")
    code = main(words)
    assert code == 0, (code, words)
"""


class Copy:
    """A copy of the packages, to be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "copy"
        for name in PACKAGES:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, self.folder / name, ignore=ignored)

    def change(self, path: str, old: str, new: str) -> None:
        text = (self.folder / path).read_text(encoding="utf-8")
        assert text.count(old) == 1, (path, old)
        (self.folder / path).write_text(text.replace(old, new), encoding="utf-8")

    def run(self, *commands: Sequence[object]) -> list[str]:
        """Run commands in one process, each to its good end; what each printed on standard output."""
        asked = json.dumps([[str(word) for word in words] for words in commands])
        environ = {**environ_of_children(), "PYTHONPATH": str(self.folder)}
        done = run_child([sys.executable, "-c", DRIVER], stdin=asked, cwd=self.folder, env=environ)
        return done.stdout.split("=====\n")[1:]


def made(world: World, data: Path, num_shards: int, *flags: str) -> list[list[object]]:
    """The commands that plan a data set, make its shards and verify it."""
    plan: list[object] = ["plan", *world.words_of_plan(output_dir=data, num_shards=num_shards), *flags]
    shards = [["shard", "--shard_id", number, "--output_dir", data] for number in range(num_shards)]
    return [plan, *shards, ["verify", data, "--deep"]]


CSV_MODULE = '''
"""``.csv`` with a header: a record is a document; line breaks within quotes end none."""

import csv
import io

import numpy as np

from preprocess.read.documents import Inspected, Records, Start, texts_of


def begins_of(data):
    """The byte where each record begins: behind a line end with an even number of quotes before it."""
    letters = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero((letters == 10) & (np.cumsum(letters == 34) % 2 == 0)) + 1
    return [0, *ends[ends < len(data)].tolist()]


class Csv:
    def inspect(self, file, options):
        return Inspected(text_bytes=file.stamp.num_bytes, is_whole=False)

    def starts(self, file, stretches, options):
        size = file.stamp.num_bytes
        places = [*begins_of(file.read_all(0, size)), size]
        found = [next(place for place in places if place >= min(byte, size)) for byte, _ in stretches]
        return [
            Start(place) if place < end or place == size else None
            for place, (_, end) in zip(found, stretches)
        ]

    def read(self, reader, fields, batch_bytes):
        part, size = reader.part, reader.file.stamp.num_bytes
        reader.hash_rest()
        data = reader.file.read_all(0, size)
        begins = begins_of(data)
        ends = [*begins[1:], size]
        cells = [next(csv.reader(io.StringIO(data[a:b].decode(), newline=""))) for a, b in zip(begins, ends)]
        rows = [row for row in range(1, len(begins)) if part.start <= begins[row] < part.end]
        yield Records(
            texts=texts_of([fields.text(dict(zip(cells[0], cells[row]))) for row in rows]),
            starts=np.array(rows, np.int64),
            sizes=np.array([ends[row] - begins[row] for row in rows], np.int64),
            num_bytes=part.end - part.start,
        )
'''
CSV_LINE = """    InputFormat((".csv",), "quoted_csv:Csv", unit="row"),
)
PLAIN_TEXT ="""


@pytest.mark.processes
@pytest.mark.slow
def test_csv_with_quotes_is_an_input_format_by_its_module_and_a_line_of_the_registry(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    (copy.folder / "preprocess/read/quoted_csv.py").write_text(CSV_MODULE, encoding="utf-8")
    copy.change("shardprep/format/names.py", ")\nPLAIN_TEXT =", CSV_LINE)
    texts = [f'record {number}:\nthe "kettle" sings, twice' for number in range(40)]
    with io.StringIO() as file:
        csv.writer(file, lineterminator="\n").writerows([("id", "text"), *enumerate(texts)])
        world = World(tmp_path).raw({"a.csv": file.getvalue(), "b.txt": "one line\nanother line\n"})
    data = world.data_dir
    peek = ["peek", data, "--num", 99, "--chars", 0]
    *_, shown = copy.run(*made(world, data, 4), peek)
    plan = json.loads((data / "plan.json").read_bytes())
    inside = [plan["inputs"][number][0] for number, place, *_ in plan["cuts"][1:-1] if place]
    assert "a.csv" in inside
    manifests = [json.loads(path.read_bytes()) for path in data.glob("shard-*.json")]
    assert sum(manifest["counts"]["num_documents"] for manifest in manifests) == len(texts) + 2
    for number in range(len(texts)):
        assert f"from a.csv row {number + 1}\n  ⟦<|begin_of_text|>⟧record {number}:\n" in shown


def test_the_table_of_input_formats_in_the_docs_names_the_suffixes_that_plan_takes(tmp_path: Path) -> None:
    error = World(tmp_path).try_plan().error
    assert error is not None
    page = (ROOT / "docs/inputs.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `.")]
    known = set(re.findall(r"\.\w+", re.sub("each also with [^;]*", "", str(error.expected))))
    assert {suffix for row in rows for suffix in re.findall(r"`(\.\w+)`", row)} >= known
    assert len(known) == 5


LOWERCASE_OPTION = """
    lowercase: bool = option(False, "make the text lower-case", group=TEXT, )
    limit: int = _text("""
LOWERCASE_USE = """        if options.lowercase:
            lower = [text.lower() for text in documents.texts]
            documents = replace(documents, texts=Texts(lower))
        if transform is not None:
"""


@pytest.mark.processes
@pytest.mark.slow
def test_lowercase_is_a_plan_option_by_its_declaration_and_the_place_that_uses_it(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    copy.change("shardprep/format/plan.py", "    limit: int = _text(", LOWERCASE_OPTION)
    before = "        if transform is not None:\n"
    copy.change("preprocess/read/documents.py", before, LOWERCASE_USE)
    world = World(tmp_path).raw({"a.txt": "The Kettle\nSINGS\n"})
    lower, plain = tmp_path / "lower", tmp_path / "plain"
    commands = [
        *made(world, lower, 1, "--lowercase"),
        ["peek", lower],
        *made(world, plain, 1),
        ["peek", plain],
    ]
    shown = copy.run(*commands)
    assert ("the kettle" in shown[3], "The Kettle" in shown[7]) == (True, True)
    world.plan(num_shards=1)
    ids = {json.loads((folder / "plan.json").read_bytes())["plan_id"] for folder in (plain, world.data_dir)}
    assert len(ids) == 1, "an option that is not used changes no plan"
    refused = call_main("verify", lower)
    assert (refused.code, "lowercase" in refused.err) == (78, True), "this version does not know the option"
    assert call_main("verify", plain).code == 0
