"""slurm.submit_with_submitit by real submitit executors that need no cluster.

test_slurm_operations.py has one on a real cluster, where an array has a limit and a job is preempted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shardprep.errors import ReadWriteError, UsageError
from slurm import submit_with_submitit

submitit = pytest.importorskip("submitit")
pytestmark = pytest.mark.processes


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
    with pytest.raises(UsageError):
        submit_with_submitit(data_dir, executor, shards_per_task=0)
