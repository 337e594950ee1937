"""Slurm's commands: run one, and read its answer.

They are started only here. Times are in UTC.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Callable
from time import sleep
from typing import TypeVar

from shardprep.console import say
from shardprep.errors import NotFound, ReadWriteError, UsageError

T = TypeVar("T")

# sbatch's variables override the #SBATCH lines of a script. A JobRequest has the values that users set.
_DROPPED = ("SQUEUE_", "SACCT_", "SBATCH_JOB_NAME", "SBATCH_ARRAY", "SBATCH_OUTPUT", "SBATCH_WAIT")
# Inside an allocation Slurm sets some 50 SLURM_* variables that describe it. sbatch and srun read several of
# them as options: SLURM_MEM_PER_CPU excludes --mem, SLURM_CPU_BIND breaks a step. These ones locate Slurm.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
# Field of a JobRequest -> the variable of sbatch or prep_array.sh that sets it.
REQUEST_VARIABLES = {
    **{name: f"SBATCH_{name.upper()}" for name in ("partition", "account", "qos", "constraint", "exclude")},
    "time_min": "SBATCH_TIMELIMIT",
    "mem_gb": "SBATCH_MEM_PER_NODE",
    "mem_per_cpu_gb": "SBATCH_MEM_PER_CPU",
    "setup": "SHARDPREP_SETUP",
    "container": "SHARDPREP_EXEC",
    "srun_args": "SHARDPREP_SRUN_ARGS",
}
# Slurm's messages for a slurmctld that is down, too slow or not configured, or whose accounting is slow.
_AWAY = re.compile(
    r"contact slurm controller|timed out|configuration source|Zero Bytes|connection fail|"
    r"can't be reached now|Munge|authentication|not available right now",
    re.IGNORECASE,
)
_FULL = re.compile("Resource temporarily unavailable|Slurm temporarily unable to accept job", re.IGNORECASE)
_FULL_OF_OWN = re.compile(r"(Assoc|QOS)\w*SubmitJob")
_IS_IT_UP = {"expected": "a slurmctld that is up", "remedy": "scontrol ping"}
# "Zero Bytes" is the client's whole message if munge considers its credential expired.
_CLOCKS = "a slurmctld that is up, and a clock here that is right to 5 min (date)"
_DELAYS_S = (5, 10, 20, 40, *[60] * 56)  # about an hour


class SlurmRefused(UsageError):
    """Slurm refused a request. Its own message is included."""


class SlurmAway(ReadWriteError):
    """Slurm did not answer: slurmctld is down, slow, or not reachable from this host."""


class SlurmFull(SlurmAway):
    """There are as many jobs as MaxJobCount or MaxSubmitJobs allows. More are taken when some have ended."""


class SlurmMissing(SlurmAway):
    """Slurm's commands are not installed on this host."""

    exit_code = NotFound.exit_code


def slurm_answer(parse: Callable[[str], T], *command: str) -> T:
    """Run a command that changes nothing, and return its output as parsed by ``parse``.

    Raises as ``run_slurm`` does, and SlurmAway if the output is cut short or one of several servers did not
    answer.
    """
    done = run_slurm(*command)
    if _AWAY.search(done.stderr):
        found = f"{' '.join(command[:3])} gave a partial answer: {' '.join(done.stderr.split())}"
        raise SlurmAway(found=found, **_IS_IT_UP)
    try:
        return parse(done.stdout)
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        found = f"{' '.join(command[:3])} answered {done.stdout[:80]!r}, which cannot be read ({error})"
        raise SlurmAway(found=found, remedy=f"{command[0]} --version") from None


def run_slurm(*command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command with ``text`` as its input. Raises SlurmRefused, SlurmMissing, SlurmAway."""
    clusters = os.environ.get("SLURM_CLUSTERS", "")
    if "," in clusters or clusters == "all":
        raise UsageError.of_value("SLURM_CLUSTERS", clusters, "one cluster, for submissions and for status")
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=120,
            env=_environment(command[0]),
        )
    except OSError as error:
        found = f"cannot be run here ({error.strerror})"
        expected = "a login node of the cluster; or make the shards on this machine"
        raise SlurmMissing(path=command[0], found=found, expected=expected) from None
    except subprocess.TimeoutExpired:
        raise SlurmAway(found=f"{command[0]} did not answer in 120 s", **_IS_IT_UP) from None
    if done.returncode:
        raise _refusal(command[0], " ".join((done.stderr or done.stdout).split()))
    return done


def _environment(command: str) -> dict[str, str]:
    """Return the environment for a command.

    Without variables that change a command's options or output, or that describe an allocation. Times are in
    UTC, because users may be in several time zones; jobs keep the time zone of their user.
    """
    dropped = (*_DROPPED, "SBATCH_MEM", *REQUEST_VARIABLES.values(), "SLURM_")
    kept = [name for name in os.environ if name in _KEPT or not name.startswith(dropped)]
    environ = {name: os.environ[name] for name in kept}
    environ |= {"SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}
    if command != "sbatch":
        environ["TZ"] = "UTC0"
    return environ


def _refusal(command: str, words: str) -> SlurmRefused | SlurmAway:
    """Return the error for what a command printed as it failed."""
    refused = f"{command} refused: {words}"
    if _FULL.search(words):
        found = f"{refused}. Slurm's queue is full (MaxJobCount); no job is too large"
        expected = "room in the queue: try again later, or send fewer tasks: --shards_per_task"
        return SlurmFull(found=found, expected=expected)
    if _FULL_OF_OWN.search(words):
        found = f"{refused}. You, your account or QOS have too many jobs (MaxSubmitJobs)"
        expected = "fewer of them: try again when some have ended, or send fewer tasks: --shards_per_task"
        return SlurmFull(found=found, expected=expected)
    if _AWAY.search(words) and "known by database" not in words:  # the latter is a wrong SLURM_CLUSTERS
        hint = {**_IS_IT_UP, "expected": _CLOCKS} if "Zero Bytes" in words else _IS_IT_UP
        return SlurmAway(found=f"{command} got no answer: {words}", **hint)
    return SlurmRefused(found=refused)


def seconds_of(text: str) -> int | None:
    """Parse a time of Slurm (``60`` minutes, ``2:03``, ``1-02:03:04``) into seconds, or return None."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?(?:\.\d+)?", text)
    if not match:
        return None
    days, first, second, third = (int(item or 0) for item in match.groups())
    if match[1] is None and match[4] is None:
        return first * 60 + second
    return ((days * 24 + first) * 60 + second) * 60 + third


def minutes_of(text: str) -> int | None:
    """Parse a time of Slurm into minutes, rounded up as Slurm does, or return None for UNLIMITED."""
    seconds = seconds_of(text)
    return None if seconds is None else math.ceil(seconds / 60)


def megabytes_of(text: str) -> float | None:
    """Parse a size of Slurm, such as ``300`` or ``1.50G``, into MB, or return None for UNLIMITED."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)B?", text, re.IGNORECASE)
    if not match:
        return None
    unit = match[2].upper() or "M"
    return float(match[1]) * 1024.0 ** "KMGTP".index(unit) / 1024


def read_config() -> dict[str, str]:
    """Return ``scontrol show config`` as name -> value. Raises as ``slurm_answer`` does."""

    def parse(text: str) -> dict[str, str]:
        config = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, re.MULTILINE))
        if not re.fullmatch(r"[0-9]{1,10}", config.get("MaxArraySize", "")):  # the output was cut short
            raise ValueError("no MaxArraySize")
        return config

    return slurm_answer(parse, "scontrol", "show", "config")


def ask_patiently(question: Callable[[], T], only: type[SlurmAway] | None = None) -> T:
    """Call ``question`` until Slurm answers, for about an hour: a restarting slurmctld takes a minute.

    ``only``: be patient with this error alone.
    """
    for delay_s in _DELAYS_S:
        try:
            return question()
        except SlurmMissing:
            raise
        except SlurmAway as error:
            if only and not isinstance(error, only):
                raise
            say(f"{error}; asking again in {delay_s} s. Running jobs are not affected")
            sleep(delay_s)
    return question()
