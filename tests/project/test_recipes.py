"""The recipes of docs/architecture.md, followed by the files that they list, in a copy of the packages."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from shardprep.format import input_formats
from tests.checkout import ROOT
from tests.children import run_child
from tests.conftest import Prep
from tests.world import World, call_main, tokenizer_dir

PACKAGES = ("shardprep", "preprocess", "loader", "slurm", "lustre")
# Runs commands one after the other, and last reads the rows of a data set.
DRIVER = """
import json, sys
from shardprep.__main__ import main
commands, data = json.load(sys.stdin)
for words in commands:
    print("=====")
    code = main(words)
    assert code == 0, (code, words)
if data:
    from loader import get_llama3_dataloader
    with get_llama3_dataloader(data, 1, shuffle=False, num_workers=0) as batches:
        print("=====\\n" + json.dumps([batch["input_ids"][0].tolist() for batch in batches]))
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

    def run(self, *commands: Sequence[object], rows_of: Path | None = None) -> list[str]:
        """Run commands in one process, each to its good end; what each printed on standard output."""
        asked = json.dumps([[[str(word) for word in words] for words in commands], rows_of and str(rows_of)])
        environ = {**Prep.environ(), "PYTHONPATH": str(self.folder)}
        done = run_child([sys.executable, "-c", DRIVER], stdin=asked, cwd=self.folder, env=environ)
        return done.stdout.split("=====\n")[1:]


def plan_of(world: World, data: Path, num_shards: int) -> list[object]:
    folders = ["--input_dir", world.raw_dir, "--output_dir", data, "--model_id", tokenizer_dir()]
    return ["plan", *folders, "--num_shards", num_shards]


def shards_of(data: Path, num_shards: int) -> list[list[object]]:
    return [["shard", "--shard_id", number, "--output_dir", data] for number in range(num_shards)]


CSV_MODULE = '''
"""``.csv`` with a header: a record is a document; line breaks within quotes end none."""

import csv
import io

import numpy as np

from preprocess.read.format import Inspected, Records, Start, texts_of


def begins_of(data):
    """The byte where each record begins: behind a line end with an even number of quotes before it."""
    letters = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero((letters == 10) & (np.cumsum(letters == 34) % 2 == 0)) + 1
    return [0, *ends[ends < len(data)].tolist()]


class Csv:
    def inspect(self, file, options):
        return Inspected(text_bytes=file.stamp.num_bytes, is_whole=IS_WHOLE)

    def starts(self, file, stretches, options):
        size = file.stamp.num_bytes
        places = [*begins_of(file.read_all(0, size)), size]
        found = [next(place for place in places if place >= min(byte, size)) for byte, _ in stretches]
        return [
            Start(place) if place < end or place == size else None
            for place, (_, end) in zip(found, stretches)
        ]

    def read(self, reader, options, fields, batch_bytes):
        part, size = reader.part, reader.file.stamp.num_bytes
        reader.hash_rest()
        data = reader.file.read_all(0, size)
        begins = begins_of(data)
        ends = [*begins[1:], size]
        cells = [next(csv.reader(io.StringIO(data[a:b].decode(), newline=""))) for a, b in zip(begins, ends)]
        rows = [row for row in range(1, len(begins)) if part.start <= begins[row] < part.end]
        offsets = rows if COUNTS_ROWS else [begins[row] for row in rows]
        yield Records(
            texts=texts_of([fields.text(dict(zip(cells[0], cells[row]))) for row in rows]),
            starts=np.array(offsets, np.int64),
            sizes=np.array([ends[row] - begins[row] for row in rows], np.int64),
            num_bytes=part.end - part.start,
        )
'''
CSV_LINE = """    InputFormat(
        suffixes=(".csv",), reader="quoted_csv:Csv", unit="{unit}", document="a record", cut_at="{cut_at}"
    ),
)
PLAIN_TEXT ="""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("unit", "cut_at"), [("row", "records"), ("byte", "")])
def test_csv_with_quotes_is_an_input_format_by_its_module_and_a_line_of_the_registry(
    tmp_path: Path, unit: str, cut_at: str
) -> None:
    copy = Copy(tmp_path)
    head = f"COUNTS_ROWS, IS_WHOLE = {unit == 'row'}, {not cut_at}\n"
    (copy.folder / "preprocess/read/quoted_csv.py").write_text(CSV_MODULE + head, encoding="utf-8")
    line = CSV_LINE.format(unit=unit, cut_at=cut_at)
    copy.change("shardprep/format/input_formats.py", ")\nPLAIN_TEXT =", line)
    texts = [f'record {number}:\nthe "kettle" sings, twice' for number in range(40)]
    rows = []
    for row in [("id", "text"), *enumerate(texts)]:
        with io.StringIO() as file:
            csv.writer(file, lineterminator="\n").writerow(row)
            rows.append(file.getvalue())
    world = World(tmp_path).raw({"a.csv": "".join(rows), "b.txt": "one line\nanother line\n"})
    data = world.data_dir
    peek = ["peek", data, "--num", 99, "--chars", 0]
    *_, shown = copy.run(plan_of(world, data, 4), *shards_of(data, 4), ["verify", data], peek)
    made = json.loads((data / "plan.json").read_bytes())
    inside = [made["inputs"][number][0] for number, place, *_ in made["cuts"][1:-1] if place]
    assert ("a.csv" in inside) == bool(cut_at)
    manifests = [json.loads(path.read_bytes()) for path in data.glob("shard-*.json")]
    assert sum(manifest["counts"]["num_documents"] for manifest in manifests) == len(texts) + 2
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
    lowercase: bool = option(False, "make the text lower-case", group=TEXT, )
    limit: int = _text("""
LOWERCASE_USE = """    if options.lowercase:
        found = (dataclasses.replace(each, texts=[text.lower() for text in each.texts]) for each in found)
    if options.is_chat:
        template"""
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


@pytest.mark.processes
@pytest.mark.slow
def test_lowercase_is_a_plan_option_by_its_declaration_and_the_place_that_uses_it(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    copy.change("shardprep/format/options.py", "    limit: int = _text(", LOWERCASE_OPTION)
    copy.change("preprocess/read/documents.py", "    if options.is_chat:\n        template", LOWERCASE_USE)
    world = World(tmp_path).raw({"a.txt": "The Kettle\nSINGS\n"})
    lower, plain = tmp_path / "lower", tmp_path / "plain"
    commands = [[*plan_of(world, lower, 1), "--lowercase"], plan_of(world, plain, 1)]
    for folder in (lower, plain):
        commands += [*shards_of(folder, 1), ["verify", folder, "--deep"], ["peek", folder]]
    shown = copy.run(*commands)
    assert ("the kettle" in shown[4], "The Kettle" in shown[7]) == (True, True)
    world.plan(num_shards=1)
    ids = {json.loads((folder / "plan.json").read_bytes())["plan_id"] for folder in (plain, world.data_dir)}
    assert len(ids) == 1, "an option that is not used changes no plan"
    refused = call_main("verify", lower)
    assert (refused.code, "lowercase" in refused.err) == (78, True), "this version does not know the option"
    assert call_main("verify", plain).code == 0


@pytest.mark.processes
@pytest.mark.slow
def test_a_counter_of_the_manifest_is_its_declaration_and_the_class_that_counts(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    field = "    num_short: Count  # of fewer than 9 tokens\n    num_empty_lines: Count"
    copy.change("shardprep/format/manifest.py", "    num_empty_lines: Count", field)
    counting = "preprocess/make/shard_writer.py"
    copy.change(counting, "        self._num_lines = ", "        self._num_short = self._num_lines = ")
    added = "        self._num_short += int((num_tokens < 9).sum())\n        self._num_lines += "
    copy.change(counting, "        self._num_lines += ", added)
    told = "            num_short=self._num_short,\n            num_empty_lines=self"
    copy.change(counting, "            num_empty_lines=self", told)
    world = World(tmp_path).raw({"a.txt": "a\n" * 7 + "the kettle sings " * 20 + "\n"})
    copy.run(plan_of(world, world.data_dir, 2), *shards_of(world.data_dir, 2), ["verify", world.data_dir])
    manifests = [json.loads(path.read_bytes()) for path in world.data_dir.glob("shard-*.json")]
    assert sum(manifest["counts"]["num_short"] for manifest in manifests) == 7


@pytest.mark.processes
@pytest.mark.slow
def test_pairs_of_documents_are_a_kind_of_samples_by_its_packer_and_three_lines(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    copy.change("shardprep/format/names.py", '"packed", "chat"]', '"packed", "chat", "pairs"]')
    copy.change("shardprep/format/dataset_spec.py", '"packed": 40,', '"packed": 40, "pairs": 40,')
    old = '"chat": IDX_CHAT_ROW}'
    copy.change("shardprep/format/idx.py", old, '"chat": IDX_CHAT_ROW, "pairs": IDX_ROW}')
    packing = "preprocess/make/packing.py"
    copy.change(packing, "# By --pack; ", PAIR_ROWS)
    copy.change(packing, '"best_fit": BestFitRows}', '"best_fit": BestFitRows, "pairs": PairRows}')
    imported = "import numpy as np\n"
    copy.change(packing, imported, f"{imported}from shardprep.errors import BadInput\n")
    world = World(tmp_path).raw({"a.txt": "\n".join(f"document {number} says so" for number in range(41))})
    data = world.data_dir
    commands = [[*plan_of(world, data, 2), "--record", "pairs", "--seq_len", 128], *shards_of(data, 2)]
    commands += [["verify", data, "--deep", 2], ["peek", data, "--num", 99]]
    *_, shown, rows_read = copy.run(*commands, rows_of=data)
    assert shown.count("--- a document begins") == 41
    assert "document 1 says so" in shown.split(" row 0: ")[1].split(" row 1: ")[0]
    begin = Tokenizer.from_file(str(data / "tokenizer/tokenizer.json")).token_to_id("<|begin_of_text|>")
    counts = [row.count(begin) for row in json.loads(rows_read)]
    assert (sum(counts), counts.count(2) >= 19, set(counts) <= {1, 2}) == (41, True, True)
