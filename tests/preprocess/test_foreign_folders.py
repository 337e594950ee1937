"""Folders as other tools leave them: what is no data is left out by name, and no file is taken twice."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow
import pyarrow.dataset
import pyarrow.ipc
import pyarrow.parquet
import pytest

from shardprep.format.plan import need_plan
from tests.input_writers import seekable_zstd

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Ended, Prep


def plan_of(prep: Prep, raw: Path, *flags: object) -> Ended:
    words = ("--input_dir", raw, "--output_dir", raw.parent / "data", "--model_id", prep.model_dir)
    return prep.command("plan", *words, "--recursive", *flags)


def taken_from(raw: Path) -> list[str]:
    return [item.path for item in need_plan(raw.parent / "data").inputs]


def left_out_of(raw: Path) -> dict[str, list[str]]:
    return {reason: list(names) for reason, names in need_plan(raw.parent / "data").left_out.items()}


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def write_stream(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"text": texts})
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


def write_parquet(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)


DOCS = [f"document {n}" for n in range(30)]


def test_what_datasets_keeps_of_its_transformations_is_left_out(prep: Prep, raw: Path) -> None:
    write_stream(raw / "data-00000-of-00001.arrow", DOCS)
    caches = ["cache-9c76db8314ecfdd4.arrow", "cache-1f_00000_of_00004.arrow", "train/cache-0a1b.arrow"]
    for name in caches:
        write_stream(raw / name, [text.upper() for text in DOCS])
    (raw / "dataset_info.json").write_text("{}")
    (raw / "tmp7xq2").write_bytes(b"half of a cache")
    ended = plan_of(prep, raw)
    assert ended.code == 0, ended.text
    assert taken_from(raw) == ["data-00000-of-00001.arrow"]
    assert left_out_of(raw)["cache of datasets"] == sorted(caches)
    assert "cache-1f_00000_of_00004.arrow" in ended.text
    assert plan_of(prep, raw, "--also", "cache-9*", "--dry_run").code == 78, "it takes another file"


def test_what_spark_and_hive_do_not_read_is_left_out_and_partitions_are_taken(prep: Prep, raw: Path) -> None:
    inputs = [
        "_lang=ko/part-0.parquet",
        "year=2024/month=1/part-0.parquet",
        "year=__HIVE_DEFAULT/part-1.parquet",
    ]
    hidden = ["_metadata.parquet", "_started_12.json", "x/_temporary.jsonl"]
    for name in inputs:
        write_parquet(raw / name, [name])
    for name in (*hidden, "_temporary/0/part-0.jsonl", "year=2024/__MACOSX/a.txt", "_SUCCESS"):
        (raw / name).parent.mkdir(parents=True, exist_ok=True)
        (raw / name).write_bytes(lines(["not of the data"]))
    ended = plan_of(prep, raw)
    assert ended.code == 0, ended.text
    assert taken_from(raw) == inputs
    folders = ["_SUCCESS", "_temporary", "year=2024/__MACOSX"]
    assert left_out_of(raw) == {"begins with _": sorted([*hidden, *folders])}
    for name in folders:
        assert name.rpartition("/")[2] in ended.text or "more" in ended.text


def test_names_that_begin_with_an_underscore_are_taken_where_a_pattern_asks_for_them(
    prep: Prep, raw: Path
) -> None:
    (raw / "_more").mkdir()
    for name in ("a.jsonl", "_b.jsonl", "_more/c.jsonl"):
        (raw / name).write_bytes(lines([name]))
    assert plan_of(prep, raw, "--also", "_b*,_more").code == 0
    assert taken_from(raw) == ["_b.jsonl", "_more/c.jsonl", "a.jsonl"]


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": lambda data: seekable_zstd(data, [500]),
}


@pytest.mark.parametrize("num", [30, 5000])
@pytest.mark.parametrize("ending", PACKED)
def test_a_file_and_its_compressed_form_are_taken_once(prep: Prep, raw: Path, ending: str, num: int) -> None:
    data = lines([f"document {n}" for n in range(num)])
    (raw / "a.jsonl").write_bytes(data)
    (raw / f"a.jsonl.{ending}").write_bytes(PACKED[ending](data))
    (raw / "b.jsonl").write_bytes(lines(["other text"]))
    (raw / f"b.jsonl.{ending}").write_bytes(PACKED[ending](data))
    ended = plan_of(prep, raw, "--num_shards", 1)
    assert ended.code == 0, ended.text
    assert sorted(taken_from(raw)) == ["a.jsonl", "b.jsonl", f"b.jsonl.{ending}"]
    assert left_out_of(raw) == {"compressed form of a file that is taken": [f"a.jsonl.{ending}"]}
    assert f"a.jsonl.{ending}" in ended.text


def test_two_compressed_forms_of_a_file_are_taken_once(prep: Prep, raw: Path) -> None:
    for ending, pack in PACKED.items():
        (raw / f"a.txt.{ending}").write_bytes(pack(b"one\ntwo\n"))
    assert plan_of(prep, raw).code == 0
    assert taken_from(raw) == ["a.txt.gz"]


def test_a_file_is_taken_by_one_of_its_names(prep: Prep, raw: Path) -> None:
    (raw / "sub").mkdir()
    (raw / "sub" / "c.jsonl").write_bytes(lines(DOCS))
    (raw / "a.jsonl").symlink_to("sub/c.jsonl")
    os.link(raw / "sub" / "c.jsonl", raw / "sub" / "d.jsonl")
    (raw / "snapshots").mkdir()
    for name in ("e", "f"):  # as the hub's cache has them: a blob, and a link of each revision
        (raw / "snapshots" / f"{name}.jsonl").symlink_to(raw.parent / "blob")
    (raw.parent / "blob").write_bytes(lines(["from the hub"]))
    ended = plan_of(prep, raw)
    assert ended.code == 0, ended.text
    assert taken_from(raw) == ["snapshots/e.jsonl", "sub/c.jsonl"]
    again = ["a.jsonl", "snapshots/f.jsonl", "sub/d.jsonl"]
    assert left_out_of(raw) == {"file that is taken by another name": again}
    assert "a.jsonl" in ended.text


def test_equal_content_is_told_by_name_and_taken(prep: Prep, raw: Path) -> None:
    for name in ("a.jsonl", "a (1).jsonl"):
        (raw / name).write_bytes(lines(DOCS))
    for name in ("b.jsonl", "c.jsonl"):
        (raw / name).write_bytes(b"")
    ended = plan_of(prep, raw)
    assert ended.code == 0, ended.text
    (warning,) = (line for line in ended.text.splitlines() if "a (1).jsonl" in line)
    assert "warning" in warning
    assert "a.jsonl" in warning
    assert len(taken_from(raw)) == 4


# Two files of the split train, and one of test.
LAYOUTS = {
    "hub": ("data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001"),
    "folders": ("ko/train/0000", "ko/train/0001", "ko/test/0000"),
    "save_to_disk": ("train/data-00000-of-00002", "train/data-00001-of-00002", "test/data-00000-of-00001"),
    "behind a name": ("c4-train.00000-of-00002", "c4-train.00001-of-00002", "c4-eval.00000-of-00001"),
    "before a name": ("train_sft-0", "train_sft-1", "test_sft-0"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits_are_told_with_what_was_taken_and_a_flag_chooses(prep: Prep, raw: Path, layout: str) -> None:
    *train, test = (f"{name}.parquet" for name in LAYOUTS[layout])
    for name in (*train, test):
        write_parquet(raw / name, [name])
    ended = plan_of(prep, raw)
    assert ended.code == 0, ended.text
    (told,) = (line for line in ended.text.splitlines() if "--split" in line)
    for part in ("warning", "train 2 files", "test 1 file", "--split train"):
        assert part in told
    assert sorted(taken_from(raw)) == sorted([*train, test])
    (raw.parent / "data" / "plan.json").unlink()
    ended = plan_of(prep, raw, "--split", "train")
    assert ended.code == 0, ended.text
    assert taken_from(raw) == train
    assert left_out_of(raw) == {"other split": [test]}
    assert "2 input files" in ended.text
    # The plain form of a task lists the folder again.
    made = prep.command("--shard_id", 0, "--output_dir", raw.parent / "data", "--input_dir", raw)
    assert made.code == 0, made.text


def test_a_split_that_is_not_there_or_cannot_be_is_refused(prep: Prep, raw: Path) -> None:
    (raw / "train.jsonl").write_bytes(lines(DOCS))
    assert plan_of(prep, raw, "--split", "validation").code == 66
    assert plan_of(prep, raw, "--split", "trian").code == 2
    assert plan_of(prep, raw).code == 0


def test_a_delta_table_is_refused_by_name(prep: Prep, raw: Path) -> None:
    """Files of its old versions lie among the current ones."""
    write_parquet(raw / "table" / "part-0.parquet", DOCS)
    (raw / "table" / "_delta_log").mkdir()
    ended = plan_of(prep, raw)
    assert (ended.code, str(raw / "table") in ended.text) == (65, True)


def test_what_iceberg_keeps_beside_its_data_is_left_out(prep: Prep, raw: Path) -> None:
    write_parquet(raw / "data/00000-0.parquet", DOCS)
    (raw / "metadata").mkdir()
    (raw / "metadata/version-hint.text").write_text("1\n")
    (raw / "metadata/v1.metadata.json").write_text("{}\n")
    ended = plan_of(prep, raw)
    assert ended.code == 0, ended.text
    assert taken_from(raw) == ["data/00000-0.parquet"]
    assert "metadata/v1.metadata.json" in ended.text


def texts_in(prep: Prep, raw: Path) -> list[str]:
    prep.make(raw.parent / "data")
    tars = sorted((raw.parent / "data").glob("shard-*.tar"))
    members = [member for tar in tars for member in prep.members(tar)]
    return [text.decode() for name, text in members if name.endswith(".text.txt")]


def by_pyarrow(raw: Path) -> None:
    table = pyarrow.table({"text": DOCS, "year": [2023, 2024, 2025] * 10})
    pyarrow.dataset.write_dataset(
        table, raw, format="parquet", partitioning=["year"], partitioning_flavor="hive"
    )
    pyarrow.parquet.write_metadata(table.schema, raw / "_common_metadata")


def by_pandas(raw: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame({"text": DOCS, "year": [2023, 2024, 2025] * 10})
    frame.to_parquet(raw, partition_cols=["year"])
    frame[:0].to_json(raw / "empty.jsonl", orient="records", lines=True)


def by_datasets(raw: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.Dataset.from_dict({"text": DOCS}).save_to_disk(raw)
    loaded = datasets.load_from_disk(raw)
    loaded.map(lambda row: {"text": row["text"].upper()})
    loaded.map(
        lambda row: {"length": len(row["text"])}, num_proc=1, cache_file_name=str(raw / "cache-own.arrow")
    )


def by_datasets_to_parquet(raw: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.Dataset.from_dict({"text": DOCS}).to_parquet(raw / "a.parquet")


def by_the_cache_of_datasets(raw: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    source = raw.parent / "source.jsonl"
    source.write_bytes(lines(DOCS))
    loaded = datasets.load_dataset("json", data_files=str(source), cache_dir=str(raw), split="train")
    loaded.map(lambda row: {"text": row["text"] + "!"})


def by_polars(raw: Path) -> None:
    polars = pytest.importorskip("polars", reason="polars is not installed")
    frame = polars.DataFrame({"text": DOCS, "year": [2023, 2024, 2025] * 10})
    frame[:10].write_ipc(raw / "a.arrow")
    frame[10:20].write_ipc_stream(raw / "b.arrow")
    frame[20:].write_ndjson(raw / "c.ndjson")


def by_duckdb(raw: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    duckdb.sql(
        f"copy (select 'document ' || i as text, i % 3 as part from range(30) t(i)) to '{raw}' "
        "(format parquet, partition_by (part), overwrite_or_ignore)"
    )


OWN_WRITERS = [by_pyarrow, by_pandas]
OTHER_WRITERS = [
    by_datasets, by_datasets_to_parquet, by_the_cache_of_datasets, by_polars, by_duckdb,
]  # fmt: skip


@pytest.mark.processes  # datasets may start one
@pytest.mark.parametrize(
    "write",
    [*OWN_WRITERS, *(pytest.param(write, marks=pytest.mark.frameworks) for write in OTHER_WRITERS)],
    ids=lambda write: write.__name__,
)
def test_the_folder_of_each_writer_gives_its_rows_once(
    prep: Prep, raw: Path, write: Callable[[Path], None]
) -> None:
    write(raw)
    ended = plan_of(prep, raw, "--num_shards", 1)
    assert ended.code == 0, ended.text
    assert sorted(texts_in(prep, raw)) == sorted(DOCS)
