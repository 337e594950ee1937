"""What ``submit`` asks Slurm for and how it gets there: values, scripts, refusals, two submitters at once."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.checkout import ROOT
from tests.children import run_child
from tests.slurm.fake_slurm import (
    WHEN,
    FakeSlurm,
    array,
    command,
    make_done,
    sent_tasks,
    slurm,
    squeue_line,
    status,
    submitted,
    write_index,
)

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes


def options(script: str) -> dict[str, str]:
    """The options of the first script of a dry run."""
    found: dict[str, str] = {}
    for name, value in re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.MULTILINE):
        found.setdefault(name, value)
    return found


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
        ({"SBATCH_MEM_PER_NODE": "2G"}, "--mem_per_cpu_gb 2", {"mem-per-cpu": "2048M", "mem": None}),
        ({"SBATCH_ACCOUNT": "a", "SBATCH_QOS": "q"}, "--account mine", {"account": "mine", "qos": "q"}),
        ({"SBATCH_PARTITION": "p"}, "--mem_gb 1.5", {"partition": "p", "mem": "1536M"}),
        ({"SBATCH_EXCLUDE": "n[1-2]"}, "", {"exclude": "n[1-2]"}),
        ({}, "--cpus_per_task 9", {"cpus-per-task": "9"}),
        ({}, "", {"cpus-per-task": "1"}),
    ],
)
def test_values_are_of_flags_or_else_of_sbatchs_variables_and_a_task_has_one_cpu_by_default(
    fake: FakeSlurm, data_dir: Path, environ: dict[str, Any], flags: str, expected: dict[str, str | None]
) -> None:
    fake.answers("sinfo", "cpu*|idle|4000|4|infinite\n")
    found = options(slurm("submit", data_dir, *shlex.split(flags), "--dry_run", **environ))
    assert {name: found.get(name) for name in expected} == expected


def test_a_dry_run_says_where_values_came_from_and_prints_what_submit_sends_also_in_another_job(
    fake: FakeSlurm, data_dir: Path
) -> None:
    shown = slurm("submit", data_dir, "--mem_gb", 2, "--dry_run", SBATCH_ACCOUNT="env")
    assert "(SBATCH_ACCOUNT)" in shown
    assert "(flag)" in shown
    assert not fake.sent()
    names = ("JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID", "CPUS_PER_TASK", "JOB_NAME")
    in_a_job: dict[str, Any] = {f"SLURM_{name}": "9" for name in names}
    slurm("submit", data_dir, "--mem_gb", 2, SBATCH_ACCOUNT="env", **in_a_job)
    assert "\n".join(fake.sent()) in shown
    kept = sorted((data_dir / "jobs").glob("*.sh"))
    assert [path.read_text() for path in kept] == fake.sent()


def test_a_dry_run_needs_no_controller_and_no_slurm_at_all(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    submitted(data_dir)
    (fake.place / "away").touch()
    assert "shards_of=(0 1 2 3 4)" in slurm("submit", data_dir, "--dry_run")
    slurm("submit", data_dir, code=74)
    assert not fake.sent()
    assert "#SBATCH --array=0-4%5" in slurm("submit", data_dir, "--dry_run", PATH=str(tmp_path))


@pytest.mark.parametrize(
    "flags",
    [
        "--mem_gb 0",
        "--max_parallel -1",
        "--sbatch_args --array=0-3",
        "--sbatch_args -Mother",
        "--sbatch_args -Jmine",
        "--partition 'cpu\ntouch INJECTED'",
        "--cpus_per_task all",
        f"--time_min {10**40}",
        '--worker_args "\'"',
        "--mem_gb 1 --mem_per_cpu_gb 1",
        "--setup gone.sh",
        "--shards 7",
    ],
)
def test_a_request_that_cannot_be_is_refused_and_nothing_is_sent_or_written(
    fake: FakeSlurm, data_dir: Path, flags: str
) -> None:
    assert flags.split()[0] in slurm("submit", data_dir, *shlex.split(flags), code=2)
    assert not fake.sent()
    assert not (data_dir / "jobs").exists()


@pytest.mark.parametrize("variable", ["SBATCH_TIMELIMIT", "SBATCH_MEM_PER_NODE"])
def test_a_variable_of_sbatch_that_cannot_be_read_is_refused_by_its_name(
    fake: FakeSlurm, data_dir: Path, variable: str
) -> None:
    assert variable in slurm("submit", data_dir, code=2, **{variable: "much"})


# --- scripts


def run_head(script: str, folder: Path, index: int = 0) -> list[str]:
    """What bash makes of a rendered script: the words that the worker would get, and the container."""
    head = script.partition("\nset -euo pipefail\n")[0]
    (folder / "job.sh").write_text(head + '\nprintf "%s\\0" "${shardprep_command[@]}" "$SHARDPREP_EXEC"\n')
    environ = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": str(index)}
    done = run_child(["bash", "job.sh"], cwd=folder, env=environ, encoding="utf-8")
    return done.stdout.split("\0")[:-1]


def test_the_script_is_prep_array_with_a_head_that_maps_an_index_to_shards(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    data = data_dir.rename(tmp_path / "it's 5% of all")
    make_done(data, 2)
    slurm("submit", data, "--shards_per_task", 2)
    script = fake.sent()[0]
    found = options(script)
    assert (found["array"], sent_tasks(data)) == ("0-1%2", [["0-1", "3-4"]])
    assert found["output"] == f'"{tmp_path}/it\'s 5%% of all/jobs/logs/%A_%a.log"'
    body = script.partition("set -euo pipefail\n")[2]
    assert (ROOT / "slurm" / "prep_array.sh").read_text().endswith(body)
    assert run_head(script, tmp_path, 1)[:-1] == ["run", str(data), "--shards", "3-4"]
    slurm("submit", data, "--shards", 4)
    place = ["--planned", "--output_dir", str(data)]
    assert run_head(fake.sent()[2], tmp_path)[:-1] == ["--shard_id", "4", *place]


@pytest.mark.parametrize(
    ("flags", "python", "exported"),
    [
        ("", None, {"SHARDPREP_PYTHON": sys.executable}),
        ("", "p", {"SHARDPREP_PYTHON": "p"}),
        ("--container 'apptainer exec i'", None, {"SHARDPREP_EXEC": "'apptainer exec i'"}),
        ("--setup /etc/hostname", None, {"SHARDPREP_SETUP": "/etc/hostname"}),
    ],
)
def test_tasks_use_this_python_unless_a_setup_or_a_container_brings_another(
    fake: FakeSlurm, data_dir: Path, flags: str, python: str | None, exported: dict[str, str]
) -> None:
    environ: dict[str, Any] = {"SHARDPREP_PYTHON": python} if python else {}
    slurm("submit", data_dir, *shlex.split(flags), **environ)
    found = dict(re.findall(r"^export (SHARDPREP_\w+)=(.*)$", fake.sent()[0], re.MULTILINE))
    assert {name: value for name, value in found.items() if value != "''"} == exported


# What a folder, a flag's value or an environment variable may hold, and a shell must not run or split.
NASTY = [
    "a b", " a ", "it's", 'say "a"', "$(touch INJECTED)", "`touch INJECTED`", "; touch INJECTED #", "a;b&c|d",
    "-n", "--wrap=x", "데이터 1", "50% of $HOME", "*?[a]", "~", "#x", "!!", "a\u0085b", "a\u2028b",
]  # fmt: skip
REFUSED = ["data\ntouch INJECTED #", "a\rb", "a\tb", "a\x1b[0mb", "no\udcffutf8"]


def test_values_reach_the_worker_as_they_are_and_no_shell_runs_them(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "heads").mkdir()
    for name in NASTY:
        data = data_dir = data_dir.rename(tmp_path / f"{name}x")
        words = shlex.join(["--input_dir", name])
        flags = [f"--partition={name}", f"--account={name}", f"--container={name}"]
        slurm("submit", data, "--shards", 3, f"--worker_args={words}", *flags)
        script, verify = fake.sent()[-2:]
        place = ["--planned", "--output_dir", str(data)]
        assert run_head(script, tmp_path / "heads") == ["--shard_id", "3", *place, "--input_dir", name, name]
        assert run_head(verify, tmp_path / "heads") == ["verify", str(data), name]
    assert [path.name for path in (tmp_path / "heads").iterdir()] == ["job.sh"], "nothing was run"
    assert not list(tmp_path.rglob("INJECTED"))


@pytest.mark.parametrize(
    ("name", "where"),
    [*itertools.product(REFUSED, ["folder", "account", "worker_args", "sbatch_args"]), ("\\", "folder")],
)
def test_what_cannot_stand_in_a_script_is_refused_and_nothing_is_sent(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path, name: str, where: str
) -> None:
    values = {
        "worker_args": shlex.join(["--input_dir", name]),
        "sbatch_args": shlex.join([f"--comment={name}"]),
    }
    flags = [] if where == "folder" else [f"--{where}={values.get(where, name)}"]
    data = data_dir.rename(tmp_path / name) if where == "folder" else data_dir
    slurm("submit", data, *flags, code=2)
    assert not fake.sent()
    assert not (data / "jobs").exists()


def run_script(script: str, place: Path, code: int) -> str:
    """The job's script in bash, with an srun that ends with ``code`` and shows its variables."""
    (place / "srun").write_text(f"#!/bin/sh\nenv | grep ^SLURM | sort\nexit {code}\n")
    (place / "srun").chmod(0o755)
    own = {"MEM_PER_CPU": "1", "MEM_PER_NODE": "2", "CPU_BIND": "x", "STEP_ID": "3", "JOB_ID": "7"}
    inherited = {f"SLURM_{name}": value for name, value in {**own, "CPUS_ON_NODE": "64"}.items()}
    environ = {**os.environ, **inherited, "PATH": f"{place}:{os.environ['PATH']}"}
    done = run_child(["bash", "-c", script], cwd=place, env=environ, code=code)
    return done.stdout + done.stderr


@pytest.mark.parametrize(("code", "result"), [(0, "verified"), (65, "not verified")])
def test_the_verify_job_ends_with_a_line_to_grep_and_tells_whom_it_should(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path, code: int, result: str
) -> None:
    notify = f'echo "told: $SHARDPREP_RESULT, $SHARDPREP_EXIT_CODE" >{tmp_path}/told; exit 3'
    slurm("submit", data_dir, "--notify", notify)
    said = run_script(fake.sent()[1], tmp_path, code)
    colon = ":" if code else ""
    assert f"shardprep: {result}{colon} 5 shards of {data_dir}" in said.splitlines()
    assert (tmp_path / "told").read_text() == f"told: {result}, {code}\n"


def test_a_step_of_a_whole_node_has_its_cpus_and_no_variables_of_another_allocation(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    fake.answers("sinfo", "cpu*|idle|4000|3|infinite\n")
    slurm("submit", data_dir, "--cpus_per_task", "node")
    script = fake.sent()[0]
    assert {"#SBATCH --exclusive", "#SBATCH --mem=0", "shards_of=(0-1 2-4)"} <= set(script.splitlines())
    said = run_script(script, tmp_path, 0)
    assert {"SLURM_CPUS_PER_TASK=64", "SLURM_JOB_ID=7"} <= set(said.splitlines())
    assert not re.search("SLURM_(MEM_PER|CPU_BIND|STEP_ID)", said)


def test_slurms_commands_get_no_variables_of_the_allocation_that_they_run_in(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    submitted(data_dir)
    fake.answers_by("squeue", f"env >{shlex.quote(str(tmp_path / 'seen'))}")
    names = ("SLURM_MEM_PER_CPU", "SLURM_CPU_BIND", "SLURM_JOB_ID", "SLURM_CONF", "SLURM_CLUSTERS")
    status(data_dir, **dict.fromkeys(names, "7"))
    seen = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    own = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_BITSTR_LEN", "SLURM_TIME_FORMAT"}
    assert {name for name in seen if name.startswith("SLURM_")} == own


# --- what Slurm takes


@pytest.mark.parametrize(
    ("granted", "mem_mb", "time_min"),
    [
        ("NumCPUs=4 TimeLimit=00:01:00 MinMemoryNode=300M", 300, 1),
        ("NumCPUs=4 TimeLimit=UNLIMITED MinMemoryCPU=1.50G", 6144, None),
        ("NumCPUs=1 TimeLimit=1-00:00:00 MinMemoryNode=0", None, 1440),
    ],
)
def test_what_slurm_granted_is_recorded_and_a_site_that_renames_jobs_is_followed(
    fake: FakeSlurm, data_dir: Path, granted: str, mem_mb: int | None, time_min: int | None
) -> None:
    shown = f"JobId=7 JobName=the sites name UserId=root(0) GroupId=root(0) SubmitTime={WHEN} "
    fake.answers("job", shown + granted)
    slurm("submit", data_dir)
    record = json.loads((data_dir / "jobs" / "0000.json").read_text())
    (of_array,) = record["arrays"]
    assert (of_array["mem_mb"], of_array["time_min"], record["user"]) == (mem_mb, time_min, "root")
    fake.answers("squeue", squeue_line("0-4", "PENDING", name="the sites name"))
    assert status(data_dir)["pending"] == "0-4"


REFUSES = """script=$(cat)
[[ $script =~ SBATCH\\ --array=0-([0-9]+) ]] && last=${{BASH_REMATCH[1]}} || last=0
if [[ "$*" = *{when}* ]] && ((last >= {most})); then
  echo 'sbatch: error: Batch job submission failed: Job violates accounting/QOS policy' >&2; exit 1
fi
printf '%s\\n' "$script" | "{real}" "$@"
"""


@pytest.mark.parametrize("when", ["--test-only", "--parsable"])
def test_where_slurm_takes_no_array_so_large_tasks_make_more_shards_each(
    fake: FakeSlurm, data_dir: Path, when: str
) -> None:
    """The limit is of an account or a QOS, which nobody asks for; five shards fit two tasks."""
    fake.answers_by("sbatch", REFUSES.format(when=when, most=3, real=fake.place / "sbatch.sh"))
    slurm("submit", data_dir)
    fake.answers("config", "ClusterName = test\nMaxArraySize = 2\n")
    slurm("submit", data_dir, "--shards", "0-4")
    assert sent_tasks(data_dir) == [["0-1", "2-4"]] * 2


def test_what_slurm_refuses_however_few_tasks_there_are_is_told_in_its_words(
    fake: FakeSlurm, data_dir: Path
) -> None:
    """Such as hours of an account that are used up, where the site has Slurm refuse them."""
    fake.answers_by("sbatch", "echo 'Job violates accounting/QOS policy (size)' >&2; exit 1")
    said = slurm("submit", data_dir, "--time_min", 90, code=2)
    assert "Job violates accounting/QOS policy (size)" in said
    assert "--time=90" in said
    assert not (data_dir / "jobs" / "0000.json").exists()


@pytest.mark.parametrize(("state", "code"), [("drained", 0), ("idle", 2)])
def test_drained_nodes_are_a_warning_and_nodes_that_never_fit_a_refusal(
    fake: FakeSlurm, data_dir: Path, state: str, code: int
) -> None:
    """Slurm has the same words for both."""
    fake.answers("sinfo", f"cpu*|{state}|4000|64|infinite\n")
    fake.answers_by("sbatch", "echo Requested node configuration is not available >&2; exit 1")
    assert "Requested node configuration" in slurm("submit", data_dir, "--dry_run", code=code)


def sbatch_that_says(fake: FakeSlurm, words: str) -> None:
    """A site's wrapper: it passes the job on and prints more than the id."""
    real = fake.place / "sbatch.sh"
    fake.answers_by("sbatch", f'id=$("{real}" "$@") || exit\n[[ -n $id ]] || exit 0\n{words}')


def test_a_banner_of_the_sites_sbatch_before_the_job_id_is_no_error(fake: FakeSlurm, data_dir: Path) -> None:
    sbatch_that_says(fake, 'echo "Welcome to 7 nodes"; echo; echo "$id;test"; echo')
    slurm("submit", data_dir)
    assert [call for call in fake.calls("scontrol") if "release" in call] == ["release 1", "release 2"]


def test_a_job_whose_id_cannot_be_understood_is_not_recorded_and_cancel_finds_it_by_its_name(
    fake: FakeSlurm, data_dir: Path
) -> None:
    sbatch_that_says(fake, 'echo "Submitted, thank you"')
    said = slurm("submit", data_dir, code=74)
    (name,) = re.findall(r"squeue --me --name=(\S+),", said)
    assert sent_tasks(data_dir) == []
    fake.answers("squeue", squeue_line("0-4", "PENDING", "JobHeldUser", job="41", name=name))
    slurm("cancel", data_dir)
    assert fake.calls("scancel") == ["41"]


def test_a_release_that_slurm_puts_off_while_its_accounts_are_slow_is_asked_for_again(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("slurm.queue.sleep", waits.append)
    refused = f'[[ "$*" != "release 1" || -e "{fake.place}/asked" ]]'
    words = "Job update not available right now, the DB index is being set, try again in a bit for job 1"
    first = f'{refused} || {{ touch "{fake.place}/asked"; echo "{words}" >&2; exit 1; }}'
    fake.answers_by("scontrol", f'{first}\nexec "{fake.place}/scontrol.sh" "$@"')
    slurm("submit", data_dir)
    assert waits == [5]
    assert [call for call in fake.calls("scontrol.sh") if "release" in call] == ["release 1", "release 2"]


def test_a_submit_whose_jobs_somebody_cancels_before_they_begin_says_so(
    fake: FakeSlurm, data_dir: Path
) -> None:
    real = f'exec "{fake.place}/scontrol.sh" "$@"'
    words = "echo 'Job has already finished for job 1' >&2; exit 1"
    fake.answers_by("scontrol", f"[[ $1 = release ]] || {real}\n{words}")
    assert "already finished" in slurm("submit", data_dir, code=2)


def test_of_two_submits_at_once_the_second_cancels_its_jobs_and_what_it_prints_shows_the_other(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    """The other one's record appears between this one's look at the jobs and its own record."""
    record = submitted(data_dir, array("7"), verify="8").rename(tmp_path / "0000.json")
    place = shlex.quote(str(data_dir / "jobs" / "0000.json"))
    body = (
        f'[[ $1 != --parsable ]] || cp {shlex.quote(str(record))} {place}\nexec "{fake.place}/sbatch.sh" "$@"'
    )
    fake.answers_by("sbatch", body)
    before = record.read_bytes()
    slurm("submit", data_dir, code=74)
    assert fake.calls("scancel") == ["1 2"]
    assert (data_dir / "jobs" / "0000.json").read_bytes() == before
    assert len(list((data_dir / "jobs").glob("*.json"))) == 1
    assert not [call for call in fake.calls("scontrol") if "release" in call]
    fake.answers("squeue", squeue_line("0-4", "PENDING", "Priority", job="7"))
    slurm("submit", data_dir)  # finds nothing left to send


def test_the_verify_job_waits_for_all_has_time_for_all_bytes_and_a_dependency_is_passed_on(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm("submit", data_dir, "--sbatch_args", "--dependency=afterok:99")
    assert "#SBATCH --dependency=afterok:99\n" in fake.sent()[0]
    assert "--dependency=afterany:1" in fake.calls("sbatch")[-1]
    slurm("retry", data_dir)
    assert "afterok:99" not in fake.sent()[2], "which may be gone by then"
    monkeypatch.setattr("shardprep.format.plan.Plan.shard_bytes", lambda _: [3 * 10**9] * 5)
    shown = slurm("submit", data_dir, "--time_min", 2, "--until_done", "--dry_run").splitlines()
    limits = [line for line in shown if line.startswith("#SBATCH --time=")]
    assert limits == ["#SBATCH --time=2", "#SBATCH --time=52", "#SBATCH --time=52"]
    fake.answers("sinfo", "cpu*|idle|4000|4|30:00\n")
    assert "#SBATCH --time=30\n" in slurm("submit", data_dir, "--time_min", 2, "--dry_run"), "the partition's"


def test_only_what_is_missing_and_not_queued_is_sent_and_wait_ends_with_0_only_where_all_is_verified(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    queue = fake.place / "squeue"
    queue.write_text(squeue_line("0-4", "PENDING"))
    once = f"cat {shlex.quote(str(queue))}; : >{shlex.quote(str(queue))}"
    fake.answers_by("squeue", f'case "$*" in *--user=root*) {once} ;; esac')
    slurm("submit", data_dir, "--wait", code=74)  # the same line again after Ctrl-C
    make_done(data_dir, *range(5))
    slurm("submit", data_dir, "--wait", code=74)
    write_index(data_dir)
    slurm("submit", data_dir, "--wait")
    assert not fake.sent()


def test_where_there_is_slurm_plan_says_to_submit_from_any_folder(
    fake: FakeSlurm, prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    data = tmp_path / "my data"
    flags = ("--input_dir", sample_dir, "--model_id", prep.model_dir, "--num_shards", 5, "--output_dir")
    said = command("plan", *flags, os.path.relpath(data)).text
    assert f"next: shardprep submit '{data}'" in said
    slurm("submit", data, "--dry_run")


# --- whose commands run


COMMANDS = ("setup", "container", "srun_args", "notify", "sbatch_args", "worker_args")


def commands_of(folder: Path) -> dict[str, str]:
    """A value for each field of a request that names a command, or that may stand for one."""
    (folder / "setup.sh").touch()
    return {name: f"--{name}-of-another" for name in COMMANDS} | {"setup": str(folder / "setup.sh")}


def test_no_file_of_a_data_set_names_a_command_of_a_submission(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    lines = [f"{name} = {json.dumps(value)}" for name, value in commands_of(tmp_path).items()]
    (data_dir / "shardprep.toml").write_text("\n".join(["[slurm]", *lines, "mem_gb = 77"]))
    script = slurm("submit", data_dir, "--dry_run")
    assert not re.search("of-another|setup.sh|--mem=", script)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("until_done", [[], ["--until_done"]])
def test_retry_takes_no_command_from_a_record_that_others_can_write_to_and_shows_what_to_type(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path, name: str, until_done: list[str]
) -> None:
    value = commands_of(tmp_path)[name]
    slurm("submit", data_dir, f"--{name}={value}")
    (data_dir / "jobs" / "0000.json").chmod(0o666)
    assert f"--{name}={value}" in slurm("retry", data_dir, *until_done, code=78)
    assert len(fake.sent()) == 2, "nothing of it was sent"
    slurm("retry", data_dir, f"--{name}={value}", *until_done)
    new_record = (data_dir / "jobs" / "0001.json").read_text()
    assert value in "".join([*fake.sent()[2:], new_record]), "the user's own word"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_retry_takes_no_command_from_the_record_of_another_user(fake: FakeSlurm, data_dir: Path) -> None:
    slurm("submit", data_dir, "--container", "image-of-another")
    os.chown(data_dir / "jobs" / "0000.json", 12345, -1)
    assert "image-of-another" in slurm("retry", data_dir, code=78)
    slurm("retry", data_dir, "--container", "")
    assert "image-of-another" not in "".join(fake.sent()[2:])


def test_a_retry_elsewhere_has_the_values_of_the_submission_and_a_group_cannot_change_them(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("here", "elsewhere"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "setup.sh").touch()
    monkeypatch.chdir(tmp_path / "here")
    variables: dict[str, Any] = {"SHARDPREP_SETUP": "setup.sh", "SBATCH_ACCOUNT": "one"}
    mask = os.umask(0o002)
    try:
        slurm("submit", data_dir, "--container", "mine", "--mem_gb", 2, **variables)
    finally:
        os.umask(mask)
    monkeypatch.chdir(tmp_path / "elsewhere")
    slurm("retry", data_dir)
    setup = tmp_path / "here" / "setup.sh"
    assert {
        f"export SHARDPREP_SETUP={setup}",
        "export SHARDPREP_EXEC=mine",
        "#SBATCH --account=one",
        "#SBATCH --mem=2048M",
    } <= set(fake.sent()[2].splitlines())


def test_a_user_without_a_name_on_this_machine_can_use_every_command(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user id without a passwd entry and without HOME, as containers have it; Slurm shows its number."""

    def nobody(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    slurm("submit", data_dir)
    for words in (["retry", "--dry_run"], ["status"], ["report"], ["cancel"], ["logs", 0]):
        slurm(words[0], data_dir, *words[1:])
    assert f"--user={os.getuid()}" in "\n".join(fake.calls("squeue"))
