"""Stand-ins for Slurm's commands, and what real ones printed.

What squeue and scontrol print was recorded on real clusters of two versions, Debian 12's and Debian 13's:
tests/slurm_cluster.sh started them (the newer one in a debootstrap chroot), an array of six was
submitted whose task 0 ends with 65, task 1 kills itself, 2 and 3 run and 4 waits; task 5 was cancelled.
The times and the number of restarts were added to the newer version's lines by hand, as it was then seen to
print them like the older one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardprep.files import FileStamp
from shardprep.format.attempts import folder_identity
from shardprep.format.idx import idx_num_bytes
from shardprep.format.manifest import Manifest, ShardCounts
from shardprep.format.names import idx_path, manifest_path, tar_path
from shardprep.format.plan import need_plan
from shardprep.format.submissions import JobArray, JobRequest, SentJob, Submission
from shardprep.format.submissions import publish_submission as publish
from shardprep.signals import STOP_SIGNALS
from slurm import __main__ as program

NAME = "shardprep-0123456789ab-3f2a91-0"
WHEN = "2026-11-22T01:52:04"
QUEUES = {
    "22.05.8": f"""\
1|0|FAILED|NonZeroExitCode|16640|n1|0:00|4|root|{WHEN}|2026-11-22T01:52:05|2026-11-22T01:52:05|0|{NAME}|
1|1|FAILED|JobLaunchFailure|9|n2|0:00|5|root|{WHEN}|2026-11-22T01:52:05|2026-11-22T01:52:05|0|{NAME}|
1|4|PENDING|JobArrayTaskLimit|0||0:00|1|root|{WHEN}|N/A|N/A|0|{NAME}|
3|N/A|PENDING|JobHeldUser|0||0:00|3|root|{WHEN}|N/A|N/A|0|wrap|
2|N/A|PENDING|JobHeldUser|0||0:00|2|root|{WHEN}|N/A|N/A|0|{NAME}-verify|
1|2|RUNNING|None|0|n1|0:02|6|root|{WHEN}|2026-11-22T01:52:05|N/A|0|{NAME}|
1|3|RUNNING|None|0|n2|0:02|7|root|{WHEN}|2026-11-22T01:52:05|N/A|0|{NAME}|
""",
    "24.11.5": f"""\
1|0|FAILED|NonZeroExitCode|65:0|n1|0:01|4|root|{WHEN}|2026-11-22T01:52:05|2026-11-22T01:52:05|0|{NAME}|
1|1|FAILED|RaisedSignal:9(Killed)|0:9|n2|0:01|5|root|{WHEN}|2026-11-22T01:52:05|2026-11-22T01:52:05|0|{NAME}|
1|4|PENDING|JobArrayTaskLimit|0:0||0:00|1|root|{WHEN}|N/A|N/A|0|{NAME}|
3|N/A|PENDING|JobHeldUser|0:0||0:00|3|root|{WHEN}|N/A|N/A|0|wrap|
2|N/A|PENDING|JobHeldUser|0:0||0:00|2|root|{WHEN}|N/A|N/A|0|{NAME}-verify|
1|2|RUNNING|None|0:0|n1|0:02|6|root|{WHEN}|2026-11-22T01:52:05|N/A|0|{NAME}|
1|3|RUNNING|None|0:0|n2|0:02|7|root|{WHEN}|2026-11-22T01:52:05|N/A|0|{NAME}|
""",
}
JOB = (
    "JobId=2 JobName={name} UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=0 Nice=0 Account=(null) "
    "JobState=PENDING Reason=JobHeldUser Requeue=1 Restarts=0 TimeLimit=UNLIMITED NumCPUs=1 NumTasks=1 "
    "SubmitTime=2026-11-22T01:52:04 MinMemoryNode=100M MinTmpDiskNode=0 WorkDir=/tmp"
)
FAKE = r"""#!/bin/bash
# Says what a file named for this command says, and records what it was given.
name=${0##*/} place=@PLACE@
printf '%s\n' "$*" >>"$place/$name.calls"
if [[ -e $place/away ]]; then
  echo "$name: error: Unable to contact slurm controller (connect failure)" >&2
  exit 1
fi
case "$name $*" in
  sbatch*--test-only*) cat >/dev/null ;;
  sbatch*)
    number=$(find "$place" -name 'sent-*' | wc -l)
    cat >"$place/sent-$number"
    sed -n 's/^#SBATCH --job-name=//p' "$place/sent-$number" >"$place/name-$((number + 1))"
    echo $((number + 1)) ;;
  scontrol*config*) cat "$place/config" ;;
  scontrol*"show job"*) sed "s/{name}/$(cat "$place/name-${!#}")/" "$place/job" ;;
  scontrol*federation) [[ ! -e $place/federation ]] || cat "$place/federation" ;;
  *) [[ ! -e $place/$name ]] || cat "$place/$name" ;;
esac
"""


@dataclass(frozen=True, kw_only=True)
class FakeSlurm:
    """A folder that is first on PATH; files in it are answers and records."""

    place: Path

    def answers(self, name: str, text: str | bytes) -> None:
        (self.place / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    def answers_by(self, name: str, script: str) -> None:
        """Put another stand-in in the place of a command."""
        path = self.place / "bin" / name
        path.unlink()
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        path = self.place / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []

    def sent(self) -> list[str]:
        return [path.read_text() for path in sorted(self.place.glob("sent-*"))]


def install_fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Put the stand-ins first on PATH, and take what Slurm sets out of the environment."""
    place = tmp_path / "slurm's commands"
    place.mkdir()
    for name in ("sbatch", "scontrol", "sinfo", "squeue", "sacct", "scancel"):
        (place / name).with_suffix(".sh").write_text(FAKE.replace("@PLACE@", shlex.quote(str(place))))
        (place / name).with_suffix(".sh").chmod(0o755)
        (place / "bin").mkdir(exist_ok=True)
        (place / "bin" / name).symlink_to(place / f"{name}.sh")
    (place / "config").write_text("ClusterName = test\nMaxArraySize            = 1001\n")
    (place / "job").write_text(JOB)
    monkeypatch.setenv("PATH", f"{place / 'bin'}:{os.environ['PATH']}")
    for name in [each for each in os.environ if each.startswith(("SLURM", "SBATCH", "SHARDPREP"))]:
        monkeypatch.delenv(name)
    return FakeSlurm(place=place)


def slurm(*args: object, code: int = 0, cwd: Path | None = None) -> str:
    """``python -m slurm`` in this process; returns both streams."""
    out, before = io.StringIO(), Path.cwd()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    os.chdir(cwd or before)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            found = program.main([str(each) for each in args])
    finally:
        os.chdir(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert found == code, out.getvalue()
    return out.getvalue()


def status(data: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(slurm("status", data, "--json"))
    return state


def squeue_line(index: str, state: str, reason: str = "None", **changes: str) -> str:
    """A line of squeue: of tasks of job 1 unless ``changes`` say otherwise."""
    fields = {"job": "1", "submit": WHEN, "start": "N/A", "restarts": "0", "name": NAME, "user": "root"}
    fields |= {"exit": "0:0", "node": "n1", "command": ""} | changes
    return (
        "{job}|{index}|{state}|{reason}|{exit}|{node}|0:02|{job}|{user}|{submit}|{start}|N/A|{restarts}|{name}|"
        "{command}\n"
    ).format(index=index, state=state, reason=reason, **fields)


def write_log(data: Path, name: str, text: str) -> Path:
    path = data / "jobs" / "logs" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def submission(verify_job_id: str = "2", **changes: Any) -> Submission:
    """Job 1, an array of five tasks, and its verify job 2."""
    array: dict[str, Any] = {
        "job_id": "1",
        "name": NAME,
        "submit_time": WHEN,
        "tasks": ["0", "1", "2", "3", "4"],
    }
    array |= {"request": JobRequest(), "mem_mb": 100, "time_min": None}
    fields: dict[str, Any] = {"number": 0, "plan_id": "0123456789abcdef", "cluster": "test", "user": "root"}
    verify = SentJob(job_id=verify_job_id, name=f"{NAME}-verify", submit_time=WHEN)
    fields |= {"submitted": 1.5, "verify": verify, "identity": "1.2"}
    return Submission(**{**fields, "arrays": [JobArray(**array)], **changes})


def submitted(data: Path, **changes: Any) -> None:
    (data / "jobs").mkdir(exist_ok=True)
    publish(data, submission(**{"identity": folder_identity(data), **changes}))


def make_done(data: Path, *shard_ids: int, job_id: str = "", **run: Any) -> None:
    """Files of shards as far as ``status`` looks at them: a manifest, an empty tar, an idx of its size."""
    spec = need_plan(data).spec
    idx = FileStamp(num_bytes=idx_num_bytes(spec.kind, 0), sha256="0" * 64)
    counts: dict[str, Any] = dict.fromkeys((item.name for item in dataclasses.fields(ShardCounts)), 0)
    counts |= {"num_tokens": 6000, "input_bytes": 600, "quarantined": {}, "length_histogram": []}
    facts = {"host": "n1", "began": 1.0, "wall_s": 1.0, "cpu_s": 1.0, "num_cpus": 1, "max_rss_bytes": 1}
    for shard_id in shard_ids:
        manifest = Manifest(
            spec=spec,
            shard_id=shard_id,
            counts=ShardCounts(**{**counts, "sources": {}, "validation": None}),
            tar=FileStamp(num_bytes=0, sha256="0" * 64),
            idx=idx,
            quarantine=None,
            ids=None,
            run={**facts, "slurm": {"SLURM_ARRAY_JOB_ID": job_id} if job_id else {}, **run},
        )
        manifest_path(data, shard_id).write_bytes(manifest.to_json())
        tar_path(data, shard_id).touch()
        idx_path(data, shard_id).write_bytes(bytes(idx.num_bytes))


def write_index(data: Path, num_shards: int) -> None:
    """An index.json that has the numbers of ``make_done``'s shards."""
    plan_id = json.loads((data / "plan.json").read_text())["plan_id"]
    rows = [[0, 0, 6000, 0, 0, ""]] * num_shards
    (data / "index.json").write_text(json.dumps({"spec": {"plan_id": plan_id}, "shards": rows}))


def section(name: str, facts: Mapping[str, Any]) -> str:
    """The lines of a part of a record."""
    return "".join(f"{line}\n" for line in [name, *(f"{key}={value}" for key, value in facts.items())])


def write_record(data: Path, task: str, *rest: str, **begin: Any) -> Path:
    """The record of an attempt of task ``JOB_INDEX`` that made shard INDEX, as prep_array.sh writes it."""
    plan_id = json.loads((data / "plan.json").read_text())["plan_id"]
    job_id, _, index = task.partition("_")
    first = {"by": "submit", "plan_id": plan_id, "shards": index, "identity": folder_identity(data)}
    first |= {"SLURM_ARRAY_JOB_ID": job_id, "SLURM_ARRAY_TASK_ID": index, "SLURM_RESTART_COUNT": 0}
    first |= {"SLURM_JOB_USER": "root", "SLURMD_NODENAME": "n1", "time": 1000, "SLURM_CPUS_PER_TASK": 1}
    first |= begin
    path = data / "jobs" / "attempts" / f"{task}.r{first['SLURM_RESTART_COUNT']}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join([section("begin", first), *rest]))
    return path


def failure(shard_id: int, exit_code: int, reason: str) -> str:
    """The line of a record that tells why a shard was not made."""
    return json.dumps({"shard": shard_id, "exit_code": exit_code, "reason": reason}) + "\n"


def ended(exit_code: int, **facts: Any) -> str:
    """The last lines of a record."""
    return section("end", {"time": 1010, "exit_code": exit_code, "stage": "work", **facts})
