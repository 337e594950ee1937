"""``run`` makes what is missing, in several processes, whatever happens to one of them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.children import end_of, is_living
from tests.held_children import Hold

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def made_dir(prep: Prep, planned_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The planned folder with all of its 5 shards, made one after the other."""
    folder = tmp_path_factory.mktemp("made") / "data"
    shutil.copytree(planned_dir, folder)
    prep.make(folder)
    return folder


def done(folder: Path) -> list[int]:
    return [int(path.stem[6:]) for path in sorted(folder.glob("shard-*.json"))]


def test_it_makes_the_missing_shards_and_leaves_the_others_alone(
    prep: Prep, data_dir: Path, made_dir: Path
) -> None:
    prep.make(data_dir, 1, 3)
    (data_dir / "shard-00003.idx").unlink()
    before = (data_dir / "shard-00001.tar").stat().st_ino
    ended = prep.command("run", data_dir)
    assert ended.code == 0, ended.text
    assert "1 of 5 shards are done already" in ended.text
    assert "4 of 4 shards made" in ended.text
    assert (data_dir / "shard-00001.tar").stat().st_ino == before
    assert prep.contents(data_dir) == prep.contents(made_dir)
    assert prep.temporaries(data_dir) == []
    again = prep.command("run", data_dir)
    assert (again.code, again.text) == (0, "5 of 5 shards are done already\n")


def test_it_makes_only_the_shards_asked_for(prep: Prep, data_dir: Path) -> None:
    ended = prep.command("run", data_dir, "--shards", "0-1,4")
    assert ended.code == 0, ended.text
    assert done(data_dir) == [0, 1, 4]
    refused = prep.command("run", data_dir, "--shards", "3-5")
    assert refused.code == 2
    assert "expected ids of 0 to 4" in refused.text


@pytest.mark.parametrize(
    ("flags", "environ", "num_proc"),
    [
        (["--num_proc", "3"], {}, 3),
        (["--num_proc", "6"], {}, 5),
        ([], {"DATASET_NUM_PROC": "1"}, 1),
        (["--num-proc", "2"], {"DATASET_NUM_PROC": "4"}, 2),
    ],
    ids=str,
)
def test_flag_then_environment_decide_the_number_of_processes(
    prep: Prep, data_dir: Path, made_dir: Path, flags: list[str], environ: dict[str, str], num_proc: int
) -> None:
    ended = prep.cli("run", data_dir, *flags, env=environ)
    assert ended.code == 0, ended.text
    assert f"5 of 5 shards made by {num_proc} process" in ended.text
    assert prep.contents(data_dir) == prep.contents(made_dir)


def test_no_process_and_no_plan_are_refused(prep: Prep, data_dir: Path, tmp_path: Path) -> None:
    assert prep.command("run", data_dir, "--num_proc", "0").code == 2
    assert prep.cli("run", data_dir, env={"DATASET_NUM_PROC": "none"}).code == 2
    ended = prep.command("run", tmp_path)
    assert (ended.code, "run: shardprep plan" in ended.text) == (66, True)
    ended = prep.command("run", tmp_path / "nope")
    assert ended.code == 66
    assert str(tmp_path / "nope") in ended.text
    assert "run: shardprep plan" in ended.text
    (tmp_path / "a.txt").write_text("a line\n")  # the folder of raw text in place of the data set
    place = f"--input_dir {tmp_path} --output_dir {tmp_path}_shards --model_id"
    assert place in prep.command("run", tmp_path).text


def test_the_input_may_have_moved(prep: Prep, sample_dir: Path, tmp_path: Path) -> None:
    raw = Path(shutil.copytree(sample_dir, tmp_path / "raw"))
    prep.plan(raw, tmp_path / "data", num_shards=2)
    raw.rename(tmp_path / "moved")
    gone = prep.command("run", tmp_path / "data")
    assert gone.code == 66
    assert "if the raw folder moved, pass --input_dir" in gone.text
    assert prep.command("run", tmp_path / "data", "--input_dir", tmp_path / "moved").code == 0


def test_a_shard_that_fails_does_not_stop_the_others(prep: Prep, sample_dir: Path, tmp_path: Path) -> None:
    raw = Path(shutil.copytree(sample_dir, tmp_path / "raw"))
    bad, gone = sorted(raw.iterdir())[1:3]
    bad.write_bytes(bad.read_bytes() + b"\xff\n" * 20)
    prep.plan(raw, tmp_path / "data")
    gone.unlink()
    ended = prep.command("run", tmp_path / "data", "--num_proc", "2")
    assert ended.code == 65, ended.text
    assert done(tmp_path / "data") == [0, 3, 4, 5]
    assert "shard 00001 failed (65): " in ended.text
    assert "shard 00002 failed (66): " in ended.text
    assert "4 of 6 shards made by 2 processes" in ended.text
    again = "failed: shards 1-2; the same input fails in the same way: do what the lines above say, then: "
    assert f"{again}shardprep run {tmp_path / 'data'} --shards 1-2" in ended.text
    assert prep.temporaries(tmp_path / "data") == []


@pytest.fixture(scope="module")
def four_dir(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of four shards."""
    folder = tmp_path_factory.mktemp("four")
    prep.plan(sample_dir, folder, num_shards=4)
    return folder


@contextlib.contextmanager
def running(prep: Prep, folder: Path) -> Iterator[tuple[subprocess.Popen[str], dict[int, int], Hold]]:
    """``run`` with two processes, each held in the middle of a shard: also {shard: process id}."""
    hold = Hold(folder.with_name("held"), "open", r"/\.shard-\d+\.idx\.")
    run = prep.start("run", folder, "--num_proc", 2, env=hold.environ())
    try:
        pids = hold.wait(2, run)
        names = [path.name for path in folder.glob(".shard-*.tar.*.tmp")]
        found = [re.fullmatch(r"\.shard-(\d+)\.tar\..+-(\d+)-\w+\.tmp", name) for name in names]
        workers = {int(match[1]): int(match[2]) for match in found if match}
        assert sorted(workers.values()) == pids
        yield run, workers, hold
    finally:
        run.kill()
        run.communicate()


def test_a_killed_process_fails_its_shard_alone_and_the_printed_command_makes_it(
    prep: Prep, four_dir: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(four_dir, tmp_path / "data"))
    with running(prep, folder) as (run, workers, hold):
        killed = max(workers)
        os.kill(workers[killed], signal.SIGKILL)
        hold.release()
        text = end_of(run, code=74)
    assert f"shard {killed:05d} failed (74): its process was killed by signal 9 (out of memory?)" in text
    assert done(folder) == [shard_id for shard_id in range(4) if shard_id != killed]
    again = re.search(rf"error: failed: shards? {killed}; run again: shardprep (run .*)", text)
    assert again
    assert prep.command(*again[1].split()).code == 0
    assert done(folder) == [0, 1, 2, 3]
    assert prep.temporaries(folder) == []


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda item: item.name
)
def test_a_signal_stops_the_processes_too_and_leaves_nothing_unfinished(
    prep: Prep, four_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    folder = Path(shutil.copytree(four_dir, tmp_path / "data"))
    with running(prep, folder) as (run, workers, _):
        run.send_signal(number)
        text = end_of(run, code=75)
    assert f"stopped by {number.name}" in text
    assert "Traceback" not in text
    assert not any(is_living(pid) for pid in workers.values())
    assert prep.temporaries(folder) == []
    assert not list(folder.glob("shard-*"))
