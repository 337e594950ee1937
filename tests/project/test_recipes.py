"""The recipes of docs/architecture.md, followed by the files that they list, in a copy of the packages."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from shardprep.format import input_formats
from tests.checkout import ROOT
from tests.children import run_child

if TYPE_CHECKING:
    from tests.conftest import Prep

PACKAGES = ("shardprep", "preprocess", "loader", "slurm", "lustre")

CSV_MODULE = '''
"""``.csv`` with a header: a record is a document; line breaks within quotes end none."""

import csv
import io

import numpy as np

from preprocess.read.format import Inspected, RecordBlock, Start, batches_of
from preprocess.read.inputs import Place


def begins_of(data):
    """The byte where each record begins: behind a line end with an even number of quotes before it."""
    letters = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero((letters == 10) & (np.cumsum(letters == 34) % 2 == 0)) + 1
    return [0, *ends[ends < len(data)].tolist()]


class Csv:
    def inspect(self, file, reading):
        return Inspected(text_bytes=file.stamp.num_bytes, is_whole=IS_WHOLE)

    def starts(self, file, stretches, reading):
        size = file.stamp.num_bytes
        places = [*begins_of(file.read_all(0, size)), size]
        found = [next(place for place in places if place >= min(byte, size)) for byte, _ in stretches]
        return [
            Start(place) if place < end or place == size else None
            for place, (_, end) in zip(found, stretches)
        ]

    def read(self, reader, reading, line):
        part, size = reader.part, reader.file.stamp.num_bytes
        reader.hash_rest()
        data = reader.file.read_all(0, size)
        begins = begins_of(data)
        ends = [*begins[1:], size]
        fields = [next(csv.reader(io.StringIO(data[a:b].decode(), newline=""))) for a, b in zip(begins, ends)]
        rows = [row for row in range(1, len(begins)) if part.start <= begins[row] < part.end]
        offsets = rows if COUNTS_ROWS else [begins[row] for row in rows]
        block = RecordBlock(
            texts=[reading.fields.text(dict(zip(fields[0], fields[row]))) for row in rows],
            starts=np.array(offsets, np.int64),
            sizes=np.array([ends[row] - begins[row] for row in rows], np.int64),
            num_bytes=part.end - part.start,
        )
        place = Place(
            file=reader.file, input_number=part.input_number, start=0, end=0, line=line, num_bytes=0
        )
        yield from batches_of(block, place)
'''
CSV_LINE = """    InputFormat(
        suffixes=(".csv",), reader="quoted_csv:Csv", unit="{unit}", document="a record", cut_at="{cut_at}"
    ),
)
PLAIN_TEXT ="""


def copy_of_packages(folder: Path) -> Path:
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new), encoding="utf-8")


def run(prep: Prep, home: Path, *words: object, code: int = 0) -> str:
    """A command of the copy; its output."""
    done: subprocess.CompletedProcess[str] = run_child(
        [sys.executable, "-m", *map(str, words)],
        cwd=home,
        env={**prep.environ(), "PYTHONPATH": str(home)},
        code=code,
    )
    return done.stdout + done.stderr


def csv_rows(texts: list[str]) -> list[str]:
    """The header and the records, each with its line end."""
    rows = []
    for row in [("id", "text"), *((str(number), text) for number, text in enumerate(texts))]:
        with io.StringIO() as file:
            csv.writer(file, lineterminator="\n").writerow(row)
            rows.append(file.getvalue())
    return rows


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("unit", "cut_at"), [("row", "records"), ("byte", "")])
def test_csv_with_quotes_is_an_input_format_by_its_module_and_a_line_of_the_registry(
    prep: Prep, tmp_path: Path, unit: str, cut_at: str
) -> None:
    home = copy_of_packages(tmp_path / "copy")
    head = f"COUNTS_ROWS, IS_WHOLE = {unit == 'row'}, {not cut_at}\n"
    (home / "preprocess/read/quoted_csv.py").write_text(CSV_MODULE + head, encoding="utf-8")
    change(
        home / "shardprep/format/input_formats.py",
        ")\nPLAIN_TEXT =",
        CSV_LINE.format(unit=unit, cut_at=cut_at),
    )
    raw, data = tmp_path / "raw", tmp_path / "data"
    raw.mkdir()
    texts = [f'record {number}:\nthe "kettle" sings, twice' for number in range(40)]
    rows = csv_rows(texts)
    (raw / "a.csv").write_text("".join(rows), encoding="utf-8")
    (raw / "b.txt").write_text("one line\nanother line\n", encoding="utf-8")
    plan = ("--input_dir", raw, "--output_dir", data, "--model_id", prep.model_dir, "--num_shards", 4)
    run(prep, home, "preprocess", "plan", *plan)
    made = json.loads((data / "plan.json").read_bytes())
    inside = [made["inputs"][number]["path"] for number, place in made["cuts"][1:-1] if place]
    assert ("a.csv" in inside) == bool(cut_at)
    run(prep, home, "preprocess", "run", data, "--num_proc", 1)
    run(prep, home, "preprocess", "verify", data)
    manifests = [json.loads(path.read_bytes()) for path in data.glob("shard-*.json")]
    assert sum(manifest["counts"]["num_documents"] for manifest in manifests) == len(texts) + 2
    shown = run(prep, home, "preprocess", "peek", data, "--num", 99, "--chars", 0)
    for number in range(len(texts)):
        place = number + 1 if unit == "row" else sum(map(len, rows[: number + 1]))
        assert f"from a.csv {unit} {place}\n  ⟦<|begin_of_text|>⟧record {number}:\n" in shown


def test_the_table_of_input_formats_in_the_docs_is_that_of_the_registry() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs/inputs.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `.")
    ]
    for kind in input_formats.INPUT_FORMATS:
        names = ", ".join(f"`{suffix}`" for suffix in kind.suffixes)
        (row,) = (row for row in rows if row[0].startswith(names))
        assert row[1:] == [kind.document, kind.cut_at or "no place: files stay whole"]


LOWERCASE_OPTION = """
    lowercase: bool = option(False, "make the text lower-case", group=TEXT, changes_text=True)
    limit: int = option("""
LOWERCASE_USE = """    text = text.lower() if options.lowercase else text
    if len(text) < options.min_chars"""
PAIR_ROWS = '''class PairRows:
    """A row holds two documents that follow each other, and padding."""

    num_split = 0

    def __init__(self, spec):
        self._spec, self._pair = spec, []

    def append(self, tokens, starts):
        for number in range(len(starts)):
            ids = tokens.ids[tokens.offsets[number] : tokens.offsets[number + 1]]
            self._pair.append((ids, starts[number]))
            if len(self._pair) == 2:
                yield from self.finish()

    def finish(self):
        if not self._pair:
            return
        ids = np.concatenate([ids for ids, _ in self._pair])
        if len(ids) > self._spec.seq_len:
            raise BadInput(f"a pair has {len(ids)} tokens, expected at most {self._spec.seq_len}")
        row = np.full((1, self._spec.seq_len), pad_id(self._spec), row_dtype(self._spec))
        row[0, : len(ids)] = ids
        starts = np.array([start for _, start in self._pair], START)
        starts["position"] = [0, len(self._pair[0][0])][: len(starts)]
        self._pair = []
        yield RowGroup(
            rows=row, row_tokens=np.array([len(ids)], np.uint32), starts=starts, firsts=starts[:1]
        )


# By --pack; '''
READ_PAIRS = """
import json, sys
from loader import get_llama3_dataloader
with get_llama3_dataloader(sys.argv[1], 1, shuffle=False, num_workers=0) as batches:
    for batch in batches:
        print(json.dumps(batch["input_ids"][0].tolist()))
"""


@pytest.mark.processes
@pytest.mark.slow
def test_lowercase_is_a_plan_option_by_its_declaration_and_the_place_that_uses_it(
    prep: Prep, tmp_path: Path
) -> None:
    home = copy_of_packages(tmp_path / "copy")
    change(home / "shardprep/format/options.py", "    limit: int = _text(", LOWERCASE_OPTION)
    change(home / "preprocess/read/text_changes.py", "    if len(text) < options.min_chars", LOWERCASE_USE)
    raw, data, plain = tmp_path / "raw", tmp_path / "data", tmp_path / "plain"
    raw.mkdir()
    (raw / "a.txt").write_text("The Kettle\nSINGS\n", encoding="utf-8")
    plan = ("--input_dir", raw, "--model_id", prep.model_dir)
    assert "make the text lower-case (default: off)" in run(prep, home, "preprocess", "plan", "--help")
    run(prep, home, "preprocess", "plan", *plan, "--output_dir", data, "--lowercase")
    run(prep, home, "preprocess", "plan", *plan, "--output_dir", plain)
    assert prep.command("plan", *plan, "--output_dir", tmp_path / "old").code == 0
    ids = {json.loads((folder / "plan.json").read_bytes())["plan_id"] for folder in (plain, tmp_path / "old")}
    assert len(ids) == 1, "an option that is not used changes no plan"
    for folder, text in ((data, "the kettle"), (plain, "The Kettle"), (tmp_path / "old", "The Kettle")):
        run(prep, home, "preprocess", "run", folder, "--num_proc", 1)
        run(prep, home, "preprocess", "verify", folder, "--deep")
        assert text in run(prep, home, "preprocess", "peek", folder)
    task = ("--shard_id", 0, "--input_dir", raw, "--output_dir")
    said = run(prep, home, "preprocess", *task, plain, "--lowercase", code=78)
    assert "--lowercase was False, now True" in said
    refused = prep.command("verify", data)
    assert refused.code == 78, "this version does not know the option"
    assert "lowercase" in refused.text
    assert prep.command("verify", plain).code == 0


@pytest.mark.processes
@pytest.mark.slow
def test_a_counter_of_the_manifest_is_its_declaration_and_the_class_that_counts(
    prep: Prep, tmp_path: Path
) -> None:
    home = copy_of_packages(tmp_path / "copy")
    manifest, counting = home / "shardprep/format/manifest.py", home / "preprocess/make/counting.py"
    change(
        manifest,
        "    num_filtered: Count",
        "    num_short: Count  # of fewer than 9 tokens\n    num_filtered: Count",
    )
    change(counting, "        self._num_lines = ", "        self._num_short = self._num_lines = ")
    counted = "        self._num_short += int((num_tokens < 9).sum())\n        self._num_lines += "
    change(counting, "        self._num_lines += ", counted)
    change(
        counting,
        "            num_filtered=self",
        "            num_short=self._num_short,\n            num_filtered=self",
    )
    raw, data = tmp_path / "raw", tmp_path / "data"
    raw.mkdir()
    (raw / "a.txt").write_text("a\n" * 7 + "the kettle sings " * 20 + "\n")
    plan = ("--input_dir", raw, "--output_dir", data, "--model_id", prep.model_dir, "--num_shards", 2)
    run(prep, home, "preprocess", "plan", *plan)
    run(prep, home, "preprocess", "run", data, "--num_proc", 1)
    run(prep, home, "preprocess", "verify", data)
    counts = [json.loads(path.read_bytes())["counts"] for path in sorted(data.glob("shard-*.json"))]
    assert sum(each["num_short"] for each in counts) == 7


@pytest.mark.processes
@pytest.mark.slow
def test_pairs_of_documents_are_a_kind_of_samples_by_its_packer_and_two_lines(
    prep: Prep, tmp_path: Path
) -> None:
    home = copy_of_packages(tmp_path / "copy")
    change(home / "shardprep/format/names.py", '"packed", "chat"]', '"packed", "chat", "pairs"]')
    change(
        home / "shardprep/format/idx.py",
        '"chat": IDX_CHAT_ROW}',
        '"chat": IDX_CHAT_ROW, "pairs": IDX_ROW}',
    )
    packing = home / "preprocess/make/packing.py"
    change(packing, "# By --pack; ", PAIR_ROWS)
    change(packing, '"best_fit": BestFitRows}', '"best_fit": BestFitRows, "pairs": PairRows}')
    change(packing, "import numpy as np\n", "import numpy as np\nfrom shardprep.errors import BadInput\n")
    raw, data = tmp_path / "raw", tmp_path / "data"
    raw.mkdir()
    lines = [f"document {number} says so" for number in range(41)]
    (raw / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    plan = ("--input_dir", raw, "--output_dir", data, "--model_id", prep.model_dir, "--num_shards", 2)
    run(prep, home, "preprocess", "plan", *plan, "--record", "pairs", "--seq_len", 128)
    run(prep, home, "preprocess", "run", data, "--num_proc", 1)
    run(prep, home, "preprocess", "verify", data, "--deep", 2)
    shown = run(prep, home, "preprocess", "peek", data, "--num", 99)
    assert shown.count("--- a document begins") == len(lines)
    assert "document 1 says so" in shown.split(" row 0: ")[1].split(" row 1: ")[0]
    script = tmp_path / "read_pairs.py"
    script.write_text(READ_PAIRS, encoding="utf-8")
    done = run_child(
        [sys.executable, script, data], cwd=home, env={**prep.environ(), "PYTHONPATH": str(home)}
    )
    tokenizer = Tokenizer.from_file(str(data / "tokenizer/tokenizer.json"))
    rows = [tokenizer.decode(json.loads(line)) for line in done.stdout.splitlines()]
    assert sum(row.count("document") for row in rows) == len(lines)
    assert sum(row.count("document") == 2 for row in rows) >= len(lines) // 2 - 1
    assert len(rows) - len(lines) // 2 in (1, 2)  # each shard may end with one alone
