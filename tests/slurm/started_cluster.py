"""A real Slurm cluster on this machine, by tests/slurm_cluster.sh."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkout import SLURM_STARTER
from tests.waiting import HANG_S

CANNOT_INSTALL = 69


def start_missing(environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Start what does not run of a cluster. Its daemons stay, so this is no ``run_child``."""
    command = [str(SLURM_STARTER), "up"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=HANG_S)


@contextmanager
def started_cluster(environ: Mapping[str, str], untested: str) -> Iterator[dict[str, str]]:
    """Start one and end it: the environment in which commands find it, CLUSTER_DIR and SLURM_CONF included.

    ``environ`` has the starter's settings. Skips, with the starter's own words, only where Slurm cannot be
    installed; ``untested`` says what is not tested then.
    """
    folder = tempfile.mkdtemp(prefix="shardprep-slurm-")  # short: sockets lie in it
    environ = {**environ, "CLUSTER_DIR": folder, "SLURM_CONF": str(Path(folder) / "slurm.conf")}
    try:
        up = start_missing(environ)
        if up.returncode == CANNOT_INSTALL:
            pytest.skip(f"{untested}: {up.stderr.strip()}")
        assert up.returncode == 0, up.stderr
        yield environ
    finally:
        subprocess.run([SLURM_STARTER, "down"], env=environ, check=False, timeout=HANG_S)
        shutil.rmtree(folder, ignore_errors=True)
