"""slurm/train_ddp.sh with examples/train_llama.py: two nodes, a time limit, and on with one node."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.checkout import ROOT
from tests.held_children import Hold
from tests.slurm.started_cluster import ENDED, Cluster
from tests.waiting import wait_until
from tests.warm_python import WarmPython

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.slurm

SCRIPT = ROOT / "slurm" / "train_ddp.sh"
PROGRAM = ROOT / "examples" / "train_llama.py"
FLAGS = (
    *("--global_batch_size", "8", "--batch_size", "2", "--seq_len", "64", "--num_workers", "0"),
    *("--num_threads", "1", "--log_batches"),
)


def has_daemon(job: str) -> bool:
    """Whether Slurm still watches a run of the job on one of its nodes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(f"slurmstepd: [{job}.".encode()):
                return True
    return False


def log_of(site: Cluster, job: str) -> str:
    path = site.folder / f"train-{job}.log"
    return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def site(plain_cluster: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(environ=dict(plain_cluster), folder=tmp_path_factory.mktemp("desk"))


def train(site: Cluster, data: Path, checkpoints: Path, *flags: object) -> str:
    """Return the job of a training on two nodes."""
    sizes = ("--nodes=2", "--ntasks-per-node=1")
    return site.run("sbatch", "--parsable", *sizes, SCRIPT, PROGRAM, data, checkpoints, *FLAGS, *flags)


@pytest.fixture(scope="module")
def warm(site: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """For runs without Slurm."""
    modules = ["transformers", "loader.dataloader"]
    with WarmPython(tmp_path_factory.mktemp("warm"), modules, site.environ) as server:
        yield server


@pytest.fixture(scope="module")
def data(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prep.plan(sample_dir, folder, num_shards=4)
    prep.make(folder)
    assert prep.command("verify", folder).code == 0
    return folder


def steps_of(checkpoints: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (checkpoints / "log.jsonl").read_text().splitlines()]


def test_a_run_that_is_cut_goes_on_on_one_node_as_if_unbroken(
    site: Cluster, data: Path, warm: WarmPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """USR1, a checkpoint, a requeue, and the same batches and losses on half the nodes."""
    checkpoints, num_steps = site.folder / "cut", 12
    flags = ("--num_steps", num_steps, "--save_every", 1000)
    hold = Hold(tmp_path, "open", r"/log\.jsonl$")  # of rank 0, behind its third step
    with monkeypatch.context() as patch:
        for name, value in hold.environ(number=3).items():
            patch.setitem(site.environ, name, f"{value}:{ROOT}" if name == "PYTHONPATH" else value)
        job = train(site, data, checkpoints, *flags)
    hold.wait(1)
    site.run("scontrol", "update", "partitionname=cpu", "state=down")  # it begins once it was changed
    site.run("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: list(checkpoints.glob(".stop-*")))
    hold.release()
    unbroken = site.folder / "unbroken"
    site.run(warm.python, PROGRAM, data, unbroken, *FLAGS, *flags)
    wait_until(lambda: site.tasks(job)[0]["JobState"] in {"PENDING", *ENDED})
    assert site.tasks(job)[0]["JobState"] == "PENDING", log_of(site, job)
    wait_until(lambda: not has_daemon(job))  # its word of the first end may come late
    site.run("scontrol", "update", f"jobid={job}", "numnodes=1", "numtasks=1")
    site.run("scontrol", "update", "partitionname=cpu", "state=up")
    last = site.ended(job)[0]
    log = log_of(site, job)
    assert last["JobState"] == "COMPLETED", f"{last}\n{log}"
    assert (last["Restarts"], last["NumNodes"]) == ("1", "1")
    assert "rank 0 of 2 (RANK/WORLD_SIZE), from step 0" in log
    assert "rank 0 of 1 (RANK/WORLD_SIZE), from step 3" in log
    ours, theirs = steps_of(checkpoints), steps_of(unbroken)
    assert [line["step"] for line in ours] == list(range(1, num_steps + 1)), "no step twice or lost"
    assert [line["batch"] for line in ours] == [line["batch"] for line in theirs]
    assert re.search(r"step 10: loss .* tokens/s, waited .*% for data, at step 10 of", log)
    assert len({line["batch"] for line in theirs}) == num_steps, "the hashes tell batches apart"
    for line, other in zip(ours, theirs, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_ranks_that_get_the_term_with_all_their_workers_save_and_the_run_goes_on_as_if_unbroken(
    site: Cluster, data: Path, warm: WarmPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a preemption or scancel sends it: to every process of the job's steps."""
    monkeypatch.setitem(site.environ, "SHARDPREP_MAX_REQUEUES", "0")
    checkpoints, unbroken = site.folder / "term", site.folder / "not_stopped"
    workers = ("--num_workers", 1)
    endless = ("--num_steps", 1000, "--save_every", 1000, "--step_sleep_s", 0.3)
    job = train(site, data, checkpoints, *workers, *endless)
    log = checkpoints / "log.jsonl"
    wait_until(
        lambda: (
            site.tasks(job)[0]["JobState"] == "FAILED" or (log.exists() and len(steps_of(checkpoints)) > 2)
        )
    )
    site.run("scancel", "--signal=TERM", job)
    last = site.ended(job)[0]
    assert (last["JobState"], last["ExitCode"]) == ("FAILED", "75:0"), log_of(site, job)
    assert "(SHARDPREP_MAX_REQUEUES): not again" in log_of(site, job), "there is a newer checkpoint"
    num_steps = len(steps_of(checkpoints)) + 3
    for folder in (checkpoints, unbroken):
        site.run(warm.python, PROGRAM, data, folder, *FLAGS, *workers, "--num_steps", num_steps)
    ours, theirs = steps_of(checkpoints), steps_of(unbroken)
    assert [(line["step"], line["batch"]) for line in ours] == [
        (line["step"], line["batch"]) for line in theirs
    ]


def test_torchrun_starts_its_ranks_on_two_nodes(
    site: Cluster, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder with a preprocess.py and a loader.py, which torchrun's ``python -m`` looks into first."""
    for name in ("preprocess", "loader"):
        (site.folder / f"{name}.py").write_text("raise SystemExit('the old script')")
    monkeypatch.setitem(site.environ, "SHARDPREP_LAUNCHER", "torchrun")
    job = train(site, data, site.folder / "torchrun", "--num_steps", 2)
    assert site.ended(job)[0]["JobState"] == "COMPLETED", log_of(site, job)
    assert "rank 0 of 2 (RANK/WORLD_SIZE), from step 0" in log_of(site, job)


def test_on_a_cluster_without_accounts_the_whole_way_works(
    prep: Prep, site: Cluster, sample_dir: Path, tmp_path: Path
) -> None:
    """Here, because this cluster has none. The first try finds no input, the retry is told where it is."""
    raw, data = tmp_path / "raw", tmp_path / "O"
    shutil.copytree(sample_dir, raw)
    prep.plan(raw, data, num_shards=3)
    moved = raw.rename(tmp_path / "moved")

    first = site.slurm("submit", data, "--cpus_per_task", 1, "--wait", code=74)
    assert f"warning: {raw} cannot be seen from here" in first
    assert "failed, no such input or shard (66): shards 0-2" in first
    site.slurm("retry", data, "--worker_args", f"--input_dir {moved}", "--wait")
    state = site.status(data)
    assert (state["done"], state["verified"]) == ("0-2", True)
