"""tests/install_packages.sh with a stand-in for apt-get."""

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
# Like apt-get, it fails while another process has the lock. An installation creates the commands of packages.
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
    """A folder for PATH with the programs that the script calls and the stand-in, but without Slurm."""
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
def test_simultaneous_installations_wait_for_each_other_and_for_the_lock_of_apt(folder: Path) -> None:
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
    assert len(installed) == 1, printed  # the second one finds its commands installed


@needs_root
def test_a_failed_installation_by_root_names_the_package(folder: Path) -> None:
    (folder / "breaks").touch()
    done = run_child([INSTALLER, "slurm"], code=1, env=environ(folder))
    assert "slurm-wlm" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("lacks", ["root", pytest.param("apt-get", marks=needs_root)])
def test_without_root_or_apt_get_one_line_names_what_is_missing(folder: Path, lacks: str) -> None:
    other_user = {"user": 65534, "group": 65534, "cwd": "/"} if os.geteuid() == 0 and lacks == "root" else {}
    if lacks == "apt-get":
        (folder / "apt-get").unlink()
    script = INSTALLER.read_text()  # as standard input, because other users may not read the checkout
    done = run_child(["/bin/bash", "-s", "slurm"], stdin=script, code=69, env=environ(folder), **other_user)
    (line,) = done.stderr.splitlines()
    assert "slurmctld" in line
    assert not calls(folder)
