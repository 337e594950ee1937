"""Runs Slurm's own commands. No other module starts them, and none else knows how they fail."""

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

# sbatch's variables beat the script's own #SBATCH lines; JobRequest has read those that users set.
_DROPPED = ("SQUEUE_", "SACCT_", "SBATCH_JOB_NAME", "SBATCH_ARRAY", "SBATCH_OUTPUT", "SBATCH_WAIT")
# Inside an allocation Slurm has set some 50 SLURM_* that describe it; sbatch and srun read several of them as
# options (SLURM_MEM_PER_CPU excludes --mem, SLURM_CPU_BIND breaks a step). These say how Slurm is reached.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
# Field of a JobRequest -> the variable of sbatch, or of prep_array.sh, that sets it.
REQUEST_VARIABLES = {
    **{name: f"SBATCH_{name.upper()}" for name in ("partition", "account", "qos", "constraint", "exclude")},
    "time_min": "SBATCH_TIMELIMIT",
    "mem_gb": "SBATCH_MEM_PER_NODE",
    "mem_per_cpu_gb": "SBATCH_MEM_PER_CPU",
    "setup": "SHARDPREP_SETUP",
    "container": "SHARDPREP_EXEC",
    "srun_args": "SHARDPREP_SRUN_ARGS",
}
# Slurm's own words for a controller that is down, too slow or not configured, or whose accounts are slow.
_AWAY = re.compile(
    r"contact slurm controller|timed out|configuration source|Zero Bytes|connection fail|"
    r"can't be reached now|Munge|authentication|not available right now",
    re.IGNORECASE,
)
_IS_IT_UP = "is the controller up? scontrol ping"
# What munge takes for an expired credential, a client is told in the words "Zero Bytes" alone.
_CLOCKS_DIFFER = "does it restart (scontrol ping), or is the clock of this host more than 5 min off (date)?"
_DELAYS_S = (5, 10, 20, 40, *[60] * 56)  # about an hour


class SlurmRefused(UsageError):
    """Slurm will not run this as it was asked for. Its own words are in the message."""


class SlurmAway(ReadWriteError):
    """Slurm gives no answer: its controller is down or slow, or cannot be reached from here."""


class SlurmMissing(SlurmAway):
    """Slurm's commands are not installed here."""

    exit_code = NotFound.exit_code


def slurm_answer(parse: Callable[[str], T], *command: str) -> T:
    """Return what ``parse`` makes of the output of a command that only asks.

    Raises what ``slurm_output`` raises, and SlurmAway where the output is cut short or one of several servers
    gave no answer.
    """
    done = _run(command, None)
    if _AWAY.search(done.stderr):
        raise SlurmAway(f"{' '.join(command[:3])} answered in part: {' '.join(done.stderr.split())}")
    try:
        return parse(done.stdout)
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise SlurmAway(
            f"{' '.join(command[:3])} answered what cannot be read ({error}), beginning with "
            f"{done.stdout[:80]!r}; try again, and see whether it answers: {command[0]} --version"
        ) from None


def slurm_output(*command: str, text: str | None = None) -> str:
    """Return the standard output of a Slurm command whose input is ``text``.

    Raises SlurmRefused with Slurm's words, SlurmMissing where it is not installed, SlurmAway where the
    controller does not answer.
    """
    return _run(command, text).stdout


def _run(command: tuple[str, ...], text: str | None) -> subprocess.CompletedProcess[str]:
    clusters = os.environ.get("SLURM_CLUSTERS", "")
    if "," in clusters or clusters == "all":
        raise UsageError(
            f"SLURM_CLUSTERS is {clusters!r}, expected one cluster, to which a submission goes and where "
            "status looks"
        )
    # Without what changes a question or its answer's form, and what describes an allocation. Times come in
    # UTC, as two who look may be in two time zones; jobs keep the zone of who submits.
    dropped = (*_DROPPED, "SBATCH_MEM", *REQUEST_VARIABLES.values(), "SLURM_")
    kept = (name for name in os.environ if name in _KEPT or not name.startswith(dropped))
    environ = {name: os.environ[name] for name in kept}
    environ |= {"SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}
    environ |= {} if command[0] == "sbatch" else {"TZ": "UTC0"}
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=120,
            env=environ,
        )
    except OSError as error:
        raise SlurmMissing(
            f"{command[0]} cannot be run here ({error.strerror}); run this on a login node of the cluster, "
            "or make the shards on this machine",
            path=command[0],
            found=error.strerror,
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmAway(f"{command[0]} did not answer in 120 s; {_IS_IT_UP}") from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())
        if _AWAY.search(words) and "known by database" not in words:  # that is a wrong SLURM_CLUSTERS
            hint = _CLOCKS_DIFFER if "Zero Bytes" in words else _IS_IT_UP
            raise SlurmAway(f"{command[0]} gets no answer: {words}; {hint}")
        raise SlurmRefused(f"{command[0]} refuses: {words}")
    return done


def seconds_of(text: str) -> int | None:
    """Return the seconds of a time of Slurm's (``60`` minutes, ``2:03``, ``1-02:03:04``), or None."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?(?:\.\d+)?", text)
    if not match:
        return None
    days, first, second, third = (int(item or 0) for item in match.groups())
    if match[1] is None and match[4] is None:
        return first * 60 + second
    return ((days * 24 + first) * 60 + second) * 60 + third


def minutes_of(text: str) -> int | None:
    """Return the minutes of a time of Slurm's, rounded up as Slurm does, or None for UNLIMITED."""
    seconds = seconds_of(text)
    return None if seconds is None else math.ceil(seconds / 60)


def megabytes_of(text: str) -> float | None:
    """Return the MB of a size of Slurm's, such as ``300`` or ``1.50G``, or None for UNLIMITED."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)B?", text, re.IGNORECASE)
    return float(match[1]) * 1024.0 ** "KMGTP".index(match[2].upper() or "M") / 1024 if match else None


def read_config() -> dict[str, str]:
    """Return ``scontrol show config`` as name -> value. Raises what ``slurm_answer`` raises."""

    def parse(text: str) -> dict[str, str]:
        config = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, re.MULTILINE))
        if not re.fullmatch(r"[0-9]{1,10}", config.get("MaxArraySize", "")):  # cut short before it
            raise ValueError("no MaxArraySize")
        return config

    return slurm_answer(parse, "scontrol", "show", "config")


def ask_patiently(question: Callable[[], T]) -> T:
    """Return the answer, asking again while Slurm gives none: a controller that restarts is back in a minute.

    Raises SlurmAway after about an hour.
    """
    for delay_s in _DELAYS_S:
        try:
            return question()
        except SlurmMissing:
            raise
        except SlurmAway as error:
            say(f"{error}; asking again in {delay_s} s. What runs goes on meanwhile")
            sleep(delay_s)
    return question()
