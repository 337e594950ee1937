"""tests/install_packages.sh beside a stand-in for apt-get, which speaks as the real one did."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.children import child, end_of, run_child
from tests.waiting import wait_until

pytestmark = pytest.mark.processes

INSTALLER = ROOT / "tests" / "install_packages.sh"
# It refuses while the lock is held, as apt-get does for its lists. An installation makes the packages'
# commands.
APT_GET = """#!/bin/bash
here=${0%/*}
exec 8>>"$here/lock"
if ! flock -n 8; then
  echo refused >>"$here/calls"
  echo "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 1 (apt-get)"
  echo "E: Unable to lock directory /var/lib/apt/lists/"
  exit 100
fi
echo "$*" >>"$here/calls"
[[ " $* " == *" install "* ]] || exit 0
[[ ! -e $here/breaks ]] || { echo "E: Unable to locate package slurm-wlm"; exit 100; }
for name in munged slurmctld slurmd sbatch shellcheck; do cp "$here/true" "$here/$name"; done
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root installs packages")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """PATH in a folder: what the script calls, and the stand-in; no Slurm."""
    for name in ("bash", "flock", "mktemp", "tail", "grep", "sleep", "rm", "cp", "true"):
        found = shutil.which(name)
        assert found, name
        (tmp_path / name).symlink_to(found)
    (tmp_path / "apt-get").write_text(APT_GET)
    (tmp_path / "apt-get").chmod(0o755)
    tmp_path.chmod(0o755)
    return tmp_path


def environ(folder: Path) -> dict[str, str]:
    return {"PATH": str(folder), "SBIN": "", "TMPDIR": str(folder)}


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


@needs_root
def test_two_installations_at_once_wait_for_each_other_and_for_apts_lock(folder: Path) -> None:
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        settings = {"env": environ(folder), "stderr": subprocess.STDOUT}
        with (
            child([INSTALLER, "slurm"], **settings) as one,
            child([INSTALLER, "shellcheck"], **settings) as two,
        ):
            wait_until(lambda: calls(folder).count("refused") > 2)
            fcntl.flock(lock, fcntl.LOCK_UN)
            printed = end_of(one) + end_of(two)
    installed = [call for call in calls(folder) if " install " in call]
    assert len(installed) == 1, printed  # the second one found its commands there


@needs_root
def test_what_root_cannot_install_on_debian_is_a_failure_that_names_the_package(folder: Path) -> None:
    (folder / "breaks").touch()
    done = run_child([INSTALLER, "slurm"], code=1, env=environ(folder))
    assert "slurm-wlm" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("lacks", ["root", pytest.param("apt-get", marks=needs_root)])
def test_who_cannot_install_reads_one_line_that_says_what_is_missing(folder: Path, lacks: str) -> None:
    other_user = {"user": 65534, "group": 65534, "cwd": "/"} if os.geteuid() == 0 and lacks == "root" else {}
    if lacks == "apt-get":
        (folder / "apt-get").unlink()
    script = INSTALLER.read_text()  # by standard input: the checkout may be closed to other users
    done = run_child(["/bin/bash", "-s", "slurm"], stdin=script, code=69, env=environ(folder), **other_user)
    (line,) = done.stderr.splitlines()
    assert "slurmctld" in line
    assert not calls(folder)
