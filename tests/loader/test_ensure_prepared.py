"""A training job prepares its own data set: once, on one rank, and the others end when that one does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loader import ensure_prepared
from shardprep.errors import BadInput, ReadWriteError, Refused, UsageError
from shardprep.format.index import read_index
from tests.checkout import ROOT
from tests.children import is_living
from tests.held_children import Hold
from tests.waiting import HANG_S, wait_until

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes

NO_LAUNCHER = {"SLURM_JOB_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"}

RANK = """
import sys
from loader import ensure_prepared
from shardprep.errors import ShardprepError
raw, data, model, rank = sys.argv[1:]
try:
    print("ready", ensure_prepared(data, input_dir=raw, model_id=model, num_shards=5, num_proc=1,
                                   rank=int(rank), world_size=8))
except ShardprepError as error:
    print(type(error).__name__, error)
"""


class Job:
    """The ranks of one start of a training job."""

    def __init__(self, raw: Path, data: Path, model: str, *, launch: str = "1") -> None:
        self._words = [str(raw), str(data), model]
        environ = {name: value for name, value in os.environ.items() if name not in NO_LAUNCHER}
        self._environ = {**environ, "SLURM_JOB_ID": launch, "PYTHONPATH": str(ROOT)}
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *ranks: int, hold: Hold | None = None) -> Job:
        environ = {**self._environ, **(hold.environ() if hold else {})}
        environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), environ["PYTHONPATH"]])
        for rank in ranks:
            command = [sys.executable, "-c", RANK, *self._words, str(rank)]
            self.processes.append(
                subprocess.Popen(
                    command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
            )
        return self

    def ends(self) -> list[str]:
        """What each rank printed, in the order of their starts."""
        return [process.communicate(timeout=HANG_S)[0].strip() for process in self.processes]


@pytest.fixture
def start(prep: Prep, sample_dir: Path, tmp_path: Path) -> Iterator[Any]:
    """Starts a job; whatever it leaves is killed."""
    jobs: list[Job] = []

    def started(*, input_dir: Path = sample_dir, launch: str = "1") -> Job:
        jobs.append(Job(input_dir, tmp_path / "data", str(prep.model_dir), launch=launch))
        return jobs[-1]

    yield started
    for process in (process for job in jobs for process in job.processes):
        process.kill()
        process.communicate()


def num_shards(folder: Path) -> int:
    return len(read_index(folder).columns)


def test_one_rank_prepares_and_all_go_on_when_it_is_verified(start: Any, tmp_path: Path) -> None:
    job = start().start(1, 2, 0)
    assert job.ends() == [f"ready {tmp_path / 'data'}"] * 3
    assert num_shards(tmp_path / "data") == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_the_others_end_with_the_error_of_rank_0(start: Any, tmp_path: Path) -> None:
    job = start(input_dir=tmp_path / "nothing").start(0, 1)
    ends = job.ends()
    assert all(end.startswith("NotFound ") and str(tmp_path / "nothing") in end for end in ends)
    assert "rank 0" in ends[1]


Call = Callable[..., str]


@pytest.fixture
def prepared(prep: Prep, sample_dir: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Calls it in this process, which is of job 7; the plan is there."""
    for name in NO_LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def call(rank: int, **given: Any) -> str:
        options = {"num_shards": 5, "num_proc": 1, "world_size": 2, **given}
        return ensure_prepared(
            data_dir, input_dir=sample_dir, model_id=str(prep.model_dir), rank=rank, **options
        )

    return call


def test_other_options_are_refused_and_a_preprocess_py_of_the_users_own_is_not_run(
    prepared: Call, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data_dir.parent)
    (data_dir.parent / "preprocess.py").write_text("raise SystemExit('of the user')")
    assert prepared(0) == prepared(1)
    with pytest.raises(Refused, match="--append_eos"):
        prepared(1, append_eos=True)


CHANGES: dict[str, Callable[[Path], object]] = {
    "new.txt was added": lambda raw: (raw / "new.txt").write_text("more\n"),
    "ko_0.txt has": lambda raw: (raw / "ko_0.txt").write_bytes((raw / "ko_0.txt").read_bytes() + b"more\n"),
    "ko_0.txt holds": lambda raw: (raw / "ko_0.txt").write_bytes(
        (raw / "ko_0.txt").read_bytes()[:-2] + b"x\n"
    ),
    "ko_0.txt is missing": lambda raw: (raw / "ko_0.txt").unlink(),
    "no folder": shutil.rmtree,
}


@pytest.fixture
def verified(prep: Prep, sample_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Calls it for a data set that is verified, of a raw folder that the test may change."""
    raw = Path(shutil.copytree(sample_dir, tmp_path / "raw"))
    prep.plan(raw, tmp_path / "data", num_shards=2)
    prep.make(tmp_path / "data")
    for name in NO_LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def call(rank: int, **given: Any) -> str:
        options = {"num_shards": 2, "world_size": 2, **given}
        return ensure_prepared(
            tmp_path / "data", input_dir=raw, model_id=str(prep.model_dir), rank=rank, **options
        )

    return call


def test_a_raw_folder_that_is_no_longer_the_planned_one_is_refused_on_every_rank(
    verified: Call, prep: Prep, tmp_path: Path, sample_dir: Path
) -> None:
    raw = tmp_path / "raw"
    for path in raw.iterdir():
        path.touch()  # which changes nothing
    assert verified(0) == verified(1)
    # Each rank runs this command, and ends with its error.
    compare = ["--shard_id", 0, "--output_dir", tmp_path / "data", "--input_dir", raw, "--check_inputs"]
    for words, change_input in CHANGES.items():
        shutil.rmtree(raw)
        shutil.copytree(sample_dir, raw)
        change_input(raw)
        ended = prep.command(*compare)
        assert (ended.code, words in ended.text) == (78, True), ended.text
    for rank in (0, 1):
        with pytest.raises(Refused, match=str(raw)):
            verified(rank)


def test_one_rank_alone_leaves_nothing_beside_the_data_set(prepared: Call, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        prepared(0, world_size=1, seq_len=7)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_rank_says_that_it_waits_at_once_and_again_after_a_while(
    prepared: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ReadWriteError, match="limit_s"):
        prepared(1, limit_s=0.5)
    assert capsys.readouterr().err.count("rank 1: waiting for rank 0") == 1
    monkeypatch.setattr("loader.prepare._SAY_EVERY_S", 0)
    with pytest.raises(ReadWriteError, match="limit_s"):
        prepared(1, limit_s=0.5)
    assert capsys.readouterr().err.count("rank 1: waiting for rank 0") > 2


def test_impossible_settings_are_named(prepared: Call) -> None:
    with pytest.raises(UsageError, match="limit_s is 0"):
        prepared(0, limit_s=0)


@pytest.mark.parametrize("content", ["{", "[]", '{"launch": 1}', "[" * 10**5])
def test_a_note_that_nobody_can_read_says_nothing(prepared: Call, data_dir: Path, content: str) -> None:
    (data_dir.parent / ".data.failed.json").write_text(content)
    with pytest.raises(ReadWriteError, match="limit_s"):
        prepared(1, limit_s=0.2)


def test_a_failure_of_an_earlier_start_is_not_ours(prepared: Call, data_dir: Path) -> None:
    note = {"launch": "SLURM_JOB_ID=6", "exit_code": 65, "error": "long ago"}
    path = data_dir.parent / ".data.failed.json"
    path.write_text(json.dumps(note))
    with pytest.raises(ReadWriteError, match="limit_s"):
        prepared(1, limit_s=0.2)
    path.write_text(json.dumps({**note, "launch": "SLURM_JOB_ID=7"}))
    with pytest.raises(BadInput, match="long ago"):
        prepared(1, limit_s=60)
    assert prepared(0)
    assert not path.exists(), "the next start begins anew"


def test_a_killed_rank_0_leaves_what_the_next_start_goes_on_with(start: Any, data_dir: Path) -> None:
    hold = Hold(data_dir.parent, "write", r"/\.shard-\d+\.tar\.")
    job = start().start(0, hold=hold)
    hold.wait(1, job.processes[0])
    job.processes[0].kill()
    job.ends()
    assert not (data_dir / "index.json").exists()
    assert start().start(0).ends() == [f"ready {data_dir}"]
    assert num_shards(data_dir) == 5


def test_no_process_is_left_when_rank_0_is_killed(start: Any, data_dir: Path) -> None:
    hold = Hold(data_dir.parent, "write", r"/\.shard-\d+\.tar\.")
    job = start().start(0, hold=hold)
    children = hold.wait(1, job.processes[0])
    job.processes[0].kill()
    wait_until(lambda: not any(map(is_living, children)), every_s=0.01)
