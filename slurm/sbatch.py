"""Submit a script, and read how Slurm took it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm.commands import SlurmAway, SlurmFull, megabytes_of, minutes_of, run_slurm, slurm_answer


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A job as ``scontrol show job`` shows it after its submission."""

    job_id: str
    name: str
    user: str
    submit_time: str  # in UTC
    mem_mb: int | None  # of a task; None: no limit
    time_min: int | None


def submit_script(script: str, *options: str) -> str:
    """Submit a script and return its job id, from the last line: a site's sbatch may print a banner first.

    Raises SlurmFull if it was not taken. Raises SlurmAway without an id: Slurm may still have taken the job,
    which can be found by its name.
    """
    try:
        said = run_slurm("sbatch", "--parsable", *options, text=script).stdout
        last = said.strip().rpartition("\n")[2].strip()
        match = re.fullmatch(r"([0-9]{1,10})(?:;\S+)?", last)  # ID, or ID;CLUSTER
        if match:
            return match[1]
        why = f"sbatch answered {last[:80]!r}"
    except SlurmFull:
        raise
    except SlurmAway as error:
        why = str(error.found)
    name = re.findall(r"^#SBATCH --job-name=(.*)$", script, re.MULTILINE)[0]
    expected = "a job id. Nothing was recorded; if Slurm took the job, cancel it: scancel its id"
    raise SlurmAway(found=why, expected=expected, remedy=f"squeue --me --name={name}")


def show_job(job_id: str) -> SubmittedJob:
    """Ask Slurm for a job. Raises as ``slurm_answer`` does."""

    def parse(text: str) -> SubmittedJob:
        named = re.search(r"\bJobName=(.*?) UserId=([^\s(]+)\(", text)
        fields = r"\b(MinMemoryNode|MinMemoryCPU|NumCPUs|TimeLimit|SubmitTime)=(\S+)"
        values = dict(re.findall(fields, text))
        mem_mb = megabytes_of(values.get("MinMemoryNode") or values.get("MinMemoryCPU") or "0")
        if not named or mem_mb is None or "SubmitTime" not in values:
            raise ValueError("no job name, user, submit time or memory")
        if "MinMemoryCPU" in values:
            mem_mb = int(mem_mb) * int(values.get("NumCPUs", "1").split("-")[0])
        return SubmittedJob(
            job_id=job_id,
            name=named[1],
            user=named[2],
            submit_time=values["SubmitTime"],
            mem_mb=int(mem_mb) or None,
            time_min=minutes_of(values.get("TimeLimit", "")),
        )

    return slurm_answer(parse, "scontrol", "--oneliner", "show", "job", job_id)
