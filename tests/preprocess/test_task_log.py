"""What the log of a task says: its part of the input, its engine and means, its speed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow
import pyarrow.parquet as pq
import pytest

from preprocess.make.resources import WorkerSettings
from preprocess.make.worker import Work, load_worker, part_line
from shardprep import console
from shardprep.console import counted, progress_line, short_bytes, short_number, short_time
from shardprep.format.plan import need_plan
from tests.input_writers import bgzip

if TYPE_CHECKING:
    from tests.conftest import Prep


def test_a_task_names_its_part_of_the_input_its_engine_and_its_means_before_it_works(
    prep: Prep, data_dir: Path, sample_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--shard_id", 1, "--output_dir", data_dir, "--memory_gb", "2"]
    ended = prep.command(*words, DATASET_BATCH_SIZE="50")
    plan = need_plan(data_dir)
    begin, stop = plan.cuts[1:3]
    first, start, last, end = begin.input_number, begin.byte, stop.input_number, stop.byte
    assert first < last, "the shard is of two files"
    part, means, done = ended.text.splitlines()
    assert part.startswith(f"shard 00001 of 5: {short_bytes(plan.shard_bytes()[1])} of {sample_dir}: ")
    assert f"{plan.inputs[first].path} bytes {start} to {plan.inputs[first].num_bytes}, " in part
    assert part.endswith(f"{plan.inputs[last].path} bytes 0 to {end}")
    assert re.fullmatch(r"gigatoken [\d.]+, \d CPUs?, .*, memory limit 2.00 GiB", means)
    assert re.match(r"shard 00001 is done: .* tokens/s\), [\d.]+ s of CPU, ", done)


def test_a_part_of_many_files_is_named_by_its_first_ones_and_its_last(prep: Prep, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    for number in range(7):
        (raw / f"{number}.txt").write_text("a text\n")
    plan = prep.plan(raw, tmp_path / "data", num_shards=1)
    assert part_line(plan, plan.shard(0)).endswith(f"49 B of {raw}: 0.txt, 1.txt, ..., 6.txt (7 files)")
    moved = plan.at(tmp_path)
    assert f" of {tmp_path}: " in part_line(moved, moved.shard(0)), "where the raw folder moved"


def test_a_part_that_is_no_bytes_of_text_says_what_its_bytes_are(prep: Prep, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    texts = [f"text {number} " + "word " * 50 for number in range(400)]
    pq.write_table(pyarrow.table({"text": texts}), raw / "a.parquet", row_group_size=50)
    with pyarrow.ipc.new_stream(str(raw / "b.arrow"), pyarrow.schema([("text", pyarrow.string())])) as writer:
        writer.write_table(pyarrow.table({"text": texts}), max_chunksize=50)
    (raw / "c.txt.gz").write_bytes(bgzip("".join(text + "\n" for text in texts).encode(), [5000]))
    plan = prep.plan(raw, tmp_path / "data", num_shards=7)
    lines = " ".join(part_line(plan, plan.shard(number)) for number in range(7))
    for name in ("a.parquet", "b.arrow", "c.txt.gz"):
        assert re.search(rf"{re.escape(name)} file bytes \d+ to \d+", lines)
        assert f"{name} bytes" not in lines


@pytest.mark.processes
def test_run_says_for_each_shard_its_speed_and_the_engine_once(prep: Prep, data_dir: Path) -> None:
    ended = prep.command("run", data_dir, "--num_proc", "2")
    assert ended.code == 0, ended.text
    lines = ended.text.splitlines()
    assert len([line for line in lines if line.startswith("gigatoken ")]) == 1
    made = sorted(line for line in lines if " is done: " in line)
    assert [line[:11] for line in made] == [f"shard {number:05d}" for number in range(5)]
    assert re.search(
        r"^5 of 5 shards made by 2 .*: [\d,]+ documents, [\d,]+ tokens in .* tokens/s\)$", lines[-1]
    )


def test_progress_counts_documents_and_tokens_beside_the_bytes(prep: Prep, data_dir: Path) -> None:
    plan = need_plan(data_dir)
    worker = load_worker(plan, data_dir, WorkerSettings(memory_gb=0.01), num_cpus=1, warn=lambda _: None)
    told: list[Work] = []
    manifest = worker.run_shard(worker.plan.shard(0), told.append)
    assert len(told) > 1
    assert sum(work.num_bytes for work in told) == manifest.counts.input_bytes
    assert 0 < sum(work.num_documents for work in told) <= manifest.counts.num_documents
    assert 0 < sum(work.num_tokens for work in told) <= manifest.counts.num_tokens


def test_a_log_line_has_the_speeds_of_what_else_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = progress_line("x", 5_000_000, 10_000_000, "bytes", 2.0, {"documents": 100, "tokens": 3_000_000})
    assert line == "x: 50% of 10.0 MB, 2.50 MB/s, 50 documents/s, 1.50 M tokens/s, 2 s left"
    monkeypatch.setattr(console, "LOG_EVERY_S", 0.0)
    with console.Progress("x", 10) as progress:
        progress.add(5, {"tokens": 7})
        progress.add(5, {"tokens": 7})
    assert all(" tokens/s, " in line for line in capsys.readouterr().err.splitlines())


def test_a_worker_that_may_have_less_memory_than_it_needs_is_told(prep: Prep, data_dir: Path) -> None:
    ended = prep.command("--shard_id", 0, "--output_dir", data_dir, "--memory_gb", "0.2")
    assert "note: a worker needs about 0.31 GB" in ended.text
    enough = prep.command("--shard_id", 1, "--output_dir", data_dir, "--memory_gb", "0.4")
    assert "note: " not in enough.text


def test_numbers_are_short_and_keep_three_digits() -> None:
    cases = {0: "0", 7: "7", 999: "999", 1000: "1.00 k", 12_345: "12.3 k", 999_949: "1.00 M", 2.5e9: "2.50 G"}
    assert {value: short_number(value) for value in cases} == cases
    assert (short_bytes(512), short_bytes(123_456), short_bytes(6.6e15)) == ("512 B", "123 kB", "6.60 PB")


def test_times_and_counts_are_as_a_person_writes_them() -> None:
    cases = {0.05: "0.05 s", 59.4: "59.4 s", 59.6: "1 min 00 s", 303: "5 min 03 s", 900: "15 min"}
    cases |= {7500: "2 h 05 min", 4_442_400: "1,234 h"}
    assert {seconds: short_time(seconds) for seconds in cases} == cases
    assert [counted(number, "shard") for number in (0, 1, 2500)] == ["0 shards", "1 shard", "2,500 shards"]
