"""The quick start of README and the commands that commands print, run with the wheel, not this checkout."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.checkout import ROOT
from tests.children import run_child
from tests.slurm.fake_slurm import install_fake_slurm

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes
HINT = re.compile(r"\b(?:next|or|run|then|one|retry|again|type): ((?:shardprep|sbatch|python|rm) [^\n;()]*)")
# A script that is named is run here, a task after the other; one on standard input goes to the stand-in.
SBATCH = r"""#!/bin/bash
[[ ${1:-} = --array=* ]] || exec @FAKE@ "$@"
tasks=${1#--array=}; shift
while [[ $1 = -* ]]; do shift; done
script=$1; shift
for id in $(seq "${tasks%-*}" "${tasks#*-}"); do
  SLURM_JOB_ID=7 SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=$id bash "$script" "$@" || exit
done
"""
SRUN = "#!/bin/bash\nwhile [[ $1 = -* ]]; do shift; done\n" + 'exec "$@"\n'


class Desk:
    """An empty folder, and an environment that has the wheel alone."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder, self.environ = folder, environ

    def run(self, command: str, *, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = run_child(["bash", "-euc", command], cwd=self.folder, env=self.environ, code=code)
        assert str(ROOT) + "/" not in done.stderr + done.stdout
        return done

    def follow(self, printed: str) -> list[str]:
        """Run each command that was printed, then those that these print; returns all, in their order."""
        todo, tried = HINT.findall(printed), list[str]()
        while todo:
            command = todo.pop(0).strip()
            if command not in tried:
                tried.append(command)
                done = self.run(command, code=None)
                assert done.returncode in (0, 65, 74), f"{command}\n{done.stderr}"
                todo += HINT.findall(done.stdout + done.stderr)
        return tried


@pytest.fixture
def desk(site: Path, prep: Prep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    fake = install_fake_slurm(tmp_path, monkeypatch).place
    commands, folder = tmp_path / "commands", tmp_path / "a desk"
    commands.mkdir()
    folder.mkdir()
    for name, text in {
        "sbatch": SBATCH.replace("@FAKE@", shlex.quote(f"{fake}/bin/sbatch")),
        "srun": SRUN,
    }.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    shutil.copytree(prep.model_dir, tmp_path / "MODEL")
    path = f"{commands}:{site / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**prep.environ(), "PATH": path, "PYTHONPATH": str(site)}
    return Desk(folder, environ)


def quick_start() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = (
        block
        for block in re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if "mkdir raw" in block
    )
    assert " MODEL " in block
    return str(block).replace(" MODEL ", " ../MODEL ")


def test_the_quick_start_of_the_readme_runs_as_it_stands_in_an_empty_folder(desk: Desk, site: Path) -> None:
    ended = desk.run(quick_start())
    assert "verified 2 shards: 3 samples" in ended.stdout
    assert "두 번째 문서입니다." in ended.stdout, "peek shows it"
    found = desk.run(
        "python -c 'import shardprep, loader; print(shardprep.__file__, loader.__file__)'"
    ).stdout
    assert found.split() == [f"{site}/{name}/__init__.py" for name in ("shardprep", "loader")]


@pytest.mark.parametrize("number", [0, 1, 2], ids=["sbatch", "submit", "run"])
def test_each_next_command_of_plan_leads_on_from_any_folder(desk: Desk, number: int) -> None:
    plan = next(line for line in quick_start().splitlines() if " plan " in line)
    desk.run(quick_start().partition("shardprep")[0])
    printed = desk.run(plan.replace("--output_dir data", "--output_dir 'my data'"))
    hints = HINT.findall(printed.stdout)
    assert [hint.split()[0:2] for hint in hints][1:] == [["shardprep", "submit"], ["shardprep", "run"]]
    data, desk.folder = desk.folder / "my data", desk.folder / "elsewhere"
    desk.folder.mkdir()
    tried = desk.follow(f"next: {hints[number]}")
    if number != 1:
        tried += desk.follow(desk.run(f"shardprep status {shlex.quote(str(data))}").stdout)
        assert any("verify" in command for command in tried)
        assert (data / "index.json").exists()
    else:
        assert len(tried) > 1


def test_a_package_that_another_distribution_overwrote_is_named(
    desk: Desk, site: Path, tmp_path: Path
) -> None:
    mixed = shutil.copytree(site, tmp_path / "mixed")
    (mixed / "slurm" / "__init__.py").write_text("")
    (mixed / "slurm" / "__main__.py").write_text("print('of others')\n")
    (mixed / "loader" / "__init__.py").write_text("")
    info = mixed / "pyslurm-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pyslurm\nVersion: 1.0\n")
    (info / "RECORD").write_text(
        "slurm/__init__.py,,0\nslurm/__main__.py,,19\npyslurm-1.0.dist-info/RECORD,,\n"
    )
    desk.environ["PYTHONPATH"] = str(mixed)
    whole = f"pyslurm has installed {mixed}/slurm/__init__.py and 1 more files into it"
    for command in ("shardprep status data", "shardprep doctor --no-torch"):
        ended = desk.run(f"python -m {command}", code=2)
        assert whole in ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr
    ended = desk.run("python -c 'from shardprep import get_llama3_dataloader'", code=1)
    assert f"{mixed}/loader/__init__.py is not shardprep's own" in ended.stderr.splitlines()[-1]


def test_what_verify_run_and_status_print_of_unmade_shards_makes_them(desk: Desk) -> None:
    bad = r"{ seq 30; printf 'caf\xe9\n'; } > raw/c.txt"
    desk.run(quick_start().partition("shardprep")[0] + bad)
    plan = next(line for line in quick_start().splitlines() if " plan " in line)
    desk.run(plan.replace("--output_dir data", "--output_dir 'my data'").replace("shards 2", "shards 3"))
    data, desk.folder = desk.folder / "my data", desk.folder / "elsewhere"
    desk.folder.mkdir()
    place = shlex.quote(str(data))
    tried = desk.follow(desk.run(f"shardprep verify {place}", code=66).stderr)
    assert len(tried) == 3, "a command of each shard"
    assert len(list(data.glob("shard-*.json"))) == 2
    tried = desk.follow(desk.run(f"shardprep run {place}", code=65).stderr)
    assert any(" --shards 2" in command for command in tried)
    tar = data / "shard-00001.tar"
    tar.write_bytes(bytes(tar.stat().st_size))
    tried = desk.follow(desk.run(f"shardprep verify {place}", code=65).stderr)
    assert any(command.startswith("rm ") for command in tried)
    tried = desk.follow(desk.run(f"shardprep status {place}").stdout)
    assert any("--max_bad_fraction 0.05" in command for command in tried)
