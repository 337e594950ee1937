"""``run`` makes what is missing, in several processes, whatever happens to one of them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.waiting import HANG_S

if TYPE_CHECKING:
    from tests.conftest import Prep


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
        (["--num_proc", "9"], {}, 5),
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
    assert f"5 of 5 shards made by {num_proc} process(es)" in ended.text
    assert prep.contents(data_dir) == prep.contents(made_dir)


def test_no_process_is_refused(prep: Prep, data_dir: Path) -> None:
    assert prep.command("run", data_dir, "--num_proc", "0").code == 2
    assert prep.cli("run", data_dir, env={"DATASET_NUM_PROC": "none"}).code == 2


def test_a_folder_without_a_plan_is_66(prep: Prep, tmp_path: Path) -> None:
    ended = prep.command("run", tmp_path)
    assert ended.code == 66
    assert "has no plan.json; run: python -m preprocess plan" in ended.text


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
    assert "4 of 6 shards made by 2 process(es)" in ended.text
    again = f"failed: 1-2; run again: python -m preprocess run {tmp_path / 'data'} --shards 1-2"
    assert again in ended.text
    assert prep.temporaries(tmp_path / "data") == []


@pytest.fixture(scope="module")
def slow_dir(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of four shards of 2 MB each: a second each for the slow engine."""
    raw, folder = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("slow")
    text = b"".join(path.read_bytes() for path in sorted(sample_dir.iterdir()))
    for number in range(4):
        (raw / f"{number}.txt").write_bytes(text * 5)
    prep.plan(raw, folder, engine="tokenizers")
    return folder


@contextlib.contextmanager
def running(prep: Prep, folder: Path) -> Iterator[tuple[subprocess.Popen[str], dict[int, int]]]:
    """``run`` with two processes, each in the middle of a shard: also {shard: process id}."""
    run = prep.start("run", folder, "--num_proc", 2, "--engine", "tokenizers")
    try:
        deadline = time.monotonic() + HANG_S
        workers: dict[int, int] = {}
        while len(workers) < 2:
            assert time.monotonic() < deadline
            assert run.poll() is None, run.communicate()[0]
            names = [path.name for path in folder.glob(".shard-*.tar.*.tmp")]
            found = [re.fullmatch(r"\.shard-(\d+)\.tar\..+-(\d+)-\w+\.tmp", name) for name in names]
            workers = {int(match[1]): int(match[2]) for match in found if match}
            time.sleep(0.002)
        assert len(set(workers.values())) == 2
        yield run, workers
    finally:
        run.kill()
        run.communicate()


def is_living(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def after_kill(
    prep: Prep, slow_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int, int, str]:
    """A run of which one process was killed by SIGKILL: folder, that one's shard, exit code, words."""
    folder = Path(shutil.copytree(slow_dir, tmp_path_factory.mktemp("killed") / "data"))
    with running(prep, folder) as (run, workers):
        killed = max(workers)
        os.kill(workers[killed], signal.SIGKILL)
        text, _ = run.communicate(timeout=HANG_S)
    return folder, killed, run.returncode, text


def test_a_killed_process_fails_its_shard_alone_and_the_printed_command_makes_it(
    prep: Prep, after_kill: tuple[Path, int, int, str]
) -> None:
    made, killed, code, text = after_kill
    assert code == 74, text
    assert done(made) == [shard_id for shard_id in range(4) if shard_id != killed]
    again = re.search(rf"error: failed: {killed}; run again: python -m preprocess (run .*)", text)
    assert again
    assert prep.command(*again[1].split()).code == 0
    assert done(made) == [0, 1, 2, 3]
    assert prep.temporaries(made) == []


def test_how_a_process_was_killed_is_told(after_kill: tuple[Path, int, int, str]) -> None:
    _, killed, _, text = after_kill
    assert f"shard {killed:05d} failed (74): its process was killed by signal 9 (out of memory?)" in text


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda item: item.name
)
def test_a_signal_stops_the_processes_too_and_leaves_nothing_unfinished(
    prep: Prep, slow_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    folder = Path(shutil.copytree(slow_dir, tmp_path / "data"))
    with running(prep, folder) as (run, workers):
        run.send_signal(number)
        text, _ = run.communicate(timeout=HANG_S)
    assert run.returncode == 75, text
    assert f"stopped by {number.name}" in text
    assert "Traceback" not in text
    assert not any(is_living(pid) for pid in workers.values())
    assert prep.temporaries(folder) == []
    for shard_id in range(4):
        files = {path.suffix for path in folder.glob(f"shard-{shard_id:05d}.*")}
        assert files in (set(), {".tar", ".idx", ".json"})
    assert len(done(folder)) < 4
