"""submit, status, retry and cancel on a real cluster: three nodes, accounts, cgroups, MaxArraySize=7."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT
from tests.children import child, end_of, is_living, run_child
from tests.held_children import Hold
from tests.slurm.started_cluster import FAULTY_PYTHON, Cluster, kill_node, reset_cluster, started_cluster
from tests.waiting import wait_until
from tests.world import World

pytestmark = [pytest.mark.long, pytest.mark.slurm]

SCRIPT = ROOT / "slurm" / "prep_array.sh"
EXTRA_CONF = """MaxArraySize=7
AccountingStorageEnforce=limits,qos
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE
PartitionName=whole Nodes=ALL OverSubscribe=EXCLUSIVE MaxTime=INFINITE"""
HAS_CGROUPS = os.access("/sys/fs/cgroup/memory", os.W_OK)
STOPPED = "stopped by a signal (75)"  # after scancel, the end of the worker may be seen first
ACCEPTING = ("--worker_args", "--max_bad_fraction 0.6")


class Seven(World):
    """A data set of seven shards, one per file, and a Python for workers with faults on demand."""

    place: Path  # folder of the faults' markers

    def arm(self, *faults: str) -> None:
        """Make workers fail: ``kill-3`` is a fault of ``FAULTY_PYTHON`` and a shard."""
        for fault in faults:
            (self.place / fault).touch()

    def submission(self, number: int = 0) -> Any:
        """Return the record of a submission."""
        return json.loads((self.data_dir / "jobs" / f"{number:04d}.json").read_text())

    def job(self) -> str:
        """Return the job array of the first submission."""
        return str(self.submission()["arrays"][0]["job_id"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings = {"NODE_CPUS": "4", "NODE_MEM_MB": "4000", "EXTRA_CONF": EXTRA_CONF}
    settings |= {"ACCOUNTING": "1", "CGROUP": str(int(HAS_CGROUPS))}
    untested = "NO SLURM CLUSTER WITH ACCOUNTS, python -m slurm is untested here"
    with started_cluster(untested, **settings) as started:
        yield Cluster(environ=started, folder=Path(started["CLUSTER_DIR"]))


@pytest.fixture
def site(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster. After each test all jobs are cancelled and all nodes resumed."""
    yield cluster
    reset_cluster(cluster.environ)


@pytest.fixture
def seven(site: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seven:
    """A plan of seven input files, one per shard. Half of the fifth is undecodable."""
    seven = Seven(tmp_path, data_dir=tmp_path / "a folder's 50%")
    for number in range(7):
        lines = [f"{number}번째 파일의 {line}번째 줄. Line {line}.".encode() for line in range(300)]
        bad = [b"\xff\xfe bad" if number == 4 and i % 2 else line for i, line in enumerate(lines)]
        seven.raw({f"{number}.txt": b"\n".join(bad)})
    seven.plan(num_shards=None)
    seven.place = tmp_path / "faults"
    seven.place.mkdir()
    python = seven.place / "python"
    python.write_text(FAULTY_PYTHON.format(real=sys.executable, place=seven.place))
    python.chmod(0o755)
    monkeypatch.setitem(site.environ, "SHARDPREP_PYTHON", str(python))
    return seven


def type_next(site: Cluster, data: Path, folder: Path) -> None:
    """Run the next command that status prints, in a folder, and wait for its jobs."""
    (line,) = re.findall(r"^next: (.*)$", site.slurm("status", data), re.MULTILINE)
    environ = {**site.environ, "PATH": f"{Path(sys.executable).parent}:{site.environ['PATH']}"}
    run_child(["bash", "-c", line], env=environ, cwd=folder)
    site.wait_until_idle()


def test_status_sees_plain_sbatch_jobs_but_a_copy_of_the_data_set_does_not(
    site: Cluster, seven: Seven, tmp_path: Path
) -> None:
    data, copy, elsewhere = seven.data_dir, tmp_path / "copy", tmp_path / "else where"
    elsewhere.mkdir()
    seven.arm("sleep-0", "sleep-1")
    array = ("--array=0-3%2", "--cpus-per-task=1", "--mem=500", f"--output={elsewhere}/%a.log")
    job = site.run("sbatch", "--parsable", *array, SCRIPT, data)
    wait_until(lambda: not list(seven.place.glob("sleep-*")))
    state = site.status(data)
    assert (state["running"], state["pending"], state["not_submitted"]) == ("0-1", "2-3", "4-6")
    assert "shards_of=(4 5 6)" in site.slurm("submit", data, "--cpus_per_task", 1, "--dry_run")

    shutil.copytree(data, copy)
    assert site.status(copy)["not_submitted"] == "0-6"
    site.slurm("cancel", copy)
    assert site.tasks(f"{job}_0")[0]["JobState"] == "RUNNING"

    site.slurm("cancel", data)
    site.wait_until_idle()
    state = site.status(data)
    assert (state["failed"], state["done"]) == ("0-1", "")
    assert set(state["causes"]) <= {"CANCELLED", STOPPED}
    type_next(site, data, elsewhere)
    assert site.status(data)["done"] == "0-3,5-6"


def test_until_done_recovers_from_every_kind_of_failure(site: Cluster, seven: Seven, tmp_path: Path) -> None:
    """OOM, time limit, scancel, a node failure with a surviving worker, kill -9, a set-up that exits.

    Slurm checks time limits every 30 s from its start, so a short test comes before this one.
    """
    data, place = seven.data_dir, seven.place
    seven.arm("memory-0", "first-0", "sleep-1", "sleep-2", "survive-3", "kill-5", "setup-6")
    setup = tmp_path / "set up.sh"
    setup.write_text(f"[[ -z ${{shards:-}} ]] || ! rm '{place}'/setup-$shards 2>/dev/null || exit 3\n")
    request = ("--cpus_per_task", 4, "--mem_gb", 0.2, "--time_min", 1, "--sbatch_args", "--no-requeue")
    site.slurm("submit", data, *request, *ACCEPTING, "--setup", setup, "--until_done")
    job = seven.job()
    wait_until(lambda: not list(place.glob("sleep-*")))
    site.run("scontrol", "update", f"jobid={job}_1", "endtime=now+1")
    site.run("scancel", f"{job}_2")
    wait_until((place / "surviving").exists)
    (node,) = site.run("squeue", "-h", f"--jobs={job}_3", "--format=%N").split()
    kill_node(site.environ, node)
    wait_until((data / "jobs" / "0001.json").exists)
    (place / "release").touch()  # now shard 3 has two writers
    site.wait_until_idle()

    state = site.status(data)
    assert state["verified"], site.slurm("status", data)
    assert state["history"][-1]["event"] == "finished"
    causes = state["history"][1]["causes"]
    expected = {
        "OUT_OF_MEMORY": "0",
        "TIMEOUT": "1",
        "CANCELLED": "2",
        "NODE_FAIL": "3",
        "killed by signal 9": "5",
        "the set-up file ended the task": "6",
    }
    if not HAS_CGROUPS:
        expected["killed by signal 9"] = "0,5"
        del expected["OUT_OF_MEMORY"]
    assert {cause.replace(STOPPED, "CANCELLED"): ids for cause, ids in causes.items()} == expected
    arrays = seven.submission(1)["arrays"]
    asked = {array["tasks"][0]: (array["mem_mb"], array["time_min"]) for array in arrays}
    assert asked["1"] == (205, 2), "twice the time"
    if HAS_CGROUPS:
        assert asked["0"] == (410, 1), "twice the memory"
    assert list((data / "jobs" / "attempts").iterdir()) == [], "done shards keep no records"
    assert (data / "report.html").exists()
    undisturbed = World(tmp_path / "undisturbed", raw_dir=seven.raw_dir)
    assert seven.contents() == undisturbed.plan(num_shards=None, max_bad_fraction=0.6).run().contents()


def test_a_limit_of_nodes_is_refused_and_one_of_a_qos_makes_larger_tasks(site: Cluster, seven: Seven) -> None:
    """The limit leaves room for the controller."""
    refusals = {
        ("--cpus_per_task", 40): "--cpus-per-task=40",
        ("--mem_gb", 99): "--mem=101376M",
        ("--partition", "gone"): "gone",
    }
    for flags, named in refusals.items():
        assert named in site.slurm("submit", seven.data_dir, "--cpus_per_task", 1, *flags, code=2)
    assert not (seven.data_dir / "jobs").exists()
    assert site.run("squeue", "-h", "--states=PENDING") == ""
    modify = ("sacctmgr", "--immediate", "modify", "qos", "normal", "set")
    site.run(*modify, "MaxSubmitJobsPerUser=4")
    try:
        site.slurm("submit", seven.data_dir, "--cpus_per_task", 1, "--mem_gb", 1, *ACCEPTING, "--until_done")
        assert len(seven.submission()["arrays"][0]["tasks"]) <= 2, "the limit is four jobs"
        site.wait_until_idle()
    finally:
        site.run(*modify, "MaxSubmitJobsPerUser=-1")
    state = site.status(seven.data_dir)
    assert (state["done"], state["verified"], state["history"][-1]["event"]) == ("0-6", True, "finished")


def test_preempted_tasks_restart_and_manifests_count_the_restarts(site: Cluster, seven: Seven) -> None:
    seven.arm("sleep-0", "sleep-1", "sleep-2")
    site.slurm("submit", seven.data_dir, "--cpus_per_task", 4, "--mem_gb", 1, *ACCEPTING)
    wait_until(lambda: not list(seven.place.glob("sleep-*")))
    site.run("sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true")
    wait_until((seven.data_dir / "index.json").exists)
    state = site.status(seven.data_dir)
    assert (state["done"], state["failed"], state["verified"]) == ("0-6", "", True)
    made = [manifest["run"]["slurm"] for manifest in seven.manifests()]
    assert [each.get("SLURM_RESTART_COUNT") for each in made].count("1") == 3, made
    assert seven.temporaries() == []


def test_a_job_of_two_nodes_goes_on_when_one_dies_and_another_joins_late(
    site: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard is made once, but for the one on the node that dies. Small jobs run in another partition."""
    world = World(tmp_path).raw({"a.txt": "a line\n" * 400}).plan(num_shards=8)
    expected = world.copy(tmp_path / "alone").run().contents()
    data = world.data_dir
    late = [sys.executable, "-m", "preprocess", "run", str(data), "--part=2/3", "--num_proc=1"]
    late_environ = dict(site.environ)
    hold = Hold(tmp_path, "open", r"(^|/)\.shard-\d+\.idx\.")
    for name, value in hold.environ().items():
        monkeypatch.setitem(site.environ, name, value)
    partitions = ("--partition", "whole", "--small_partition", "cpu")
    site.slurm("submit", data, "--nodes", 2, *partitions, "--worker_args", "--num_proc 1", "--until_done")
    sent = json.loads((data / "jobs" / "0000.json").read_text())["arrays"][0]
    held = {_node_of(pid): pid for pid in hold.wait(2)}
    assert len(held) == 2, "a process on each node"

    with child(["srun", "--partition=whole", "--nodes=1", *late], env=late_environ, stderr=-2) as joined:
        wait_until(lambda: len(world.manifests()) == 6)
        (batch_host,) = set(
            re.findall(r"BatchHost=(\S+)", site.run("scontrol", "show", "job", sent["job_id"]))
        )
        (dying,) = set(held) - {batch_host}
        kill_node(site.environ, dying)
        os.kill(held[dying], signal.SIGKILL)
        hold.release()
        of_late = end_of(joined)
    wait_until((data / "report.html").exists)
    site.wait_until_idle()
    state = site.status(data)
    assert (state["verified"], state["history"][-1]["event"]) == (True, "finished")
    assert not (data / "jobs" / "0001.json").exists(), "nothing was sent again"
    assert world.contents() == expected
    assert world.temporaries() == []
    (log,) = [path.read_text() for path in (data / "jobs" / "logs").glob(f"{sent['job_id']}_*.log")]
    made = re.findall(r"part \d of \d: (\d+) shards? made", log + of_late)
    assert 8 <= sum(map(int, made)) <= 9, log + of_late
    assert sent["time_min"] == 11, "computed from the size and the nodes"


def _node_of(pid: int) -> str:
    (node,) = re.findall(r"SLURMD_NODENAME=([^\0]+)", Path(f"/proc/{pid}/environ").read_text())
    return str(node)


def test_submitit_makes_forty_shards_within_maxarraysize_and_after_a_preemption(
    site: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """submitit has Slurm send USR2 before a time limit or a preemption."""
    submitit = pytest.importorskip("submitit")
    from slurm import submit_with_submitit

    world = World(tmp_path).raw({"a.txt": "a line\n" * 400}).plan(num_shards=40)
    hold = Hold(tmp_path, "open", r"(^|/)\.shard-\d+\.idx\.")
    for name, value in {**hold.environ(), "SLURM_CONF": site.environ["SLURM_CONF"]}.items():
        monkeypatch.setenv(name, value)
    executor = submitit.AutoExecutor(folder=tmp_path / "log", cluster="slurm")
    executor.update_parameters(timeout_min=60, cpus_per_task=1, mem_gb=1)
    jobs = submit_with_submitit(world.data_dir, executor)
    assert len(jobs) == 7, "MaxArraySize"
    held = hold.wait(1)[0]
    environ = Path(f"/proc/{held}/environ").read_text()
    task = "_".join(re.findall(rf"SLURM_ARRAY_{name}_ID=(\d+)", environ)[0] for name in ("JOB", "TASK"))
    # Slurm refuses a signal until it considers the task started, which may be after its worker has begun.
    signal = ["scancel", "--signal=USR2", task]
    wait_until(lambda: subprocess.run(signal, env=site.environ, check=False).returncode == 0)
    wait_until(lambda: not is_living(held))
    hold.release()
    found = [manifest for job in jobs for manifest in job.result()]
    assert [manifest.shard_id for manifest in found] == list(range(40))
    assert world.temporaries() == []
    assert submit_with_submitit(world.data_dir, executor) == []


@pytest.mark.skipif(not HAS_CGROUPS, reason="without cgroups Slurm does not limit memory")
def test_the_next_command_of_status_gives_plain_tasks_more_memory(
    site: Cluster, seven: Seven, tmp_path: Path
) -> None:
    world = World(tmp_path / "plain", raw_dir=seven.raw_dir).plan(num_shards=2, max_bad_fraction=0.6)
    seven.arm("memory-0")
    flags = ("--array=0-1", "--cpus-per-task=1", "--mem=200", "--time=1", f"--output={tmp_path}/%a.log")
    site.run("sbatch", *flags, SCRIPT, world.data_dir)
    site.wait_until_idle()
    assert site.status(world.data_dir)["causes"] == {"OUT_OF_MEMORY": "0"}
    type_next(site, world.data_dir, Path("/"))
    assert site.status(world.data_dir)["verified"]


_AS_NOBODY = """
if ! setpriv --reuid 65534 --regid 65534 --clear-groups "$2" --version >/dev/null 2>&1; then
  # Python is below root's home, which others cannot read. Make it accessible in this mount namespace only.
  mount --bind "$1" /mnt && mount -t tmpfs -o mode=755 tmpfs /root
  mkdir -p "$1" && mount --bind /mnt "$1"
fi
exec setpriv --reuid 65534 --regid 65534 --clear-groups "${@:2}"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_sees_the_state_but_cannot_cancel_or_retry(site: Cluster, seven: Seven) -> None:
    """Also: a done task that is requeued does not change its shard."""
    data = seven.data_dir = Path(shutil.move(seven.data_dir, site.folder / "of root"))  # others can read it
    seven.arm("sleep-0", "kill-5")
    site.slurm("submit", data, "--cpus_per_task", 1)
    wait_until(lambda: len(list(data.glob("shard-*.json"))) == 4)
    wait_until(lambda: site.status(data)["failed"] == "4-5")
    before, job = seven.contents(), seven.job()
    site.slurm("submit", data, "--shards", "0-3")
    assert not (data / "jobs" / "0001.json").exists(), "these shards are running or done"
    wait_until(lambda: site.tasks(f"{job}_1")[1]["JobState"] == "COMPLETED")
    site.run("scontrol", "requeue", f"{job}_1")
    as_nobody = ["unshare", "--mount", "bash", "-c", _AS_NOBODY, "_", sys.base_prefix, sys.executable]

    def nobody(*words: object, code: int = 0) -> str:
        command = [*as_nobody, "-m", "slurm", *map(str, words)]
        return run_child(command, env=site.environ, stderr=subprocess.STDOUT, code=code).stdout

    def seen() -> tuple[int, str, str]:
        state = json.loads(nobody("status", data, "--json").splitlines()[-1])
        return state["num_done"], state["running"], state["failed"]

    assert seen() == (4, "0", "4-5")
    for words in (["cancel", data], ["cancel", data, "--shards", 0]):
        assert nobody(*words, code=2).startswith("error: root ")
    nobody("retry", data, code=73)
    assert "killed by signal 9" in nobody("logs", data, 5)
    assert json.loads(nobody("report", data, "--json"))["shards"]["num_done"] == 4
    assert site.status(data)["running"] == "0", "nothing was cancelled"
    site.slurm("cancel", data)
    site.wait_until_idle()
    causes = site.status(data)["causes"]
    assert "0" in (causes.get("CANCELLED"), causes.get(STOPPED)), causes
    assert seven.contents() == before
    assert "shardprep " not in nobody("status", data).splitlines()[-1], "a command would be refused"
    (data / "jobs").chmod(0o700)  # as with umask 077
    assert seen() == (4, "", "")
    nobody("retry", data, code=74)
    data.chmod(0o700)
    for command in ("status", "report", "cancel"):
        assert "chmod -R a+rX" in nobody(command, data, code=74)
