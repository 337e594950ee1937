"""A folder of stand-ins for Slurm's commands, first on PATH."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.slurm.fake_slurm import FAKE, JOB, FakeSlurm


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    place = tmp_path / "slurm's commands"
    place.mkdir()
    for name in ("sbatch", "scontrol", "sinfo", "squeue", "sacct", "scancel", "sacctmgr"):
        (place / name).with_suffix(".sh").write_text(FAKE.replace("@PLACE@", shlex.quote(str(place))))
        (place / name).with_suffix(".sh").chmod(0o755)
        (place / "bin").mkdir(exist_ok=True)
        (place / "bin" / name).symlink_to(place / f"{name}.sh")
    (place / "config").write_text("ClusterName = test\nMaxArraySize            = 1001\n")
    (place / "job").write_text(JOB)
    monkeypatch.setenv("PATH", f"{place / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    for name in [each for each in os.environ if each.startswith(("SLURM", "SBATCH", "SHARDPREP"))]:
        monkeypatch.delenv(name)
    return FakeSlurm(place=place)
