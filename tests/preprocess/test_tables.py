"""Columns as tables name them, views of strings, the footers of Arrow files, and long windows of zstd."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from preprocess.read import arrow
from preprocess.read.documents import read_records
from preprocess.read.text_fields import TextFields
from shardprep.errors import BadInput
from shardprep.format.options import PlanOptions
from shardprep.format.plan import ByteRange

if TYPE_CHECKING:
    from tests.conftest import Ended, Prep

SUFFIXES = ["parquet", "stream.arrow", "file.arrow"]


def write_table(path: Path, table: pyarrow.Table, rows: int = 3) -> None:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=rows)
        return
    opened = pyarrow.ipc.new_file if "file" in path.name else pyarrow.ipc.new_stream
    with opened(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def texts_of(path: Path, fields: TextFields | None = None) -> list[str]:
    part = ByteRange(input_number=0, path=path, start=0, end=path.stat().st_size)
    texts: list[str] = []
    for documents in read_records([part], PlanOptions(), fields or TextFields(), batch_bytes=500):
        texts += [text.decode() for text in documents.texts]
    return texts


def planned(prep: Prep, folder: Path, *flags: object) -> Ended:
    out = folder.parent / f"{folder.name}-data"
    return prep.command(
        "plan", "--input_dir", folder, "--output_dir", out, "--model_id", prep.model_dir, *flags
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_column_whose_name_has_a_dot_is_read_and_goes_before_a_nested_field(
    prep: Prep, tmp_path: Path, raw: Path, suffix: str
) -> None:
    nested = pyarrow.array([{"b": f"nested {n}", "c.d": f"deep {n}"} for n in range(7)])
    named = pyarrow.table({"a": nested, "a.b": [f"named {n}" for n in range(7)], "n": range(7)})
    write_table(raw / f"x.{suffix}", named)
    write_table(raw / f"y.{suffix}", named.drop_columns(["a.b"]))
    ended = planned(prep, raw, "--text_template", "{a.b} {a.c.d}", "--id_field", "a.c.d")
    assert ended.code == 0, ended.text
    data = tmp_path / "raw-data"
    prep.make(data)
    assert texts_in(prep, data) == [f"{kind} {n} deep {n}" for kind in ("named", "nested") for n in range(7)]
    ids = [
        json.loads(line)[2] for path in sorted(data.glob("ids/*")) for line in path.read_text().splitlines()
    ]
    assert ids == [f"deep {n}" for n in range(7)] * 2


NOT_NESTED: dict[str, pyarrow.Array] = {
    "a list": pyarrow.array([["x"]]),
    "a list of structs": pyarrow.array([[{"b": "x"}]]),
    "a map": pyarrow.array([[("b", "x")]], pyarrow.map_(pyarrow.string(), pyarrow.string())),
    "a number": pyarrow.array([7]),
    "a string": pyarrow.array(["x"]),
    "another struct": pyarrow.array([{"c": "x"}]),
    "a struct of numbers": pyarrow.array([{"b": 7}]),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", NOT_NESTED)
def test_a_nested_field_of_what_is_no_struct_is_refused_by_name_when_planning(
    prep: Prep, tmp_path: Path, raw: Path, suffix: str, kind: str
) -> None:
    column = NOT_NESTED[kind]
    path = raw / f"x.{suffix}"
    write_table(path, pyarrow.table({"a": column, "text": ["t"]}))
    ended = planned(prep, raw, "--text_field", "a.b")
    assert ended.code == 65, ended.text
    assert str(path) in ended.text
    assert "a.b" in ended.text
    assert "--text_field" in ended.text
    assert "Traceback" not in ended.text
    ended = planned(prep, raw, "--id_field", "a.b", "--source_field", "a.b")
    assert ended.code == 0, ended.text
    prep.make(tmp_path / "raw-data")
    (line,) = (tmp_path / "raw-data/ids/shard-00000.jsonl").read_text().splitlines()
    assert json.loads(line)[2] == {"another struct": "", "a struct of numbers": "7"}.get(kind, "")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_nested_field_of_a_column_that_is_all_null_is_null(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    write_table(path, pyarrow.table({"a": pyarrow.nulls(4), "n": range(4)}))
    assert texts_of(path, TextFields("a.b")) == []


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_two_columns_of_one_name_are_refused_where_they_are_meant_and_else_do_no_harm(
    prep: Prep, tmp_path: Path, raw: Path, suffix: str
) -> None:
    path = raw / f"x.{suffix}"
    columns = [pyarrow.array(values) for values in (["one"], ["two"], [1], [2], ["other"])]
    write_table(path, pyarrow.Table.from_arrays(columns, names=["text", "text", "n", "n", "body"]))
    for flags in ((), ("--text_field", "body", "--id_field", "n"), ("--text_template", "{body}{text}")):
        ended = planned(prep, raw, *flags)
        name = "n" if "n" in flags else "text"
        assert ended.code == 65, ended.text
        said = f"input {path} has 2 columns or fields that {name} may mean ({name}, {name}), expected one"
        assert said in ended.text
    assert planned(prep, raw, "--text_field", "body").code == 0
    prep.make(tmp_path / "raw-data")
    assert texts_of(path, TextFields("body")) == ["other"]


def test_a_field_that_two_nested_columns_may_mean_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_table(path, pyarrow.table({"a": [{"b.c": "one"}], "a.b": [{"c": "two"}]}))
    with pytest.raises(BadInput, match=r"a\.b\.c may mean \(a > b\.c, a\.b > c\)"):
        texts_of(path, TextFields("a.b.c"))


VIEWS = [f"문서 {n} " + "long enough to stand apart " * (n % 3) for n in range(40)]


@pytest.mark.parametrize("large_bytes", [0, 1 << 30], ids=["by rows", "whole"])
@pytest.mark.parametrize("suffix", ["stream.arrow", "file.arrow"])
@pytest.mark.parametrize("kind", ["string_view", "binary_view", "dictionary of views"])
def test_views_of_strings_are_texts_and_a_bad_one_is_a_bad_row(
    tmp_path: Path, suffix: str, kind: str, monkeypatch: pytest.MonkeyPatch, large_bytes: int
) -> None:
    if not hasattr(pyarrow, "string_view"):
        pytest.skip("this pyarrow has no views")
    monkeypatch.setattr(arrow, "_LARGE_BYTES", large_bytes)
    data = [text.encode() for text in VIEWS]
    data[5] = b"\xff\xfe, which is no UTF-8, at all"
    column = pyarrow.array(data, pyarrow.binary_view())
    if kind != "binary_view":
        column = pyarrow.Array.from_buffers(pyarrow.string_view(), len(data), column.buffers())
    if kind == "dictionary of views":
        column = pyarrow.DictionaryArray.from_arrays(pyarrow.array(range(40)), column)
    path = tmp_path / f"x.{suffix}"
    write_table(path, pyarrow.table({"n": range(40), "text": column}), rows=17)
    part = ByteRange(input_number=0, path=path, start=0, end=path.stat().st_size)
    texts: list[str] = []
    bad: list[int] = []
    for documents in read_records([part], PlanOptions(), TextFields(), batch_bytes=500):
        texts += [text.decode() for text in documents.texts]
        bad += [one.line for one in documents.bad if one.reason == "undecodable"]
    assert texts == VIEWS[:5] + VIEWS[6:]
    assert bad == [5]


@pytest.mark.parametrize("num_bytes", range(1, 20))
def test_an_arrow_file_that_is_cut_to_its_first_bytes_is_refused(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "x.arrow"
    path.write_bytes(b"ARROW1\0\0ARROW1ARROW1"[:num_bytes])
    with pytest.raises(BadInput, match="cannot be read as Arrow"):
        texts_of(path)


def long_zstd(data: bytes, long: int) -> bytes:
    """As ``zstd --long=N`` writes what it reads from a pipe: with a window of 2^N bytes."""
    params = zstandard.ZstdCompressionParameters(window_log=long)
    packer = zstandard.ZstdCompressor(compression_params=params).compressobj()
    return packer.compress(data) + packer.flush()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["x.jsonl.zst", "x.txt.zst"])
@pytest.mark.parametrize("long", [28, 31])
def test_a_long_window_of_zstd_is_refused_when_planning_and_read_where_it_is_allowed(
    prep: Prep, tmp_path: Path, raw: Path, name: str, long: int
) -> None:
    texts = [f"text {n}" for n in range(9)]
    lines = [json.dumps({"text": text}) if "json" in name else text for text in texts]
    skipped = struct.pack("<II", 0x184D2A50, 3) + b"abc"
    (raw / name).write_bytes(skipped + long_zstd("\n".join(lines).encode(), long))
    ended = planned(prep, raw)
    assert ended.code == 65, ended.text
    assert "--zstd_long 31" in ended.text
    assert str(raw / name) in ended.text
    assert planned(prep, raw, "--zstd_long", long - 1).code == 65
    ended = planned(prep, raw, "--zstd_long", long)
    assert ended.code == 0, ended.text
    ended = prep.command("run", tmp_path / "raw-data", "--num_proc", 1)
    assert ended.code == 0, ended.text
    assert texts_in(prep, tmp_path / "raw-data") == texts


def texts_in(prep: Prep, data: Path) -> list[str]:
    members = [item for shard in sorted(data.glob("shard-*.tar")) for item in prep.members(shard)]
    return [member.decode() for name, member in members if name.endswith("text.txt")]


@pytest.mark.slow
def test_a_later_frame_with_a_long_window_ends_the_task_with_65_and_what_to_type(
    prep: Prep, tmp_path: Path, raw: Path
) -> None:
    (raw / "x.txt.zst").write_bytes(
        zstandard.compress((b"a line of text " * 100 + b"\n") * 3000) + long_zstd(b"two\n", 30)
    )
    assert planned(prep, raw).code == 0
    ended = prep.command("--shard_id", 0, "--output_dir", tmp_path / "raw-data")
    assert ended.code == 65, ended.text
    assert "--zstd_long 31" in ended.text
    assert not list((tmp_path / "raw-data").glob("shard-*"))


@pytest.mark.slow
def test_the_window_is_no_part_of_the_plan_id(prep: Prep, sample_dir: Path, tmp_path: Path) -> None:
    one = prep.plan(sample_dir, tmp_path / "one")
    other = prep.plan(sample_dir, tmp_path / "other", zstd_long=31)
    assert one.plan_id == other.plan_id


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_field_that_no_record_has_is_told_by_plan(prep: Prep, tmp_path: Path, suffix: str) -> None:
    (tmp_path / "raw").mkdir()
    records = [{"text": f"w{number}", "id": f"i{number}"} for number in range(9)]
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "raw" / "a.parquet")
    else:
        (tmp_path / "raw" / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    given = ["plan", "--input_dir", tmp_path / "raw", "--model_id", prep.model_dir, "--dry_run"]
    given += ["--output_dir", tmp_path / "data"]
    ended = prep.command(*given, "--id_field", "idd", "--source_field", "src")
    assert ended.code == 0, ended.text
    assert "a value for --id_field idd, --source_field src;" in " ".join(ended.text.split())
    assert "no record" not in prep.command(*given, "--id_field", "id").text
