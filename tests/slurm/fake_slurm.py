"""Stand-ins for Slurm's commands with recorded answers, and the files that jobs of a data set leave.

The output of squeue and scontrol was recorded on real clusters of two versions, those of Debian 12 and 13. In
an array of six, task 0 ended with 65, task 1 killed itself, 2 and 3 run, 4 waits, and 5 was cancelled. The
times and the number of restarts were added to the lines of the newer version by hand.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkout import ROOT
from tests.children import run_child
from tests.forged import content_sha256, rewrite_json
from tests.world import call_main

NAME = "shardprep-0123456789ab-3f2a91-0"
ALL = "0 1 2 3 4"  # the shards of five tasks
WHEN = "2026-11-22T01:52:04"
THEN = "2026-11-22T01:52:05"
# OLD~NEW: the words of the older and of the newer version.
_QUEUE = f"""\
1|0|FAILED|NonZeroExitCode|16640~65:0|n1|0:00~0:01|4|root|{WHEN}|{THEN}|{THEN}|0|{NAME}|
1|1|FAILED|JobLaunchFailure~RaisedSignal:9(Killed)|9~0:9|n2|0:00~0:01|5|root|{WHEN}|{THEN}|{THEN}|0|{NAME}|
1|4|PENDING|JobArrayTaskLimit|0~0:0||0:00|1|root|{WHEN}|N/A|N/A|0|{NAME}|
3|N/A|PENDING|JobHeldUser|0~0:0||0:00|3|root|{WHEN}|N/A|N/A|0|wrap|
2|N/A|PENDING|JobHeldUser|0~0:0||0:00|2|root|{WHEN}|N/A|N/A|0|{NAME}-verify|
1|2|RUNNING|None|0~0:0|n1|0:02|6|root|{WHEN}|{THEN}|N/A|0|{NAME}|
1|3|RUNNING|None|0~0:0|n2|0:02|7|root|{WHEN}|{THEN}|N/A|0|{NAME}|
"""
QUEUES = {
    version: re.sub("([^|]+)~([^|]+)", rf"\{number}", _QUEUE)
    for number, version in enumerate(("22.05.8", "24.11.5"), start=1)
}
JOB = (
    "JobId=2 JobName={name} UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=0 Nice=0 Account=(null) "
    "JobState=PENDING Reason=JobHeldUser Requeue=1 Restarts=0 TimeLimit=UNLIMITED NumCPUs=1 NumTasks=1 "
    "SubmitTime=2026-11-22T01:52:04 MinMemoryNode=100M MinTmpDiskNode=0 WorkDir=/tmp"
)
CONFIG = "ClusterName = test\nMaxArraySize            = 1001\n"
FAKE = r"""#!/bin/bash
# Records its arguments, and prints the file named after this command.
name=${0##*/} place=@PLACE@
printf '%s\n' "$*" >>"$place/$name.calls"
if [[ -e $place/away ]]; then
  echo "$name: error: Unable to contact slurm controller (connect failure)" >&2
  exit 1
fi
case "$name $*" in
  sbatch*--test-only*) cat >/dev/null ;;
  sbatch*)
    sent=("$place"/sent-*)
    [[ -e ${sent[0]} ]] && number=${#sent[@]} || number=0
    cat >"$place/sent-$number"
    [[ $(<"$place/sent-$number") =~ '#SBATCH --job-name='([^$'\n']*) ]]
    echo "${BASH_REMATCH[1]}" >"$place/name-$((number + 1))"
    echo $((number + 1)) ;;
  scontrol*config*) cat "$place/config" ;;
  scontrol*"show job"*) job=$(<"$place/job"); echo "${job/'{name}'/$(<"$place/name-${!#}")}" ;;
  *) [[ ! -e $place/$name ]] || cat "$place/$name" ;;
esac
"""


def install_fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-ins first on PATH, and remove Slurm's variables from the environment.

    Returns the folder of their answers and records.
    """
    place = tmp_path / "slurm's commands"
    place.mkdir()
    script = place / "script"
    script.write_text(FAKE.replace("@PLACE@", shlex.quote(str(place))))
    script.chmod(0o755)
    for folder in ("bin", "real"):
        (place / folder).mkdir()
        for name in ("sbatch", "scontrol", "sinfo", "squeue", "sacct", "scancel"):
            (place / folder / name).symlink_to(script)
    (place / "config").write_text(CONFIG)
    (place / "job").write_text(JOB)
    monkeypatch.setenv("PATH", f"{place / 'bin'}:{os.environ['PATH']}")
    for name in [each for each in os.environ if each.startswith(("SLURM", "SBATCH", "SHARDPREP"))]:
        monkeypatch.delenv(name)
    return place


SRUN = 'while [[ $1 = --* ]]; do shift; done; exec "$@"'


@dataclass(kw_only=True)
class Desk:
    """A planned data set, and the stand-ins for Slurm's commands."""

    data: Path
    place: Path  # folder of the stand-ins; see ``install_fake_slurm``
    made: Path = Path("nowhere")  # the same data set with all shards
    patch: pytest.MonkeyPatch = field(default_factory=pytest.MonkeyPatch)

    @property
    def tmp(self) -> Path:
        """The folder that contains the data set."""
        return self.data.parent

    def at_waits(self, call: Callable[[float], object]) -> None:
        """Make commands call this instead of sleeping between two looks, or two calls of Slurm."""
        self.patch.setattr("slurm.status.time", SimpleNamespace(**{**vars(time), "sleep": call}))
        for module in ("commands", "squeue", "state"):
            self.patch.setattr(f"slurm.{module}.sleep", call)

    def slurm(self, name: str, *words: object, code: int = 0, **environ: Any) -> str:
        """Run ``shardprep NAME DATA WORDS``, assert its exit code, and return its output."""
        return call_main(name, self.data, *words, environ=environ).ends(code).text

    def status(self, **environ: Any) -> dict[str, Any]:
        """Return the output of ``status --json``."""
        return dict(json.loads(call_main("status", self.data, "--json", environ=environ).ends(0).out))

    def next(self) -> str:
        """Return the last line of ``status``, which has the next command."""
        return call_main("status", self.data).ends(0).out.splitlines()[-1]

    def task(
        self,
        *args: object,
        index: int = 0,
        code: int = 0,
        srun: str = SRUN,
        stdout: Any = subprocess.PIPE,
        environ: Mapping[str, str] = {},
    ) -> str:
        """Run a task of ``sbatch slurm/prep_array.sh DATA ARGS`` beside DATA, and return its output."""
        (self.place / "bin" / "srun").write_text(f"#!/bin/bash\n{srun}\n")
        (self.place / "bin" / "srun").chmod(0o755)
        own = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(index)}
        own |= {"SLURMD_NODENAME": "n1", "SLURM_JOB_USER": "root", "SLURM_CPUS_PER_TASK": "1"}
        settings = {**os.environ, **own, "SHARDPREP_PYTHON": sys.executable, **environ}
        words = [str(each) for each in (ROOT / "slurm" / "prep_array.sh", self.data, *args)]
        done = run_child(words, cwd=self.tmp, env=settings, code=code, stdout=stdout)
        return (done.stdout or "") + done.stderr

    # Answers and calls of Slurm's commands.

    def answers(self, name: str, text: str | bytes) -> None:
        """Make a command print this."""
        (self.place / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    def answers_by(self, name: str, script: str) -> None:
        """Replace a command by a script. In it, REAL calls the previous stand-in and PLACE is the folder."""
        path = self.place / "bin" / name
        path.unlink()
        script = script.replace("REAL", f'PLACE/real/{name} "$@"').replace(
            "PLACE", shlex.quote(str(self.place))
        )
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def queue(self, *lines: str) -> None:
        """Make squeue print only these lines."""
        self.answers("squeue", "".join(lines))

    def calls(self, name: str) -> list[str]:
        """Return the arguments of each call of a command."""
        path = self.place / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []

    def sent(self) -> list[str]:
        """Return the scripts that sbatch got, in order; the first one is job 1."""
        paths = self.place.glob("sent-*")
        return [path.read_text() for path in sorted(paths, key=lambda path: int(path.name[5:]))]

    def sent_shards(self) -> list[str]:
        """Return the shards of the tasks of each submitted array, as in its script: ``0-1 2-4``."""
        return re.findall(r"^shards_of=\((.*)\)$", "\n".join(self.sent()), re.MULTILINE)

    def released(self) -> list[str]:
        """Return the jobs that each call released."""
        calls = self.calls("scontrol")
        return [call.removeprefix("release ") for call in calls if call.startswith("release")]

    # Files of jobs in the data set's folder.

    @property
    def plan_id(self) -> str:
        return str(json.loads((self.data / "plan.json").read_text().partition("\n")[0] + "}")["plan_id"])

    @property
    def identity(self) -> str:
        """The identity of the folder in records: inode, and file system as ``stat -fc %i`` prints it."""
        number = os.statvfs(self.data).f_fsid
        return f"{self.data.stat().st_ino}.{(number & 0xFFFFFFFF) << 32 | number >> 32:x}"

    @property
    def job_name(self) -> str:
        """The name of the jobs of the first submission."""
        return f"shardprep-{self.plan_id[:12]}-{self.identity}-0"

    def submitted(self, *arrays: dict[str, Any], verify: str = "2", **changes: Any) -> Path:
        """Write the record of a submission, by default of array job 1 and verify job 2. Returns its path."""
        verify_job = {"job_id": verify, "name": f"{NAME}-verify", "submit_time": WHEN}
        facts = {"format": "shardprep-submission", "version": 4, "number": 0, "plan_id": "0123456789abcdef"}
        facts |= {"cluster": "test", "user": "root", "submitted": 1.5, "arrays": [*(arrays or [array()])]}
        facts |= {"verify": verify_job, "identity": self.identity, **changes}
        path = self.data / "jobs" / f"{facts['number']:04d}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**facts, "content_sha256": content_sha256(facts)}))
        return path

    def submission(self, number: int = 0) -> Any:
        """Return the record of a submission."""
        return json.loads((self.data / "jobs" / f"{number:04d}.json").read_text())

    def record(self, task: str, *rest: str, **begin: Any) -> Path:
        """Write the record of an attempt of task JOB_INDEX at shard INDEX, like prep_array.sh."""
        job_id, _, index = task.partition("_")
        first: dict[str, Any] = {"plan_id": self.plan_id, "shards": index, "identity": self.identity}
        first |= {"SLURM_ARRAY_JOB_ID": job_id, "SLURM_ARRAY_TASK_ID": index, "SLURM_RESTART_COUNT": 0}
        first |= {"SLURM_JOB_USER": "root", "SLURMD_NODENAME": "n1", "time": 1000, "SLURM_CPUS_PER_TASK": 1}
        first |= begin
        path = self.data / "jobs" / "attempts" / f"{task}.r{first['SLURM_RESTART_COUNT']}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join([_section("begin", first), *rest]))
        return path

    def run_record(self, shards: str, node: str, pid: int, *, is_this_process: bool = False) -> Path:
        """Write the record of a ``run`` that has not ended."""
        began = 1  # in clock ticks since boot
        if is_this_process:
            began = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        facts = {"SLURM_ARRAY_JOB_ID": "", "shards": shards, "SLURMD_NODENAME": node}
        path = self.record("1_1", **facts, pid=pid, pid_began=began)
        return path.rename(path.with_name(f"{node}-{pid}.1000"))

    def log(self, name: str, text: str) -> Path:
        """Write the log of a task."""
        path = self.data / "jobs" / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def make_done(self, *shard_ids: int, **run: Any) -> None:
        """Make these shards, with ``run`` values in their manifests."""
        for shard_id in shard_ids:
            for path in self.made.glob(f"shard-{shard_id:05d}.*"):
                shutil.copy(path, self.data)
            facts = {f"run.{name}": value for name, value in run.items()}
            rewrite_json(self.data / f"shard-{shard_id:05d}.json", **facts)


def squeue_line(index: str, state: str, reason: str = "None", **changes: str) -> str:
    """Return a line of squeue, by default for tasks of job 1."""
    fields = {"job": "1", "submit": WHEN, "start": "N/A", "restarts": "0", "name": NAME, "user": "root"}
    fields |= {"exit": "0:0", "node": "n1", "elapsed": "0:02"} | changes
    return (
        "{job}|{index}|{state}|{reason}|{exit}|{node}|{elapsed}|{job}|{user}|{submit}|{start}|N/A|{restarts}|"
        "{name}|\n"
    ).format(index=index, state=state, reason=reason, **fields)


def array(job_id: str = "1", **changes: Any) -> dict[str, Any]:
    """Return a job array of a submission, by default with five tasks."""
    facts = {"job_id": job_id, "name": NAME, "submit_time": WHEN, "tasks": ["0", "1", "2", "3", "4"]}
    return {**facts, "request": {}, "mem_mb": 100, "time_min": None, **changes}


def _section(name: str, facts: Mapping[str, Any]) -> str:
    return "".join(f"{line}\n" for line in [name, *(f"{key}={value}" for key, value in facts.items())])


def failure(shard_id: int, exit_code: int, reason: str) -> str:
    """Return the line of a record about a shard that failed."""
    return json.dumps({"shard": shard_id, "exit_code": exit_code, "reason": reason}) + "\n"


def ended(exit_code: int, **facts: Any) -> str:
    """Return the last lines of a record."""
    return _section("end", {"time": 1010, "exit_code": exit_code, "stage": "work", **facts})
