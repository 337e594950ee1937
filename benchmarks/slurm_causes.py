"""Disturb tasks on a real Slurm, and check the cause that ``shardprep status`` shows.

    python benchmarks/slurm_causes.py            as root, some eight minutes; it starts its own cluster

Tasks run out of memory and time, are killed, cancelled, preempted, held and suspended; a node is killed while
its Python goes on, DATA/jobs is emptied, and the folder of the logs is full. This prints a table of what was
done, what status said, and whether it is right. Then one ``retry`` makes the missing shards, and these are
compared with those of an undisturbed run. A QOS and a partition limit the time, a controller is renamed, and
a task is requeued by hand. Two terminals submit another data set of forty shards at once, at MaxArraySize 7;
while it runs, slurmctld is killed three times. The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardprep.format.names import ids_of_ranges

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.slurm.started_cluster import kill_node  # noqa: E402  of the checkout

STARTER = ROOT / "tests" / "slurm_cluster.sh"
# Commands wait this long for a slurmctld that was killed. A node is not drained for a step that ends slowly.
CONF = """MessageTimeout=20
UnkillableStepTimeout=900
MaxArraySize=7
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=60
AccountingStorageEnforce=limits,qos
PartitionName=main Nodes=n[1-2] MaxTime=INFINITE
PartitionName=brief Nodes=n[1-2] MaxTime=1
PartitionName=lost Nodes=n3 MaxTime=INFINITE
PartitionName=low Nodes=n4 MaxTime=INFINITE
PartitionName=grace Nodes=n5 PreemptMode=CANCEL GraceTime=20 MaxTime=INFINITE
PartitionName=urgent Nodes=n[4-5] PriorityTier=10 MaxTime=INFINITE"""
PYTHON = """#!/bin/bash
for ((i = 1; i < $#; i++)); do [[ ${{!i}} != --shard_id ]] || {{ next=$((i + 1)); shard=${{!next}}; }}; done
fault=none; [[ -z ${{shard:-}} ]] || fault=$(cat {place}/$shard 2>/dev/null); rm -f {place}/${{shard:-none}}
case $fault in
  memory) {real} -c 'import time; held = bytearray(400 << 20); time.sleep(5)'; exit 9 ;;
  kill) kill -9 $$ ;;
  survive) touch {place}/survives; until [[ -e {place}/go ]]; do sleep 0.2; done ;;
  sleep) touch {place}/sleeps-$shard; {real} -c 'import time; time.sleep(300)'; exit 9 ;;
  wait) touch {place}/waits-$shard; until [[ -e {place}/go ]]; do sleep 0.2; done ;;
esac
exec {real} "$@"
"""
HANG_S = 400


@dataclass(kw_only=True)
class Site:
    """The cluster, a folder for everything, and the rows of the table."""

    folder: Path
    environ: dict[str, str]
    rows: list[tuple[str, str, bool]] = field(default_factory=list)

    def run(self, *command: object, check: bool = True) -> str:
        done = subprocess.run(
            [str(each) for each in command],
            env=self.environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANG_S,
        )  # fmt: skip
        if check and done.returncode:
            raise SystemExit(f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def prep(self, *words: object) -> str:
        return self.run(sys.executable, "-m", "preprocess", *words)

    def slurm(self, *words: object, check: bool = True) -> str:
        return self.run(sys.executable, "-m", "slurm", *words, check=check)

    def status(self, data: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.slurm("status", data, "--json").splitlines()[0])
        return found

    def submit(self, data: Path, shards: str, partition: str, *flags: object) -> str:
        """Submit, and return the id of the array."""
        words = ("--shards", shards, "--partition", partition, "--cpus_per_task", 1, *flags)
        said = self.slurm("submit", data, *words)
        return str(re.findall(r"^job (\d+):", said, re.MULTILINE)[0])

    def arm(self, fault: str, *shard_ids: int) -> None:
        for shard_id in shard_ids:
            for mark in ("sleeps", "waits"):  # of another data set's task
                (self.folder / "faults" / f"{mark}-{shard_id}").unlink(missing_ok=True)
            (self.folder / "faults" / str(shard_id)).write_text(fault)

    def happened(self, name: str) -> bool:
        return (self.folder / "faults" / name).exists()

    def row(self, what: str, said: str, is_right: bool) -> None:
        self.rows.append((what, said, is_right))
        print(f"| {what} | {said} | {'yes' if is_right else 'NO'} |", flush=True)


def main() -> int:
    with cluster() as site:
        data, undisturbed = site.folder / "O", site.folder / "undisturbed"
        make_inputs(site, data, undisturbed)
        print(f"{site.run('sbatch', '--version').strip()}, {time.strftime('%d %B %Y')}\n")
        print("| done to it | `status` said | right? |\n|---|---|---|")
        disturb(site, data)
        done_before = stamps(data)
        look(site, data)
        asked = site.slurm("retry", data, "--shards", 1, "--partition", "brief", "--dry_run")
        times = re.findall(r"^#SBATCH --time=(\d+)$", asked, re.MULTILINE)
        site.row(
            "`retry` after a time limit, in a partition with MaxTime 1", f"--time={times}", times == ["1"] * 2
        )
        flags = ("--mem_gb", 1, "--time_min", 5, "--partition", "main", "--sbatch_args", "--exclude=n3")
        site.slurm("retry", data, *flags, "--wait")
        state = site.status(data)
        site.row("one retry", f"done {state['done']}, verified: {state['verified']}", state["verified"])
        site.prep("run", undisturbed)
        is_equal = contents(data) == contents(undisturbed)
        site.row("tars and idx against an undisturbed run", "equal" if is_equal else "not equal", is_equal)
        num_kept = len(done_before.items() & stamps(data).items())
        done_again = f"{num_kept} of {len(done_before)} are the same files"
        site.row("the tars that were done before the retry", done_again, num_kept == len(done_before))
        rules_of_a_site(site)
        purged_records(site)
        full_log_folder(site)
        forty_shards(site)
        return 0 if all(is_right for _, _, is_right in site.rows) else 1


@contextlib.contextmanager
def cluster() -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-causes-"))
    kept = {name: value for name, value in os.environ.items() if not re.match("SLURM|SBATCH|SHARDPREP", name)}
    options = {
        "NUM_NODES": "5",
        "NODE_PREFIX": "n",
        "NODE_CPUS": "4",
        "NODE_MEM_MB": "4000",
        "ACCOUNTING": "1",
        "CGROUP": "1",
    }
    options |= {"CLUSTER_DIR": str(folder / "c"), "SLURM_CONF": str(folder / "c" / "slurm.conf")}
    options |= {
        "XDG_CONFIG_HOME": str(folder),
        "EXTRA_CONF": CONF,
        "SHARDPREP_PYTHON": str(folder / "python"),
    }
    (folder / "faults").mkdir()
    (folder / "python").write_text(PYTHON.format(place=folder / "faults", real=sys.executable))
    (folder / "python").chmod(0o755)
    site = Site(folder=folder, environ={**kept, **options})
    try:
        site.run(STARTER, "up")
        yield site
    finally:
        (folder / "faults" / "go").touch()
        site.run(STARTER, "down", check=False)
        subprocess.run(["umount", str(folder / "full" / "jobs" / "logs")], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def make_inputs(site: Site, *folders: Path) -> None:
    raw, model = site.folder / "raw", site.folder / "model"
    raw.mkdir()
    for number in range(10):
        text = "".join(f"{number}번째 파일의 {line}번째 줄. Line {line}.\n" for line in range(300))
        (raw / f"{number}.txt").write_text(text)
    site.prep("train_tokenizer", "--input_dir", raw, "--vocab_size", 600, "--output_dir", model)
    for folder in (*folders, *(site.folder / name for name in ("limited", "purged", "full"))):
        site.prep("plan", "--input_dir", raw, "--output_dir", folder, "--model_id", model)


def disturb(site: Site, data: Path) -> None:
    """Disturb shards 0-8 of a data set, each in another way; shard 9 is left alone."""
    site.arm("memory", 0)
    site.arm("sleep", 1, 2, 5, 6)
    site.arm("kill", 3)
    site.arm("survive", 4)
    site.arm("wait", 8)
    few = ("--mem_gb", 0.2, "--time_min", 1)
    small = ("--mem_gb", 0.5)
    job = site.submit(data, "0-3,9", "main", *few)
    wait_until(lambda: site.happened("sleeps-2"))
    site.run("scancel", f"{job}_2")
    site.submit(data, "4", "lost", *small, "--sbatch_args", "--no-requeue")
    site.submit(data, "5", "low", *small)
    site.submit(data, "6", "grace", *small)
    held = site.submit(data, "7", "main", *small, "--sbatch_args", "--begin=now+60")
    suspended = site.submit(data, "8", "main", *small)
    site.run("scontrol", "hold", held)
    wait_until(lambda: site.happened("survives"))
    kill_node(site.environ, "n3")
    wait_until(lambda: site.happened("sleeps-5") and site.happened("sleeps-6"))
    site.run(
        "sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    )
    wait_until(lambda: site.happened("waits-8"))
    site.run("scontrol", "suspend", f"{suspended}_0")
    state = site.status(data)
    reasons = {item["shards"]: f"{item['reason']}: {item['means']}" for item in state["waits_for"]}
    found = next((words for ids, words in reasons.items() if "7" in ids), "")
    site.row("`scontrol hold`", f"wait for {found}", "JobHeld" in found)
    stopped = [item["shards"] for item in state["waits_for"] if item["reason"] == "suspended"]
    site.row("`scontrol suspend`", f"suspended: {stopped}", stopped == ["8"])
    wait_until(lambda: 4 in causes(site, data))
    said = causes(site, data)[4]
    site.row("its node killed, its Python left alive", said, said == "NODE_FAIL")
    site.run("scontrol", "resume", f"{suspended}_0", check=False)  # Slurm may have started it again
    site.run("scontrol", "update", f"jobid={held}", "starttime=now")
    site.run("scontrol", "release", held)
    (site.folder / "faults" / "go").touch()
    wait_until(lambda: not {"running", "pending"} & {n for n, ids in site.status(data).items() if ids})


def causes(site: Site, data: Path) -> dict[int, str]:
    """Return shard -> why its last task did not make it."""
    return {item["shard"]: item["cause"] for item in site.status(data)["failures"]}


def look(site: Site, data: Path) -> None:
    cause_of = causes(site, data)
    for shard_id, what, expected in (
        (0, "more memory than its limit", "OUT_OF_MEMORY"),
        (1, "the time limit", "TIMEOUT"),
        (2, "`scancel`", "CANCELLED"),
        (3, "`kill -9` of the worker", "killed by signal 9"),
        # Slurm 22.05 says FAILED of it, 24.11 PREEMPTED
        (
            6,
            "preempted, partition with GraceTime",
            ("stopped by Slurm: preempted with GraceTime", "PREEMPTED"),
        ),
    ):
        said = cause_of.get(shard_id, "done")
        site.row(what, said, said.startswith(expected))
    restarts = ", ".join(f"{how}: {number}" for how, number in site.status(data)["restarts"].items())
    site.row("preempted with requeue", f"made by the second run; after {restarts}", 5 not in cause_of)


def forty_shards(site: Site) -> None:
    """Submit from two terminals at MaxArraySize 7, and kill slurmctld three times."""
    raw, data, undisturbed = (site.folder / name for name in ("raw40", "forty", "forty_undisturbed"))
    raw.mkdir()
    for number in range(40):
        (raw / f"{number:02d}.txt").write_text(f"{number}번째 파일의 한 줄. One line of it.\n" * 20_000)
    for folder in (data, undisturbed):
        site.prep("plan", "--input_dir", raw, "--output_dir", folder, "--model_id", site.folder / "model")
    usual = ("--partition", "main", "--cpus_per_task", 1, "--max_parallel", 1)
    site.slurm("submit", data, *usual, "--shards", 39)
    command = [sys.executable, "-m", "slurm", "submit", str(data), *map(str, usual)]
    terminals = [
        subprocess.Popen(
            command, env=site.environ, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for _ in range(2)
    ]
    said = [each.communicate(timeout=HANG_S)[0] for each in terminals]
    records = [json.loads(path.read_text()) for path in sorted((data / "jobs").glob("[0-9]*.json"))]
    arrays = [array for record in records for array in record["arrays"]]
    sent = [shard_id for array in arrays for word in array["tasks"] for shard_id in ids_of_ranges(word)]
    num_arrays = [sum("job " in line and " task" in line for line in text.splitlines()) for text in said]
    site.row(
        "40 shards, MaxArraySize 7, two `submit` at once",
        f"{len(arrays[-1]['tasks'])} tasks for {len(sent) - 1} shards; arrays sent by each: {num_arrays}",
        sorted(sent) == list(range(40)) and sorted(num_arrays) == [0, 1],
    )
    controllers_killed(site, data)
    wait_until(
        lambda: not {"running", "pending", "not_visible"} & {n for n, ids in site.status(data).items() if ids}
    )
    wait_until(lambda: site.status(data)["verified"])
    site.prep("run", undisturbed)
    is_equal = contents(data) == contents(undisturbed)
    site.row(
        "the forty shards, by that one submission", "verified, equal" if is_equal else "not equal", is_equal
    )


def controllers_killed(site: Site, data: Path) -> None:
    """Kill slurmctld while a shard waits or runs. Finished shards must not change."""
    made: dict[str, tuple[int, int]] = {}
    wrongly: list[str] = []
    num_unseen = 0
    sent_s = time.time()

    def has_more() -> bool:
        """Return whether to kill it now, but not before it has saved the array, which it would forget."""
        saved_s = (site.folder / "c" / "state" / "job_state").stat().st_mtime
        return len(stamps(data)) > len(made) + 1 and saved_s > sent_s + 1

    for _ in range(3):
        wait_until(has_more)
        made.update(stamps(data))
        os.kill(int((site.folder / "c" / "pid" / "slurmctld").read_text()), signal.SIGKILL)
        state = site.status(data)
        wrongly += state["causes"]
        num_unseen += state["num_not_visible"] > 0
        site.run("slurmctld", "-f", site.environ["SLURM_CONF"])
        wait_until(lambda: "is UP" in site.run("scontrol", "ping", check=False))
    site.row(
        "slurmctld killed three times while they ran",
        f"not visible ({num_unseen} times of 3); failed: {', '.join(wrongly) or 'none'}",
        num_unseen == 3 and not wrongly,
    )
    num_kept = len(made.items() & stamps(data).items())
    site.row("what was made before", f"{num_kept} of {len(made)} are the same files", num_kept == len(made))


def rules_of_a_site(site: Site) -> None:
    """Rename a controller, requeue a task, and submit with a QOS that allows just the tasks' time."""
    data = site.folder / "limited"
    (site.folder / "faults" / "go").unlink(missing_ok=True)
    site.arm("wait", 0)
    usual = ("--mem_gb", 0.5, "--time_min", 5, "--until_done")
    job = site.submit(data, "0", "main", *usual)
    wait_until(lambda: site.happened("waits-0"))
    (controller,) = site.status(data)["controller_jobs"]
    site.run("scontrol", "update", f"jobid={controller}", "name=mine")
    seen = site.status(data)["controller_jobs"]
    site.run("scontrol", "requeue", f"{job}_0")
    wait_until(lambda: site.status(data)["done"] == "0")
    restarts = list(site.status(data)["restarts"])
    site.row(
        "`scontrol requeue`, then made", ", ".join(restarts), restarts == ["requeued (scontrol requeue)"]
    )
    site.slurm("cancel", data)
    left = site.run("squeue", "--noheader", f"--jobs={controller}", "--states=PENDING,RUNNING", check=False)
    was_cancelled = seen == [controller] and not left.strip()
    site.row("a renamed controller, and `cancel`", "cancelled" if was_cancelled else left, was_cancelled)

    site.run("sacctmgr", "--immediate", "modify", "qos", "normal", "set", "MaxWall=5")
    site.submit(data, "1-9", "main", *usual)
    wait_until(lambda: not site.status(data)["controller_jobs"])
    site.run("sacctmgr", "--immediate", "modify", "qos", "normal", "set", "MaxWall=-1")
    is_verified = site.status(data)["verified"]
    said = "verified" if is_verified else site.slurm("status", data).splitlines()[-1]
    site.row("MaxWall of the QOS as long as the tasks' limit, --until_done", said, is_verified)


def purged_records(site: Site) -> None:
    data = site.folder / "purged"
    (site.folder / "faults" / "go").unlink(missing_ok=True)
    site.arm("wait", 0)
    job = site.submit(data, "0", "main", "--mem_gb", 0.5)
    wait_until(lambda: site.happened("waits-0"))
    shutil.rmtree(data / "jobs")
    state = site.status(data)
    site.row(
        "DATA/jobs removed while a task runs",
        f"unrecorded: {state['unrecorded_jobs']}",
        job in state["unrecorded_jobs"],
    )
    said = site.slurm("submit", data, check=False)
    site.row("and `submit` then", said.splitlines()[-1][:99], "no record in" in said)
    (site.folder / "faults" / "go").touch()
    wait_until(lambda: not site.status(data)["unrecorded_jobs"])
    state = site.status(data)
    site.row("and when the task has ended", f"done {state['done']}", state["done"] == "0")


def full_log_folder(site: Site) -> None:
    data = site.folder / "full"
    logs = data / "jobs" / "logs"
    logs.mkdir(parents=True)
    site.run("mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "tmpfs", logs)
    with (logs / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    site.submit(data, "0-1", "main", "--mem_gb", 0.5)
    wait_until(lambda: not {"running", "pending"} & {n for n, ids in site.status(data).items() if ids})
    state = site.status(data)
    said = f"done {state['done']}" if state["done"] else ", ".join(state["causes"])
    site.row("the folder of the logs is full", said, state["done"] == "0-1")


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(f"not so within {HANG_S} s")
        time.sleep(1.5)


def contents(data: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data.glob("shard-*") if path.suffix in (".tar", ".idx")}


def stamps(data: Path) -> dict[str, tuple[int, int]]:
    """Return stamps of the shards' files, which differ if a file was made again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in data.glob("shard-*.tar")}


if __name__ == "__main__":
    sys.exit(main())
