"""slurm/prep_array.sh on a real cluster of three nodes: what reaches a stand-in for the worker.

test_prep_array_alone.py runs it without Slurm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.slurm.started_cluster import Cluster, started_cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.slurm

SCRIPT = ROOT / "slurm" / "prep_array.sh"
# In the place of Python: writes its arguments, a line each, and how srun started it. Cleaning up takes a
# while, and nothing may cut it short.
STAND_IN = """#!/bin/bash
place={place} index=$4
printf '%s\\n' "${{@:3}}" >"$place/$index.words"
echo "$SLURM_CPUS_PER_TASK $SLURM_STEP_ID" >"$place/$index.step"
heard=()
trap 'heard+=(TERM)' TERM; trap 'heard+=(USR1)' USR1
echo "the worker speaks"
[[ -e $place/waits ]] || exit $((index == 7 ? 7 : 0))
touch "$place/$index.tmp"
while ((${{#heard[@]}} == 0)); do sleep 0.02; done
until_s=$((SECONDS + 1)); while ((SECONDS <= until_s)); do sleep 0.02; done
rm "$place/$index.tmp"
echo "the worker heard ${{heard[*]}}"
exit 75
"""


@pytest.fixture(scope="session")
def environ_of_cluster() -> Iterator[dict[str, str]]:
    environ = {**os.environ, "NUM_NODES": "3", "NODE_CPUS": "8", "KILL_WAIT": "120"}
    with started_cluster(environ, "NO SLURM CLUSTER, slurm/ is untested here") as started:
        yield started


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The stand-in, and what it writes."""
    place = tmp_path / "stand-in"
    place.mkdir()
    (place / "python").write_text(STAND_IN.format(place=place))
    (place / "python").chmod(0o755)
    return place


@pytest.fixture
def desk(environ_of_cluster: dict[str, str], place: Path, tmp_path: Path) -> Cluster:
    """An empty folder to submit from."""
    (tmp_path / "desk").mkdir()
    kept = {n: v for n, v in environ_of_cluster.items() if not re.match("SLURM_(?!CONF)|SBATCH|SHARDPREP", n)}
    return Cluster(folder=tmp_path / "desk", environ={**kept, "SHARDPREP_PYTHON": str(place / "python")})


def sbatch(desk: Cluster, *words: object) -> str:
    return desk.run("sbatch", "--parsable", *words)


def exit_codes(desk: Cluster, job: str) -> dict[int, str]:
    return {index: each["ExitCode"] for index, each in desk.ended(job).items()}


def log_of(desk: Cluster, job: str, index: int) -> str:
    return (desk.folder / "logs" / f"shardprep-{job}_{index}.log").read_text()


def test_the_plain_form_makes_shards_0_to_9_and_leaves_only_logs(desk: Cluster, place: Path) -> None:
    job = sbatch(desk, SCRIPT)
    assert exit_codes(desk, job) == {index: "7:0" if index == 7 else "0:0" for index in range(10)}
    for index in range(10):
        words = ["--shard_id", str(index), "--output_dir", "/data/processed"]
        assert (place / f"{index}.words").read_text().splitlines() == words
        assert (place / f"{index}.step").read_text() == "8 0\n"
        assert log_of(desk, job, index).startswith("the worker speaks\n")
    assert [path.name for path in desk.folder.iterdir()] == ["logs"]
    assert len(list((desk.folder / "logs").iterdir())) == 10


def test_folder_and_flags_reach_the_worker_as_they_were_typed(desk: Cluster, place: Path) -> None:
    words = ("my data' $(touch INJECTED)", "--input_dir", "한글 $HOME `touch INJECTED`; touch INJECTED", "")
    jobs = (
        sbatch(desk, "--array=3,5", "-c1", SCRIPT, *words),
        sbatch(desk, "--array=0", "-c1", SCRIPT, "--no-keep_text"),
    )
    assert [exit_codes(desk, job) for job in jobs] == [{3: "0:0", 5: "0:0"}, {0: "0:0"}]
    shown = [(place / f"{index}.words").read_text().split("\n")[2:-1] for index in (5, 0)]
    assert shown[0] == ["--output_dir", words[0], "--planned", *words[1:]]
    assert shown[1] == ["--output_dir", "/data/processed", "--no-keep_text"]
    assert [path.name for path in desk.folder.iterdir()] == ["logs"]


@pytest.mark.parametrize(
    ("options", "stop", "heard"),
    [
        ((), ("scancel",), "TERM"),
        ((), ("scancel", "--batch", "--signal=TERM"), "USR1"),
        ((), ("scancel", "--batch", "--signal=USR1"), "USR1"),
        ((), ("scancel", "--signal=USR1"), "USR1"),
        (("--time=60", "--signal=B:USR1@118"), (), "USR1"),
    ],
)
def test_a_stopped_worker_removes_its_temporary_and_the_task_ends_with_75(
    desk: Cluster, place: Path, options: tuple[str, ...], stop: tuple[str, ...], heard: str
) -> None:
    (place / "waits").touch()
    job = sbatch(desk, "--array=1", "-c1", *options, SCRIPT)
    wait_until((place / "1.tmp").exists)
    if stop:
        desk.run(*stop, f"{job}_1")
    else:  # it ends in the second minute from now, however late it began, and hears so before
        minutes = int(desk.tasks(f"{job}_1")[1]["RunTime"].split(":")[1])
        desk.run("scontrol", "update", f"jobid={job}_1", f"timelimit={minutes + 2}")
    assert exit_codes(desk, job) == {1: "75:0"}
    assert not (place / "1.tmp").exists()
    log = log_of(desk, job, 1)
    [told] = re.findall(r"the worker heard (.*)", log)
    assert heard in told.split()  # of scancel both are on their way, and either may come first
    # what Slurm itself writes to the log follows it to logs/
    assert stop != ("scancel",) or "CANCELLED AT" in log
    assert list(desk.folder.glob("*.log")) == []


def test_a_task_started_again_by_slurm_keeps_the_log_of_its_first_run(desk: Cluster, place: Path) -> None:
    job = sbatch(desk, "--array=7", "-c1", SCRIPT)
    assert exit_codes(desk, job) == {7: "7:0"}
    (place / "7.words").unlink()
    desk.run("scontrol", "requeue", f"{job}_7")
    wait_until((place / "7.words").exists)
    assert exit_codes(desk, job) == {7: "7:0"}
    names = [f"shardprep-{job}_7{part}.log" for part in (".before-restart-1", "")]
    assert sorted(path.name for path in (desk.folder / "logs").iterdir()) == names
    for name in names:
        assert "the worker speaks" in (desk.folder / "logs" / name).read_text()


def test_the_step_starts_without_the_users_environment_too(desk: Cluster, place: Path) -> None:
    (desk.folder / "setup.sh").write_text(f"export SHARDPREP_PYTHON={place / 'python'}\n")
    first = "set -euo pipefail\n"
    script = desk.folder / "job.sh"
    script.write_text(SCRIPT.read_text().replace(first, f"{first}SHARDPREP_SETUP=setup.sh\n", 1))
    job = sbatch(desk, "--array=0", "-c1", "--export=NONE", script)
    assert exit_codes(desk, job) == {0: "0:0"}, log_of(desk, job, 0)
