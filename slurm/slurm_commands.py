"""Runs Slurm's own commands: the one place where this package starts them."""

from __future__ import annotations

import os
import subprocess

from preprocess.shard_format import NotFound, ReadWriteError, UsageError


class SlurmRefused(UsageError):
    """Slurm will not run this as it was asked for; its own words are in the message."""


def slurm_output(*command: str, text: str | None = None) -> str:
    """Standard output of a Slurm command; ``text`` is its input.

    Raises SlurmRefused with Slurm's words where it ends with an error, NotFound where it is not installed,
    ReadWriteError where it does not answer within two minutes.
    """
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=_environ(),
        )
    except FileNotFoundError:
        raise NotFound(
            f"{command[0]} is not installed here; run this on a login node of the cluster, or without one: "
            "python -m preprocess run O"
        ) from None
    except subprocess.TimeoutExpired:
        raise ReadWriteError(
            f"{command[0]} did not answer within 120 s; is the controller up? scontrol ping"
        ) from None
    if done.returncode:
        raise SlurmRefused(f"{command[0]} refuses: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout


# sbatch's variables beat the script's own #SBATCH lines; JobRequest has read those that users set.
_DROPPED = (
    "SQUEUE_",
    "SACCT_",
    "SBATCH_ARRAY",
    "SBATCH_OUTPUT",
    "SBATCH_WAIT",
    "SBATCH_TIMELIMIT",
    "SBATCH_MEM",
)
REQUEST_VARIABLES = {
    name: f"SBATCH_{name.upper()}" for name in ("partition", "account", "qos", "constraint", "exclude")
}


def _environ() -> dict[str, str]:
    """Without formats of the user's own, with index lists of any length."""
    dropped = (*_DROPPED, *REQUEST_VARIABLES.values())
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}
