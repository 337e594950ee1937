"""slurm/prep_array.sh and slurm/train_ddp.sh on a real cluster of three nodes, without accounts.

test_scripts.py runs them without Slurm.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.children import run_child
from tests.held_children import Hold
from tests.slurm.started_cluster import ENDED, Cluster, processes, started_cluster
from tests.waiting import wait_until
from tests.warm_python import WarmPython
from tests.world import World

pytestmark = [pytest.mark.long, pytest.mark.slurm]

SCRIPT, TRAIN = ROOT / "slurm" / "prep_array.sh", ROOT / "slurm" / "train_ddp.sh"
# Replaces Python: writes its arguments, one per line, and how srun started it. When it is stopped, it takes
# some time to clean up, which nothing may interrupt.
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


@pytest.fixture(scope="module")
def plain_cluster() -> Iterator[dict[str, str]]:
    """A cluster of three nodes, as the environment for commands and for ranks of a training."""
    settings = {"NODE_CPUS": "8", "KILL_WAIT": "120"}
    settings["EXTRA_CONF"] = "PartitionName=whole Nodes=ALL OverSubscribe=EXCLUSIVE MaxTime=INFINITE"
    settings |= {"SHARDPREP_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    settings |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with started_cluster("NO SLURM CLUSTER, the batch scripts are untested here", **settings) as started:
        yield started


def site_with_stand_in(cluster: dict[str, str], place: Path) -> Cluster:
    """Return a cluster with an empty folder in ``place`` to submit from, and the stand-in beside it."""
    (place / "desk").mkdir()
    (place / "python").write_text(STAND_IN.format(place=place))
    (place / "python").chmod(0o755)
    return Cluster(folder=place / "desk", environ={**cluster, "SHARDPREP_PYTHON": str(place / "python")})


@pytest.fixture
def site(plain_cluster: dict[str, str], tmp_path: Path) -> Cluster:
    return site_with_stand_in(plain_cluster, tmp_path)


def sbatch(site: Cluster, *words: object) -> str:
    return site.run("sbatch", "--parsable", *words)


def exit_codes(site: Cluster, job: str) -> dict[int, str]:
    return {index: each["ExitCode"] for index, each in site.ended(job).items()}


# How a job is stopped -> the signal of its worker. The last one reaches its time limit.
STOPS = {
    ("scancel",): "TERM",
    ("scancel", "--batch", "--signal=TERM"): "USR1",
    ("scancel", "--batch", "--signal=USR1"): "USR1",
    ("scancel", "--signal=USR1"): "USR1",
    (): "USR1",
}


@pytest.fixture(scope="module", autouse=True)
def stopped(
    plain_cluster: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[World, Cluster, str]:
    """Tasks that were told to stop. Slurm checks time limits every 30 s; other tests run in the meantime."""
    place = tmp_path_factory.mktemp("stopped")
    world = World(place).raw({"a.txt": "a line\n" * 9}).plan(num_shards=len(STOPS))
    site = site_with_stand_in(plain_cluster, place)
    (place / "waits").touch()
    options = (f"--array=0-{len(STOPS) - 1}", "-c1", "--time=60", "--signal=B:USR1@118")
    job = sbatch(site, *options, SCRIPT, world.data_dir)
    wait_until(lambda: len(list(place.glob("*.tmp"))) == len(STOPS))
    for index, stop in enumerate(STOPS):
        if stop:
            site.run(*stop, f"{job}_{index}")
        else:  # let it end in the second minute from now, whenever it began; it gets the signal before
            minutes = int(site.tasks(f"{job}_{index}")[index]["RunTime"].split(":")[1])
            site.run("scontrol", "update", f"jobid={job}_{index}", f"timelimit={minutes + 2}")
    return world, site, job


def test_a_task_fills_a_node_that_is_not_shared(site: Cluster, tmp_path: Path) -> None:
    job = sbatch(site, "--partition=whole", "--array=0", "--cpus-per-task=2", SCRIPT)
    assert exit_codes(site, job) == {0: "0:0"}
    assert (tmp_path / "0.step").read_text() == "8 0\n"


def test_the_plain_form_makes_shards_0_to_9_and_leaves_only_logs(site: Cluster, tmp_path: Path) -> None:
    """If Slurm restarts a task, the log of its first run is kept."""
    job = sbatch(site, SCRIPT)
    assert exit_codes(site, job) == {index: "7:0" if index == 7 else "0:0" for index in range(10)}
    for index in range(10):
        words = ["--shard_id", str(index), "--output_dir", "/data/processed"]
        assert (tmp_path / f"{index}.words").read_text().splitlines() == words
        assert (tmp_path / f"{index}.step").read_text() == "8 0\n"
    (tmp_path / "7.words").unlink()
    site.run("scontrol", "requeue", f"{job}_7")
    wait_until((tmp_path / "7.words").exists)
    assert exit_codes(site, f"{job}_7") == {7: "7:0"}
    assert [path.name for path in site.folder.iterdir()] == ["logs"]
    names = [*map(str, range(10)), "7.before-restart-1"]
    logs = {path.name: path.read_text() for path in (site.folder / "logs").iterdir()}
    assert logs.keys() == {f"shardprep-{job}_{name}.log" for name in names}
    # srun's own line about an exit code may come before the worker's output.
    assert all("the worker speaks" in log.splitlines() for log in logs.values())


def test_folder_and_flags_reach_the_worker_unchanged(site: Cluster, tmp_path: Path) -> None:
    words = ("my data' $(touch INJECTED)", "--input_dir", "한글 $HOME `touch INJECTED`; touch INJECTED", "")
    (tmp_path / "setup.sh").write_text(f"export SHARDPREP_PYTHON={tmp_path / 'python'}\n")
    first, script = "set -euo pipefail\n", tmp_path / "job.sh"
    setup = f"{first}SHARDPREP_SETUP={tmp_path / 'setup.sh'}\n"
    script.write_text(SCRIPT.read_text().replace(first, setup, 1))
    jobs = [sbatch(site, "--array=3,5", "-c1", SCRIPT, *words)]
    jobs += [sbatch(site, "--array=0", "-c1", "--export=NONE", script, "--no-keep_text")]
    assert [exit_codes(site, job) for job in jobs] == [{3: "0:0", 5: "0:0"}, {0: "0:0"}]
    shown = [(tmp_path / f"{index}.words").read_text().split("\n")[2:-1] for index in (5, 0)]
    assert shown[0] == ["--output_dir", words[0], "--planned", *words[1:]]
    assert shown[1] == ["--output_dir", "/data/processed", "--no-keep_text"]
    assert [path.name for path in site.folder.iterdir()] == ["logs"]


# --- training: slurm/train_ddp.sh with examples/train_llama.py

PROGRAM = ROOT / "examples" / "train_llama.py"
HELD = ROOT / "tests" / "held" / "sitecustomize.py"
FLAGS = (
    *("--global_batch_size", "8", "--batch_size", "2", "--seq_len", "64", "--num_workers", "0"),
    *("--num_threads", "1", "--log_batches"),
)


@pytest.fixture(scope="module")
def warm(plain_cluster: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """Python for ranks, and for runs without Slurm."""
    modules = ["transformers.models.llama.modeling_llama", "loader.dataloader"]
    with WarmPython(tmp_path_factory.mktemp("warm"), modules, plain_cluster) as server:
        yield server


@pytest.fixture
def train_site(plain_cluster: dict[str, str], warm: WarmPython, tmp_path: Path) -> Cluster:
    """The cluster with a Python whose ranks are forks. torchrun itself is started as a new process."""
    python = tmp_path / "python_of_ranks"
    python.write_text(
        f'#!/bin/bash\n[[ $* != *torch.distributed.run* ]] || exec {sys.executable} "$@"\n'
        f'exec {warm.python} "$@"\n'
    )
    python.chmod(0o755)
    return Cluster(environ={**plain_cluster, "SHARDPREP_PYTHON": str(python)}, folder=tmp_path)


class Unbroken:
    """The log of a run without Slurm that nothing interrupts. It goes on as far as a test needs."""

    def __init__(self, python: Path, data: Path, folder: Path, environ: dict[str, str]) -> None:
        self._site = Cluster(environ=environ, folder=folder)
        self._command = [python, PROGRAM, data, folder / "checkpoints", *FLAGS]

    def steps(self, number: int) -> list[dict[str, object]]:
        """Return what the run logged at its first steps."""
        checkpoints = self._site.folder / "checkpoints"
        if not checkpoints.exists() or len(steps_of(checkpoints)) < number:
            self._site.run(*self._command, "--num_steps", number)
        return steps_of(checkpoints)[:number]


@pytest.fixture(scope="module")
def unbroken(
    warm: WarmPython, data: Path, plain_cluster: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Unbroken:
    return Unbroken(warm.python, data, tmp_path_factory.mktemp("unbroken"), dict(plain_cluster))


@pytest.fixture(scope="module")
def data(model_dir: Path, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return World(folder, tokenizer=model_dir, raw_dir=sample_dir).make(num_shards=4).data_dir


def train(site: Cluster, data: Path, checkpoints: Path, *flags: object, program: Path = PROGRAM) -> str:
    """Submit a training on two nodes and return its job id."""
    return sbatch(site, "--nodes=2", "--ntasks-per-node=1", TRAIN, program, data, checkpoints, *FLAGS, *flags)


def held_program(folder: Path) -> Path:
    """Return the example with a pause, see ``Hold``. Forks of WarmPython do not run a sitecustomize."""
    program = folder / "held.py"
    runs = [f"runpy.run_path({str(HELD)!r})", f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"]
    program.write_text("\n".join(["import runpy", *runs, ""]))
    return program


def train_log(site: Cluster, job: str) -> str:
    path = site.folder / f"train-{job}.log"
    return path.read_text() if path.exists() else ""


def steps_of(checkpoints: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (checkpoints / "log.jsonl").read_text().splitlines()]


def test_an_interrupted_training_resumes_on_one_node_with_the_same_batches_and_losses(
    unbroken: Unbroken, train_site: Cluster, data: Path, tmp_path: Path
) -> None:
    """After USR1 it saves a checkpoint and is requeued, then runs on half the nodes."""
    site, checkpoints, num_steps = train_site, tmp_path / "cut", 12
    flags = ("--num_steps", num_steps, "--save_every", 1000)
    hold = Hold(tmp_path, "open", r"/log\.jsonl$")  # rank 0 opens it after each step
    site.environ.update(hold.environ(number=3), PYTHONPATH=str(ROOT))
    job = train(site, data, checkpoints, *flags, program=held_program(tmp_path))
    hold.wait(1)
    site.run("scontrol", "update", "partitionname=cpu", "state=down")  # the job must not restart too early
    site.run("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: list(checkpoints.glob(".stop-*")))
    hold.release()
    wait_until(lambda: site.tasks(job)[0]["JobState"] in {"PENDING", *ENDED})
    assert site.tasks(job)[0]["JobState"] == "PENDING", train_log(site, job)
    daemon = f"slurmstepd: [{job}."  # it may report the first end late
    wait_until(lambda: not any(command.startswith(daemon) for _, command in processes()))
    site.run("scontrol", "update", f"jobid={job}", "numnodes=1", "numtasks=1")
    site.run("scontrol", "update", "partitionname=cpu", "state=up")
    last, log = site.ended(job)[0], train_log(site, job)
    assert last["JobState"] == "COMPLETED", f"{last}\n{log}"
    assert (last["Restarts"], last["NumNodes"]) == ("1", "1")
    assert "rank 0 of 2 (RANK/WORLD_SIZE), from step 0" in log
    assert "rank 0 of 1 (RANK/WORLD_SIZE), from step 3" in log
    ours, theirs = steps_of(checkpoints), unbroken.steps(num_steps)
    assert [line["step"] for line in ours] == list(range(1, num_steps + 1)), "no step twice or lost"
    assert [line["batch"] for line in ours] == [line["batch"] for line in theirs]
    assert re.search(r"step 10: loss .* tokens/s, waited .*% for data, at step 10 of", log)
    assert len({line["batch"] for line in theirs}) == num_steps, "the hashes of batches are distinct"
    for line, other in zip(ours, theirs, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_ranks_save_a_checkpoint_after_sigterm_even_if_workers_get_it_too(
    unbroken: Unbroken, train_site: Cluster, data: Path, warm: WarmPython, tmp_path: Path
) -> None:
    """A preemption or scancel sends it to every process of the job's steps."""
    site, checkpoints = train_site, tmp_path / "term"
    site.environ["SHARDPREP_MAX_REQUEUES"] = "0"
    workers, log = ("--num_workers", 1), checkpoints / "log.jsonl"
    endless = ("--num_steps", 1000, "--save_every", 1000, "--step_sleep_s", 0.3)
    job = train(site, data, checkpoints, *workers, *endless)

    def is_under_way() -> bool:
        return site.tasks(job)[0]["JobState"] in ENDED or (log.exists() and len(steps_of(checkpoints)) > 2)

    wait_until(is_under_way)
    site.run("scancel", "--signal=TERM", job)
    last = site.ended(job)[0]
    assert (last["JobState"], last["ExitCode"]) == ("FAILED", "75:0"), train_log(site, job)
    assert "SHARDPREP_MAX_REQUEUES allows: not again" in train_log(site, job), "it has a newer checkpoint"
    num_steps = len(steps_of(checkpoints)) + 3
    site.run(warm.python, PROGRAM, data, checkpoints, *FLAGS, *workers, "--num_steps", num_steps)
    ours = [(line["step"], line["batch"]) for line in steps_of(checkpoints)]
    assert ours == [(line["step"], line["batch"]) for line in unbroken.steps(num_steps)]


def test_with_torchrun_on_two_nodes_ranks_resume_from_the_newest_readable_checkpoint(
    warm: WarmPython, train_site: Cluster, data: Path, tmp_path: Path
) -> None:
    """The folder has a preprocess.py and a loader.py, which torchrun's ``python -m`` could import."""
    checkpoints = tmp_path / "torchrun"
    train_site.run(warm.python, PROGRAM, data, checkpoints, *FLAGS, "--num_steps", 2)
    whole = (checkpoints / "step-00000002.pt").read_bytes()
    (checkpoints / "step-00000003.pt").write_bytes(whole[:-200])  # cut, as by a failed disk
    for name in ("preprocess", "loader"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the old script')")
    train_site.environ["SHARDPREP_LAUNCHER"] = "torchrun"
    job = train(train_site, data, checkpoints, "--num_steps", 4)
    assert train_site.ended(job)[0]["JobState"] == "COMPLETED", train_log(train_site, job)
    assert "rank 0 of 2 (RANK/WORLD_SIZE), from step 2" in train_log(train_site, job)


def test_submit_and_retry_need_no_accounts(
    plain_cluster: dict[str, str], sample_dir: Path, tmp_path: Path
) -> None:
    """The first attempt does not find the moved input; the retry gets its new folder."""
    raw, data = tmp_path / "raw", tmp_path / "O"
    site = Cluster(environ=dict(plain_cluster), folder=tmp_path)
    shutil.copytree(sample_dir, raw)
    World(tmp_path, raw_dir=raw, data_dir=data).plan(num_shards=3)
    moved = raw.rename(tmp_path / "moved")

    first = site.slurm("submit", data, "--cpus_per_task", 1, "--wait", code=74)
    assert f"warning: no {raw}" in first
    assert "failed, no such input or shard (66): shards 0-2" in first
    site.slurm("retry", data, "--worker_args", f"--input_dir {moved}")
    site.wait_until_idle()
    state = site.status(data)
    assert (state["done"], state["verified"]) == ("0-2", True)


def test_run_under_srun_shares_the_shards_of_all_nodes(
    plain_cluster: dict[str, str], sample_dir: Path, tmp_path: Path
) -> None:
    """One data set by 4 processes on 2 nodes, then on one node after half of it is lost, then by an array."""
    site = Cluster(environ=dict(plain_cluster), folder=tmp_path)
    world = World(tmp_path, raw_dir=sample_dir, data_dir=tmp_path / "D").plan(num_shards=10)
    expected = world.copy(tmp_path / "alone").run().contents()
    run = (sys.executable, "-m", "preprocess", "run", world.data_dir)
    several = run_child(
        ["srun", "--nodes=2", "--ntasks=4", "--cpus-per-task=1", *map(str, run)], env=site.environ
    ).stderr
    assert world.contents() == expected
    made = [int(number) for number in re.findall(r"part \d of 4: (\d+) shards? made", several)]
    assert made, "a task that starts last may find all shards made"
    assert 10 <= sum(made) <= 13, "each task may make one more that another has just begun"
    half = [world.data_dir / f"shard-{shard_id:05d}.json" for shard_id in range(0, 10, 2)]
    for path in half:
        path.unlink()
    run_child(["srun", "--nodes=1", "--ntasks=2", *map(str, run)], env=site.environ)
    assert world.contents() == expected
    for path in half:
        path.unlink()
    options = ("--partition=whole", "--array=0-1", "--nodes=2-2", "--ntasks-per-node=1", "--cpus-per-task=1")
    job = sbatch(site, *options, SCRIPT, world.data_dir)
    assert exit_codes(site, job) == {0: "0:0", 1: "0:0"}
    assert world.contents() == expected
    log = (tmp_path / "logs" / f"shardprep-{job}_0.log").read_text()
    assert "4 tasks of a job array share" in log
    assert "with up to 5 processes each" in log or "done already" in log, "all CPUs of its node, for 5 shards"
    assert not world.temporaries()


def test_a_stopped_worker_cleans_up_and_its_task_ends_with_75(stopped: tuple[World, Cluster, str]) -> None:
    world, site, job = stopped
    assert exit_codes(site, job) == dict.fromkeys(range(len(STOPS)), "75:0")
    for index, (stop, signal) in enumerate(STOPS.items()):
        log = (site.folder / "logs" / f"shardprep-{job}_{index}.log").read_text()
        [heard] = re.findall(r"the worker heard (.*)", log)
        assert signal in heard.split()  # scancel sends both, in any order
        # Slurm's own lines follow the log to logs/.
        assert stop != ("scancel",) or "CANCELLED AT" in log
    assert not list(site.folder.parent.glob("*.tmp"))
    assert not list(site.folder.glob("*.log"))
    assert site.status(world.data_dir)["causes"]["TIMEOUT"] == "4"
