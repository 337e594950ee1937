"""``submit``: values for Slurm, scripts, answers of Slurm, and two submits at the same time.

tests/oracle/test_refusals.py has requests that are refused.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shardprep.errors import ReadWriteError, UsageError
from slurm import submit_with_submitit
from tests.children import run_child
from tests.forged import rewrite_plan
from tests.slurm.fake_slurm import ALL, JOB, WHEN, Desk, array, squeue_line
from tests.world import World, call_main

pytestmark = pytest.mark.processes

PYTHON, SETUP, CONTAINER = "SHARDPREP_PYTHON", "SHARDPREP_SETUP", "SHARDPREP_EXEC"


# --- values


@pytest.mark.parametrize(
    ("environ", "flags", "expected"),
    [
        ({"SBATCH_TIMELIMIT": "7"}, "", {"time": "7"}),
        ({"SBATCH_TIMELIMIT": "1-02"}, "", {"time": "1560"}),
        ({"SBATCH_TIMELIMIT": "2:30:01"}, "", {"time": "151"}),
        ({"SBATCH_MEM_PER_NODE": "300"}, "", {"mem": "300M"}),
        ({"SBATCH_MEM_PER_NODE": "2G"}, "", {"mem": "2048M"}),
        ({"SBATCH_MEM_PER_CPU": "512M"}, "", {"mem-per-cpu": "512M"}),
        ({"SBATCH_MEM_PER_NODE": "2G"}, "--mem_per_cpu_gb 2", {"mem-per-cpu": "2048M", "mem": ""}),
        ({"SBATCH_ACCOUNT": "a", "SBATCH_QOS": "q"}, "--account mine", {"account": "mine", "qos": "q"}),
        ({"SBATCH_PARTITION": "p"}, "--mem_gb 1.5", {"partition": "p", "mem": "1536M"}),
        ({"SBATCH_EXCLUDE": "n[1-2]"}, "", {"exclude": "n[1-2]"}),
        ({}, "--cpus_per_task 9", {"cpus-per-task": "9"}),
        ({}, "", {"cpus-per-task": "1", PYTHON: sys.executable, SETUP: "", CONTAINER: ""}),
        ({}, "--shards_per_task 2", {"array": "0-2%3"}),
        ({PYTHON: "p"}, "", {PYTHON: "p"}),
        ({}, "--container 'apptainer exec i'", {PYTHON: "", CONTAINER: "apptainer exec i"}),
        ({}, "--setup /etc/hostname", {PYTHON: "", SETUP: "/etc/hostname"}),
    ],
)
def test_values_come_from_flags_variables_or_defaults(
    desk: Desk, environ: dict[str, Any], flags: str, expected: dict[str, str]
) -> None:
    """By default a task has one CPU and this Python; a set-up or container brings its own Python."""
    desk.answers("sinfo", "cpu*|idle|4000|4|infinite\n")
    shown = desk.slurm("submit", *shlex.split(flags), "--dry_run", **environ).partition("-verify")[0]
    lines = re.findall(r"^(?:#SBATCH --|export )([\w-]+)=(.*)$", shown, re.MULTILINE)
    found = {name: "".join(shlex.split(value)) for name, value in lines}
    assert {name: found.get(name, "") for name in expected} == expected


def test_a_dry_run_prints_what_submit_sends_and_works_without_slurm(desk: Desk) -> None:
    shown = desk.slurm("submit", "--mem_gb", 2, "--dry_run", SBATCH_ACCOUNT="env")
    assert ("(SBATCH_ACCOUNT)" in shown, "(flag)" in shown) == (True, True), "the origin of values"
    assert not desk.sent()
    names = ("JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID", "CPUS_PER_TASK", "JOB_NAME")
    in_a_job: dict[str, Any] = {f"SLURM_{name}": "9" for name in names}
    desk.slurm("submit", "--mem_gb", 2, SBATCH_ACCOUNT="env", **in_a_job)
    assert "\n".join(desk.sent()) in shown
    kept = sorted((desk.data / "jobs").glob("*.sh"))
    assert [path.read_text() for path in kept] == desk.sent()
    (desk.place / "away").touch()
    assert "shards_of=(0 1 2 3 4)" in desk.slurm("submit", "--dry_run")
    assert "#SBATCH --array=0-4%5" in desk.slurm("submit", "--dry_run", PATH=str(desk.tmp))


# --- scripts


def run_head(script: str, folder: Path) -> list[str]:
    """Run the head of a script in bash. Returns the words that the worker would get, and the container."""
    head = script.partition("\nset -euo pipefail\n")[0]
    (folder / "job.sh").write_text(head + '\nprintf "%s\\0" "${shardprep_command[@]}" "$SHARDPREP_EXEC"\n')
    environ = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": "0"}
    done = run_child(["bash", "job.sh"], cwd=folder, env=environ, encoding="utf-8")
    return done.stdout.split("\0")[:-1]


# Possible names of folders and values of flags or variables, which a shell must neither run nor split.
NASTY = [
    "a b", " a ", "it's", 'say "a"', "$(touch INJECTED)", "`touch INJECTED`", "; touch INJECTED #", "a;b&c|d",
    "-n", "--wrap=x", "데이터 1", "50% of $HOME", "*?[a]", "~", "#x", "!!", "a\u0085b", "a\u2028b",
]  # fmt: skip
REFUSED = ["data\ntouch INJECTED #", "a\rb", "a\tb", "a\x1b[0mb", "no\udcffutf8"]


def test_values_reach_the_worker_as_they_are_and_no_shell_runs_them(desk: Desk) -> None:
    (heads := desk.tmp / "heads").mkdir()
    for name in NASTY:
        desk.data = desk.data.rename(desk.tmp / f"{name}x")
        words = shlex.join(["--input_dir", name])
        flags = [f"--partition={name}", f"--account={name}", f"--container={name}"]
        desk.slurm("submit", "--shards", 3, f"--worker_args={words}", *flags)
        script, verify = desk.sent()[-2:]
        place = ["--planned", "--output_dir", str(desk.data)]
        assert run_head(script, heads) == ["--shard_id", "3", *place, "--input_dir", name, name]
        assert run_head(verify, heads) == ["verify", str(desk.data), name]
    assert [path.name for path in heads.iterdir()] == ["job.sh"], "nothing was executed"
    assert not list(desk.tmp.rglob("INJECTED"))


def test_an_unreadable_or_unsafe_value_is_refused_and_nothing_is_submitted(desk: Desk) -> None:
    flags = ["--sbatch_args=-Mother", "--worker_args='"]
    for name in REFUSED:
        worker_args, sbatch_args = shlex.join(["--input_dir", name]), shlex.join([f"--comment={name}"])
        flags += [f"--account={name}", f"--worker_args={worker_args}", f"--sbatch_args={sbatch_args}"]
    variables = [{name: "much"} for name in ("SBATCH_TIMELIMIT", "SBATCH_MEM_PER_NODE")]
    for words, environ in [*(([flag], {}) for flag in flags), *(([], each) for each in variables)]:
        error = call_main("submit", desk.data, *words, environ=environ).ends(2).error
        assert error is not None
        assert [*words, *environ][0].partition("=")[0] in str(error.found)
    for name in [*REFUSED, "\\"]:
        desk.data = desk.data.rename(desk.tmp / name)
        desk.slurm("submit", code=2)
    assert not desk.sent()
    assert not (desk.data / "jobs").exists()


def run_script(script: str, place: Path, code: int) -> list[str]:
    """Run a job script with an srun that prints its variables and ends with ``code``. Returns all lines."""
    (place / "srun").write_text(f"#!/bin/sh\nenv | grep ^SLURM | sort\nexit {code}\n")
    (place / "srun").chmod(0o755)
    own = {"MEM_PER_CPU": "1", "MEM_PER_NODE": "2", "CPU_BIND": "x", "STEP_ID": "3", "JOB_ID": "7"}
    inherited = {f"SLURM_{name}": value for name, value in {**own, "CPUS_ON_NODE": "64"}.items()}
    environ = {**os.environ, **inherited, "PATH": f"{place}:{os.environ['PATH']}"}
    done = run_child(["bash", "-c", script], cwd=place, env=environ, code=code)
    return (done.stdout + done.stderr).splitlines()


@pytest.mark.parametrize(("code", "result"), [(0, "verified"), (65, "not verified")])
def test_the_verify_job_ends_with_a_line_to_grep_and_notifies(desk: Desk, code: int, result: str) -> None:
    notified = desk.tmp / "notified"
    desk.slurm("submit", "--notify", f'echo "$SHARDPREP_RESULT, $SHARDPREP_EXIT_CODE" >{notified}; exit 3')
    colon = ":" if code else ""
    line = f"shardprep: {result}{colon} 5 shards of {desk.data}"
    assert line in run_script(desk.sent()[1], desk.tmp, code)
    assert notified.read_text() == f"{result}, {code}\n"


def test_a_step_on_a_whole_node_has_all_cpus_and_no_inherited_variables(desk: Desk) -> None:
    desk.answers("sinfo", "cpu*|idle|4000|3|infinite\n")
    desk.slurm("submit", "--cpus_per_task", "node")
    script = desk.sent()[0]
    assert {"#SBATCH --exclusive", "#SBATCH --mem=0", "shards_of=(0-1 2-4)"} <= set(script.splitlines())
    lines = run_script(script, desk.tmp, 0)
    assert {"SLURM_CPUS_PER_TASK=64", "SLURM_JOB_ID=7"} <= set(lines)
    assert not re.search("SLURM_(MEM_PER|CPU_BIND|STEP_ID)", "\n".join(lines))


def test_slurms_commands_get_no_variables_of_the_current_allocation(desk: Desk) -> None:
    desk.submitted()
    desk.answers_by("squeue", "env >PLACE/seen")
    names = ("SLURM_MEM_PER_CPU", "SLURM_CPU_BIND", "SLURM_JOB_ID", "SLURM_CONF", "SLURM_CLUSTERS")
    desk.status(**dict.fromkeys(names, "7"))
    seen = re.findall("^(SLURM_.*?)=", (desk.place / "seen").read_text(), re.MULTILINE)
    assert {*seen} == {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_BITSTR_LEN", "SLURM_TIME_FORMAT"}


# --- answers of Slurm


class Site(NamedTuple):
    """How Slurm answers, and the expected result of submit."""

    sbatch: str = "exec REAL"
    scontrol: str = "exec REAL"
    answers: Mapping[str, str] = {}
    flags: tuple[str, ...] = ()
    ends: int = 0
    says: str = ""
    sends: Sequence[str] = (ALL,)
    cancels: Sequence[str] = ()
    releases: Sequence[str] = ("1",)  # verify waits for the array
    records: Mapping[str, object] = {}  # of the array


NOTHING: dict[str, Any] = {"sends": (), "releases": ()}
REFUSES = "{{ echo '{}' >&2; exit 1; }}"
TOO_MANY = REFUSES.format("Job violates accounting/QOS policy (size)")
NO_SUCH_NODE = REFUSES.format("Requested node configuration is not available")
NO_ANSWER = REFUSES.format("Unable to contact slurm controller (connect failure)")
# A limit of an account or QOS that cannot be queried: arrays of more than three tasks are refused.
OF_LIMIT = """script=$(cat)
[[ $script =~ SBATCH\\ --array=0-([0-9]+) ]] && last=${BASH_REMATCH[1]} || last=0
[[ "$*" != *WHEN* ]] || ((last < 3)) || REFUSED
printf '%s\\n' "$script" | REAL""".replace("REFUSED", TOO_MANY)
NO_ROOM = """script=$(cat)
[[ $script != *-control* || -e PLACE/refused ]] || { touch PLACE/refused; REFUSED; }
printf '%s\\n' "$script" | REAL""".replace("REFUSED", TOO_MANY)
# A site's wrapper around sbatch, which prints more than the id.
SAYS_MORE = "id=$(REAL) || exit; [[ -n $id ]] || exit 0; "
LATER = "Job update not available right now, the DB index is being set, try again in a bit for job 1"
RELEASE_LATER = (
    f'[[ "$*" != "release "* || -e PLACE/asked ]] || {{ touch PLACE/asked; {REFUSES.format(LATER)}; }}'
)
CANCELLED = f"[[ $1 != release ]] || {REFUSES.format('Job has already finished for job 1')}; exec REAL"
FEW = ("0-1 2-4",)
GRANTED = f"JobId=7 JobName=the sites name UserId=root(0) GroupId=root(0) SubmitTime={WHEN} "
SITES = {
    "a limit met by a test": Site(OF_LIMIT.replace("WHEN", "--test-only"), sends=FEW),
    "a limit met by a job": Site(
        OF_LIMIT.replace("WHEN", "--parsable"), sends=FEW, says="--nodes 1",
        answers={"sinfo": "cpu*|idle|4000|64|infinite\n"}),
    "a short array": Site(answers={"config": "ClusterName = test\nMaxArraySize = 2\n"}, sends=FEW),
    # For example an account without hours, if the site makes Slurm refuse its jobs.
    "refused however few": Site(TOO_MANY, flags=("--time_min=90",), ends=2, says="--time=90", **NOTHING),
    "no room for the controller": Site(
        NO_ROOM, flags=("--until_done",), sends=(ALL, *FEW), cancels=("2", "1"), releases=("3",)),
    # Slurm's message is the same for drained nodes and nodes that never fit.
    "drained nodes": Site(
        f'[[ "$*" != *--test-only* ]] || {NO_SUCH_NODE}; exec REAL', says="Requested node",
        answers={"sinfo": "cpu*|drained|4000|64|infinite\n"}),
    "nodes that never fit": Site(
        NO_SUCH_NODE, ends=2, says="Requested node", **NOTHING,
        answers={"sinfo": "cpu*|idle|4000|64|infinite\n"}),
    "a banner before the id": Site(SAYS_MORE + 'echo "Welcome to 7 nodes"; echo; echo "$id;test"; echo'),
    "an id that cannot be understood": Site(
        SAYS_MORE + "echo Submitted, thank you", ends=74, says="squeue --me --name=shardprep-", releases=()),
    "no answer to a job": Site(
        f'[[ "$*" != *--parsable* ]] || {NO_ANSWER}; exec REAL', ends=74, says="squeue --me", **NOTHING),
    "a part of the job": Site(answers={"job": JOB[:200]}, ends=74, cancels=("1",), releases=()),
    # The site renames jobs, and grants more or less than requested.
    "memory and time": Site(
        answers={"job": f"{GRANTED}NumCPUs=4 TimeLimit=00:01:00 MinMemoryNode=300M"},
        records={"name": "the sites name", "mem_mb": 300, "time_min": 1}),
    "memory of each CPU": Site(
        answers={"job": f"{GRANTED}NumCPUs=4 TimeLimit=UNLIMITED MinMemoryCPU=1.50G"},
        records={"mem_mb": 6144, "time_min": None}),
    "all memory": Site(
        answers={"job": f"{GRANTED}NumCPUs=1 TimeLimit=1-00:00:00 MinMemoryNode=0"},
        records={"mem_mb": None, "time_min": 1440}),
    "slow accounts": Site(scontrol=f"{RELEASE_LATER}; exec REAL"),
    "somebody who cancels at once": Site(scontrol=CANCELLED, ends=2, says="already finished", releases=()),
}  # fmt: skip


@pytest.mark.parametrize("name", SITES)
def test_submit_adapts_to_slurms_answers_and_no_job_runs_without_a_record(desk: Desk, name: str) -> None:
    site, waits = SITES[name], list[float]()
    desk.at_waits(waits.append)
    desk.answers_by("sbatch", site.sbatch)
    desk.answers_by("scontrol", site.scontrol)
    for answer, text in site.answers.items():
        desk.answers(answer, text)
    said = desk.slurm("submit", *site.flags, code=site.ends)
    assert (site.says in said, said.count("; run: ") > 1) == (True, False), "one command to type"
    assert desk.sent_shards() == [*site.sends]
    assert (desk.calls("scancel"), desk.released()) == ([*site.cancels], [*site.releases])
    record = desk.data / "jobs" / "0000.json"
    assert record.exists() == (site.ends == 0 or site.scontrol == CANCELLED)
    assert not site.records or site.records.items() <= json.loads(record.read_text())["arrays"][0].items()
    assert waits == ([5] if name == "slow accounts" else [])


def test_the_second_of_two_simultaneous_submits_cancels_its_jobs(desk: Desk) -> None:
    """The record of the other one appears after this one has looked at the jobs."""
    place = desk.data / "jobs" / "0000.json"
    record = desk.submitted(array("7"), verify="8").rename(desk.tmp / "0000.json")
    copies = shlex.join(["cp", str(record), str(place)])
    desk.answers_by("sbatch", f"[[ $1 != --parsable ]] || {copies}; exec REAL")
    desk.slurm("submit", code=74)
    assert (desk.calls("scancel"), desk.released()) == (["2", "1"], []), "first what waits for the array"
    assert place.read_bytes() == record.read_bytes()
    assert list(place.parent.glob("*.json")) == [place]
    desk.queue(squeue_line("0-4", "PENDING", "Priority", job="7"))
    desk.slurm("submit")  # finds nothing left to send


def test_if_the_waiting_jobs_cannot_be_cancelled_the_array_stays_held(desk: Desk) -> None:
    """Without the array they would begin, and no record says so."""
    desk.answers_by("scancel", f"REAL; {NO_ANSWER}")
    desk.answers_by("sbatch", NO_ROOM)
    desk.slurm("submit", "--until_done")
    assert desk.calls("scancel") == ["2"]
    assert desk.released() == ["3"]


def test_the_verify_job_runs_after_all_tasks_with_time_for_all_bytes(desk: Desk) -> None:
    *_, (name, size, *_) = World(desk.tmp).plan_json()["inputs"]
    rewrite_plan(desk.data / "plan.json", f'["{name}",{size},', f'["{name}",14990000000,')
    desk.slurm("submit", "--sbatch_args", "--dependency=afterok:99")
    assert "#SBATCH --dependency=afterok:99\n" in desk.sent()[0]
    assert "--dependency=afterany:1" in desk.calls("sbatch")[-1]
    desk.slurm("retry")
    assert "afterok:99" not in desk.sent()[2], "the job may be forgotten by then"
    shown = desk.slurm("submit", "--time_min", 2, "--until_done", "--dry_run")
    assert re.findall("^#SBATCH --time=(.*)$", shown, re.MULTILINE) == ["2", "52", "52"]
    desk.answers("sinfo", "cpu*|idle|4000|4|30:00\n")
    shown = desk.slurm("submit", "--time_min", 2, "--dry_run")
    assert "#SBATCH --time=30\n" in shown, "the partition's limit"


# --- the folder of logs, where Slurm follows links


@pytest.mark.parametrize("which", ["", "jobs", "jobs/logs"])
def test_a_folder_where_everybody_may_plant_a_log_is_refused(desk: Desk, which: str) -> None:
    logs = desk.log("old.log", "").parent
    (desk.data / which).chmod(0o777)
    for command in ("submit", "retry"):
        desk.submitted()
        assert "chmod o-w" in desk.slurm(command, "--shards", 1, code=73)
    assert not desk.sent()
    (desk.data / which).chmod(0o775)
    (desk.data / "jobs" / "0000.json").unlink()
    desk.slurm("submit")
    assert logs.is_dir()
    assert len(desk.sent()) == 2, "a group may share a data set"


def plant_link(log: Path) -> None:
    log.symlink_to(log.parents[3] / "private")


def plant_hard_link(log: Path) -> None:
    os.link(log.parents[3] / "private", log)


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (plant_link, "1_4.log"),
        (plant_link, "verify-2.log"),
        (plant_link, "control-3.log"),
        (plant_hard_link, "1_0.log"),
        (os.mkfifo, "1_0.log"),
        (os.mkdir, "1_0.log"),
    ],
)
def test_a_log_that_somebody_planted_is_named_and_no_job_is_released(
    desk: Desk, plant: Callable[[Path], object], name: str
) -> None:
    (desk.tmp / "private").touch()
    desk.log("7_1.log", "of an older array")
    plant(desk.data / "jobs" / "logs" / name)
    assert name in desk.slurm("submit", "--until_done", code=73)
    assert not desk.released()
    assert "1" in " ".join(desk.calls("scancel")).split()
    assert not list((desk.data / "jobs").glob("0*.json"))


# --- trust in records


@pytest.mark.parametrize("name", ["setup", "container", "srun_args", "notify", "sbatch_args", "worker_args"])
def test_retry_takes_no_command_from_a_record_of_other_users(desk: Desk, name: str) -> None:
    """It prints the flag to type instead."""
    (desk.tmp / "setup.sh").touch()
    value = str(desk.tmp / "setup.sh") if name == "setup" else f"--{name}-of-another"
    desk.slurm("submit", f"--{name}={value}")
    record = desk.data / "jobs" / "0000.json"
    foreign = [(os.geteuid(), 0o666), (12345, 0o644)]
    for owner, mode in foreign if os.geteuid() == 0 else foreign[:1]:  # only root can change an owner
        record.chmod(mode)
        os.chown(record, owner, -1)
        for flags in ([], ["--until_done"]):
            assert f"--{name}={value}" in desk.slurm("retry", *flags, code=78)
    assert len(desk.sent()) == 2, "no retry was sent"
    desk.slurm("retry", f"--{name}=", "--dry_run")
    desk.slurm("retry", f"--{name}={value}")
    new_record = (desk.data / "jobs" / "0001.json").read_text()
    assert value in "".join([*desk.sent()[2:], new_record]), "the user typed it"


def test_a_retry_in_another_folder_has_the_values_of_the_submission(desk: Desk) -> None:
    """Also with umask 0002, because the record is not writable by the group."""
    (desk.tmp / "setup.sh").touch()
    desk.patch.chdir(desk.tmp)
    mask = os.umask(0o002)
    try:
        variables: dict[str, Any] = {SETUP: "setup.sh", "SBATCH_ACCOUNT": "one"}
        desk.slurm("submit", "--container", "mine", "--mem_gb", 2, **variables)
    finally:
        os.umask(mask)
    desk.patch.chdir(desk.data)
    desk.slurm("retry")
    exports = {f"export {SETUP}={desk.tmp / 'setup.sh'}", f"export {CONTAINER}=mine"}
    options = {"#SBATCH --account=one", "#SBATCH --mem=2048M"}
    assert exports | options <= set(desk.sent()[2].splitlines())


def test_a_user_id_without_a_name_can_use_every_command(desk: Desk) -> None:
    """Without a passwd entry and HOME, as in containers. Slurm shows the number."""
    desk.patch.setattr("pwd.getpwuid", {}.__getitem__)
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        desk.patch.delenv(name, raising=False)
    desk.patch.chdir(desk.tmp)
    for words in (["submit"], ["retry", "--dry_run"], ["status"], ["report"], ["cancel"], ["logs", 0]):
        desk.slurm(str(words[0]), *words[1:])
    assert f"--user={os.getuid()}" in "\n".join(desk.calls("squeue"))


# --- submitit


def test_a_submitit_job_returns_manifests_and_raises_if_a_shard_fails(desk: Desk) -> None:
    """test_slurm_operations.py runs it on a real cluster, with MaxArraySize and a preemption."""
    submitit, data = pytest.importorskip("submitit"), desk.data
    desk.patch.setattr("pdb.post_mortem", lambda: None)  # a DebugExecutor calls it after a failure
    debug = submitit.AutoExecutor(folder=desk.tmp / "log", cluster="debug")
    (job,) = submit_with_submitit(data, debug, shards_per_task=5)
    assert [manifest.shard_id for manifest in job.result()] == [0, 1, 2, 3, 4]
    assert submit_with_submitit(data, debug) == [], "nothing is missing"
    (data / "shard-00003.json").unlink()
    (data / "tokenizer" / "tokenizer.json").write_text("{}")
    (job,) = submit_with_submitit(data, debug)
    with pytest.raises(ReadWriteError):
        job.result()
    with pytest.raises(UsageError):
        submit_with_submitit(data, debug, shards_per_task=0)
