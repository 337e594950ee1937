"""slurm/prep_array.sh on a real cluster of three nodes: what reaches a stand-in for the worker.

test_prep_array_alone.py runs it without Slurm.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.slurm.started_cluster import Cluster
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


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The stand-in, and what it writes."""
    place = tmp_path / "stand-in"
    place.mkdir()
    (place / "python").write_text(STAND_IN.format(place=place))
    (place / "python").chmod(0o755)
    return place


@pytest.fixture
def site(plain_cluster: dict[str, str], place: Path, tmp_path: Path) -> Cluster:
    """An empty folder to submit from."""
    (tmp_path / "desk").mkdir()
    environ = {**plain_cluster, "SHARDPREP_PYTHON": str(place / "python")}
    return Cluster(folder=tmp_path / "desk", environ=environ)


def sbatch(site: Cluster, *words: object) -> str:
    return site.run("sbatch", "--parsable", *words)


def exit_codes(site: Cluster, job: str) -> dict[int, str]:
    return {index: each["ExitCode"] for index, each in site.ended(job).items()}


def log_of(site: Cluster, job: str, index: int) -> str:
    return (site.folder / "logs" / f"shardprep-{job}_{index}.log").read_text()


def test_the_plain_form_makes_shards_0_to_9_and_leaves_only_logs(site: Cluster, place: Path) -> None:
    job = sbatch(site, SCRIPT)
    assert exit_codes(site, job) == {index: "7:0" if index == 7 else "0:0" for index in range(10)}
    for index in range(10):
        words = ["--shard_id", str(index), "--output_dir", "/data/processed"]
        assert (place / f"{index}.words").read_text().splitlines() == words
        assert (place / f"{index}.step").read_text() == "8 0\n"
        assert log_of(site, job, index).startswith("the worker speaks\n")
    assert [path.name for path in site.folder.iterdir()] == ["logs"]
    assert len(list((site.folder / "logs").iterdir())) == 10


def test_folder_and_flags_reach_the_worker_as_they_were_typed(site: Cluster, place: Path) -> None:
    words = ("my data' $(touch INJECTED)", "--input_dir", "한글 $HOME `touch INJECTED`; touch INJECTED", "")
    jobs = (
        sbatch(site, "--array=3,5", "-c1", SCRIPT, *words),
        sbatch(site, "--array=0", "-c1", SCRIPT, "--no-keep_text"),
    )
    assert [exit_codes(site, job) for job in jobs] == [{3: "0:0", 5: "0:0"}, {0: "0:0"}]
    shown = [(place / f"{index}.words").read_text().split("\n")[2:-1] for index in (5, 0)]
    assert shown[0] == ["--output_dir", words[0], "--planned", *words[1:]]
    assert shown[1] == ["--output_dir", "/data/processed", "--no-keep_text"]
    assert [path.name for path in site.folder.iterdir()] == ["logs"]


# How a job is told to stop -> what its worker hears. The last one ends at its time limit.
STOPS = {
    ("scancel",): "TERM",
    ("scancel", "--batch", "--signal=TERM"): "USR1",
    ("scancel", "--batch", "--signal=USR1"): "USR1",
    ("scancel", "--signal=USR1"): "USR1",
    (): "USR1",
}


def test_a_stopped_worker_removes_its_temporary_and_the_task_ends_with_75(site: Cluster, place: Path) -> None:
    (place / "waits").touch()
    options = ("-c1", "--time=60", "--signal=B:USR1@118")
    tasks = [
        (sbatch(site, f"--array={index}", *options, SCRIPT), index, stop) for index, stop in enumerate(STOPS)
    ]
    wait_until(lambda: len(list(place.glob("*.tmp"))) == len(STOPS))
    for job, index, stop in tasks:
        if stop:
            site.run(*stop, f"{job}_{index}")
        else:  # it ends in the second minute from now, however late it began, and hears so before
            minutes = int(site.tasks(f"{job}_{index}")[index]["RunTime"].split(":")[1])
            site.run("scontrol", "update", f"jobid={job}_{index}", f"timelimit={minutes + 2}")
    for job, index, stop in tasks:
        assert exit_codes(site, job) == {index: "75:0"}, stop
        log = log_of(site, job, index)
        [told] = re.findall(r"the worker heard (.*)", log)
        assert STOPS[stop] in told.split()  # of scancel both are on their way, and either may come first
        # what Slurm itself writes to the log follows it to logs/
        assert stop != ("scancel",) or "CANCELLED AT" in log
    assert not list(place.glob("*.tmp"))
    assert not list(site.folder.glob("*.log"))


def test_a_task_started_again_by_slurm_keeps_the_log_of_its_first_run(site: Cluster, place: Path) -> None:
    job = sbatch(site, "--array=7", "-c1", SCRIPT)
    assert exit_codes(site, job) == {7: "7:0"}
    (place / "7.words").unlink()
    site.run("scontrol", "requeue", f"{job}_7")
    wait_until((place / "7.words").exists)
    assert exit_codes(site, job) == {7: "7:0"}
    names = [f"shardprep-{job}_7{part}.log" for part in (".before-restart-1", "")]
    assert sorted(path.name for path in (site.folder / "logs").iterdir()) == names
    for name in names:
        assert "the worker speaks" in (site.folder / "logs" / name).read_text()


def test_the_step_starts_without_the_users_environment_too(site: Cluster, place: Path) -> None:
    (site.folder / "setup.sh").write_text(f"export SHARDPREP_PYTHON={place / 'python'}\n")
    first = "set -euo pipefail\n"
    script = site.folder / "job.sh"
    script.write_text(SCRIPT.read_text().replace(first, f"{first}SHARDPREP_SETUP=setup.sh\n", 1))
    job = sbatch(site, "--array=0", "-c1", "--export=NONE", script)
    assert exit_codes(site, job) == {0: "0:0"}, log_of(site, job, 0)
