"""The recipes of docs/architecture.md, followed by the files that they list, in a copy of the packages."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.checkout import PACKAGES, ROOT
from tests.children import environ_of_children, run_child
from tests.world import World, call_main

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
# (file, what stands there, what takes its place)
CHANGES = [
    (
        "shardprep/format/names.py",
        ")\nPLAIN_TEXT =",
        """    InputFormat((".csv",), "quoted_csv:Csv", unit="row"),
)
PLAIN_TEXT =""",
    ),
    (
        "shardprep/format/plan.py",
        "    limit: int = _text(",
        """
    lowercase: bool = option(False, "make the text lower-case", group=TEXT, )
    limit: int = _text(""",
    ),
    (
        "preprocess/read/documents.py",
        "        if transform is not None:\n",
        """        if options.lowercase:
            lower = [text.lower() for text in documents.texts]
            documents = replace(documents, texts=Texts(lower))
        if transform is not None:
""",
    ),
]
# Runs commands one after the other.
DRIVER = """
import json, sys
from shardprep.__main__ import main
for words in json.load(sys.stdin):
    print("=====")
    code = main(words)
    assert code == 0, (code, words)
"""


@pytest.mark.processes
@pytest.mark.slow
def test_csv_is_an_input_format_and_lowercase_a_plan_option_by_a_module_and_a_line_each(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "copy"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "preprocess/read/quoted_csv.py").write_text(CSV_MODULE, encoding="utf-8")
    for path, old, new in CHANGES:
        text = (copy / path).read_text(encoding="utf-8")
        assert text.count(old) == 1, (path, old)
        (copy / path).write_text(text.replace(old, new), encoding="utf-8")
    texts = [f'RECORD {number}:\nthe "kettle" sings, twice' for number in range(40)]
    with io.StringIO() as file:
        csv.writer(file, lineterminator="\n").writerows([("id", "text"), *enumerate(texts)])
        world = World(tmp_path).raw({"a.csv": file.getvalue(), "b.txt": "one line\nanother line\n"})
    data, other = world.data_dir, World(tmp_path / "other").raw({"a.txt": "a line\n"})
    commands = [
        ["plan", *world.words_of_plan(num_shards=4), "--lowercase"],
        *(["shard", "--shard_id", number, "--output_dir", data] for number in range(4)),
        ["verify", data, "--deep"],
        ["plan", *other.words_of_plan(num_shards=1)],
        ["peek", data, "--num", 99, "--chars", 0],
    ]
    asked = json.dumps([[str(word) for word in words] for words in commands])
    environ = environ_of_children(PYTHONPATH=str(copy))
    done = run_child([sys.executable, "-c", DRIVER], stdin=asked, cwd=copy, env=environ)
    shown = done.stdout.rpartition("=====\n")[2]
    plan = world.plan_json()
    inside = [plan["inputs"][number][0] for number, place, *_ in plan["cuts"][1:-1] if place]
    assert "a.csv" in inside
    assert sum(each["counts"]["num_documents"] for each in world.manifests()) == len(texts) + 2
    for number in range(len(texts)):
        assert f"from a.csv row {number + 1}\n  ⟦<|begin_of_text|>⟧record {number}:\n" in shown
    refused = call_main("verify", data)
    assert (refused.code, "lowercase" in refused.err) == (78, True), "this version does not know the option"
    twin = World(tmp_path / "twin", raw_dir=other.raw_dir).plan(num_shards=1)
    ids = [each.plan_json()["plan_id"] for each in (twin, other)]
    assert ids[0] == ids[1], "an option that is not used changes no plan"


def test_the_table_of_input_formats_in_the_docs_names_the_suffixes_that_plan_takes(tmp_path: Path) -> None:
    error = World(tmp_path).try_plan().error
    assert error is not None
    page = (ROOT / "docs/inputs.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `.")]
    known = set(re.findall(r"\.\w+", re.sub("each also with [^;]*", "", str(error.expected))))
    assert {suffix for row in rows for suffix in re.findall(r"`(\.\w+)`", row)} >= known
    assert len(known) == 5
