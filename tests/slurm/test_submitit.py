"""slurm.submit_with_submitit by real submitit executors that need no cluster."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from shardprep.errors import ReadWriteError, UsageError
from slurm import submit_with_submitit
from tests.slurm.fake_slurm import Desk
from tests.waiting import wait_until

submitit = pytest.importorskip("submitit")
pytestmark = pytest.mark.processes


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ``map_array`` is given; nothing is submitted."""
    found: list[Any] = []

    def map_array(self: Any, function: Any, *arguments: Any) -> list[Any]:
        found.append((function, [list(each) for each in arguments]))
        return []

    monkeypatch.setattr(submitit.SlurmExecutor, "map_array", map_array)
    monkeypatch.setattr(submitit.AutoExecutor, "map_array", map_array)
    return found


def test_a_local_executors_job_gives_the_manifests_and_raises_where_a_shard_fails(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdb.post_mortem", lambda: None)  # what a DebugExecutor starts at a failure
    executor = submitit.AutoExecutor(folder=tmp_path / "log", cluster="local")
    executor.update_parameters(timeout_min=3)
    (job,) = submit_with_submitit(data_dir, executor, shards_per_task=5)
    assert [manifest.shard_id for manifest in job.result()] == [0, 1, 2, 3, 4]
    assert submit_with_submitit(data_dir, executor) == [], "nothing is missing"
    (data_dir / "shard-00003.json").unlink()
    (data_dir / "tokenizer" / "tokenizer.json").write_text("{}")
    debug = submitit.AutoExecutor(folder=tmp_path / "log", cluster="debug")
    (job,) = submit_with_submitit(data_dir, debug)
    with pytest.raises(ReadWriteError):
        job.result()


def test_an_array_is_never_longer_than_slurms_limit(desk: Desk, tmp_path: Path, given: list[Any]) -> None:
    desk.fake.answers("config", "ClusterName = test\nMaxArraySize = 2\n")
    (desk.fake.place / "bin" / "srun").symlink_to(desk.fake.place / "sbatch.sh")
    submit_with_submitit(desk.data, submitit.SlurmExecutor(folder=tmp_path / "log"))
    assert [arguments for _, arguments in given] == [[[str(desk.data)] * 2, ["0-1", "2-4"]]]
    with pytest.raises(UsageError):
        submit_with_submitit(desk.data, None, shards_per_task=0)


# Starts a process that waits, as a worker that has a temporary file to remove would.
WAITING_WORKER = """
import signal, sys, time
from pathlib import Path
place = Path(sys.argv[2])
signal.signal(signal.SIGTERM, lambda *_: (place / "temporary").unlink() or sys.exit(75))
(place / "temporary").touch()
while True:
    time.sleep(0.1)  # a signal just before a sleep does not end it
"""


def test_usr2_leaves_the_worker_alone_and_checkpoint_stops_it_and_asks_for_the_same_shards(
    given: list[Any], data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm.send._WORKER", WAITING_WORKER)
    submit_with_submitit(data_dir, submitit.AutoExecutor(folder=tmp_path / "log", cluster="local"))
    body, asked = given[0][0], list[Any]()

    def checkpoint(*_: object) -> None:
        asked.append(body.checkpoint(str(tmp_path), "0-3"))

    def disturb() -> None:
        wait_until(lambda: (tmp_path / "temporary").exists() and body._worker, every_s=0.01)
        os.kill(body._worker.pid, signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, checkpoint)
    thread = threading.Thread(target=disturb)
    try:
        thread.start()
        with pytest.raises(ReadWriteError):
            body(str(tmp_path), "0-3")
    finally:
        thread.join()
        signal.signal(signal.SIGUSR2, before)
    assert not (tmp_path / "temporary").exists(), "it cleaned up"
    (again,) = asked
    assert (type(again.function), again.args) == (type(body), (str(tmp_path), "0-3"))
