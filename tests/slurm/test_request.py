"""What this user may ask for: limits of partition, QOS and association, and requests that fit them."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from tests.slurm.fake_slurm import CONFIG, Desk, array, ended
from tests.world import call_main

pytestmark = pytest.mark.processes

ENFORCED = f"{CONFIG}AccountingStorageEnforce = associations,limits,qos\n"
SINFO = "cpu*|idle|4000|8|{limit}|NO\nbig|idle|64000|8|infinite|NO\n"
# As `scontrol --oneliner show assoc_mgr` prints them, without the fields that are not read.
ASSOCIATIONS = """\
Association Records
ClusterName=test Account=root UserName= ParentAccount= DefAssoc=No MaxWallPJ={parent} MaxTRESPJ= MaxTRESPN=
ClusterName=test Account=p UserName= ParentAccount=root(1) DefAssoc=No MaxWallPJ= MaxTRESPJ= MaxTRESPN=
ClusterName=test Account=p UserName=root(0) ParentAccount= DefAssoc=Yes MaxWallPJ= MaxTRESPJ= MaxTRESPN=
QOS Records
QOS=normal(1) MaxWallPJ= MaxTRESPJ= MaxTRESPN= MinTRESPJ= PreemptMode=OFF
QOS=short(2) MaxWallPJ=5 MaxTRESPJ=mem=2048,cpu=4 MaxTRESPN= MinTRESPJ=cpu=2 PreemptMode=OFF
"""


def site(desk: Desk, *, limit: str = "infinite", parent: str = "", partition_qos: str = "N/A") -> None:
    """Let the stand-ins answer as a site with a QOS of 2 to 4 CPUs, 2 GB and five minutes."""
    desk.answers("config", ENFORCED)
    desk.answers("sinfo", SINFO.format(limit=limit))
    desk.answers("partition", f"PartitionName=cpu Default=YES QoS={partition_qos} MaxMemPerNode=UNLIMITED\n")
    desk.answers("assoc_mgr", ASSOCIATIONS.format(parent=parent))
    asked = 'case "$*" in *"show partition"*) cat PLACE/partition;; *assoc_mgr*) cat PLACE/assoc_mgr;; '
    desk.answers_by("scontrol", f"{asked}*) REAL;; esac")
    accounts = desk.place / "bin" / "sacctmgr"
    accounts.write_text("#!/bin/bash\necho 'p||normal,short'\n")
    accounts.chmod(0o755)


def options(shown: str, name: str) -> list[str]:
    """Return an option's value in each script: of the tasks, verify, the controller."""
    heads = shown.split("#!/bin/bash\n")[1:]
    return ["".join(re.findall(rf"^#SBATCH --{name}=(.*)$", head, re.MULTILINE)) for head in heads]


@pytest.mark.parametrize(
    ("given", "environ"),
    [({}, {"SBATCH_QOS": "short"}), ({"partition_qos": "short"}, {}), ({"parent": "5"}, {}),
     ({"limit": "5:00"}, {})],
)  # fmt: skip
def test_verify_and_controller_ask_for_no_more_time_than_is_allowed(
    desk: Desk, given: dict[str, Any], environ: dict[str, Any]
) -> None:
    """By a QOS of the job or the partition, the user's account or its parent, or the partition."""
    site(desk, **given)
    flags = ("--time_min", 5, "--cpus_per_task", 2, "--until_done", "--dry_run")
    assert options(desk.slurm("submit", *flags, **environ), "time") == ["5", "5", "5"]
    refusal = desk.slurm("submit", "--time_min", 6, "--cpus_per_task", 2, code=2, **environ)
    assert "--time_min 6 of the tasks" in refusal
    assert "at most --time_min 5" in refusal


@pytest.mark.parametrize("args", ["-qshort", "--qos=short --comment=a"])
def test_limits_are_those_of_a_qos_in_sbatch_args_too(desk: Desk, args: str) -> None:
    site(desk)
    flags = ("--time_min", 6, "--cpus_per_task", 2, "--sbatch_args", args)
    assert "QOS short" in desk.slurm("submit", *flags, code=2)


@pytest.mark.parametrize(
    ("flags", "named"),
    [("--mem_gb 3 --cpus_per_task 2", "--mem_gb 3"),
     ("--mem_per_cpu_gb 1.5 --cpus_per_task 2", "--mem_per_cpu_gb"),
     ("--cpus_per_task 6", "at most --cpus_per_task 4"), ("--cpus_per_task 1", "--cpus_per_task 2 or more")],
)  # fmt: skip
def test_a_request_outside_a_limit_is_refused_with_the_limit_and_the_flag(
    desk: Desk, flags: str, named: str
) -> None:
    site(desk)
    refusal = desk.slurm("submit", *shlex.split(flags), code=2, SBATCH_QOS="short")
    assert named in refusal
    assert "QOS short" in refusal
    assert not desk.sent()


@pytest.mark.parametrize(
    ("flags", "mem", "per_cpu"),
    [("--mem_gb 0.5", ["512M", "512M", "1024M"], [""] * 3), ("", [""] * 3, [""] * 3),
     ("--mem_per_cpu_gb 0.5", [""] * 3, ["512M", "512M", "1024M"]),
     ("--mem_per_cpu_gb 0.5 --controller_args '--mem=7G --partition=big'",
      ["", "7G", "7G"], ["512M", "", ""])],
)  # fmt: skip
def test_the_controller_asks_for_memory_in_the_form_of_the_users_request(
    desk: Desk, flags: str, mem: list[str], per_cpu: list[str]
) -> None:
    """Some sites refuse --mem, others jobs without it."""
    shown = desk.slurm("submit", *shlex.split(flags), "--until_done", "--dry_run")
    assert (options(shown, "mem"), options(shown, "mem-per-cpu")) == (mem, per_cpu)


def test_a_job_that_a_plugin_refuses_is_named_with_its_flag(desk: Desk) -> None:
    only_large = "echo 'at least 2 CPUs, says the site' >&2; exit 1"
    desk.answers_by("sbatch", f"script=$(cat); [[ $script != *cpus-per-task=1* ]] || {{ {only_large}; }}; "
                              "printf '%s\\n' \"$script\" | REAL")  # fmt: skip
    flags = ("submit", "--cpus_per_task", 4, "--until_done")
    refusal = desk.slurm(*flags, code=2)
    for words in (
        "the controller of --until_done",
        "--cpus-per-task=1",
        "says the site",
        "--controller_args",
    ):
        assert words in refusal
    assert not desk.sent(), "nothing was submitted"
    desk.slurm(*flags, "--controller_args", "--cpus-per-task=2")


@pytest.mark.parametrize(
    ("request_", "had_mb", "cause", "asks", "says"),
    [
        (
            {"time_min": 4},
            100,
            "TIMEOUT",
            ["time=5"],
            "asks for 5 min, the most that MaxTime of partition cpu",
        ),
        ({"time_min": 5}, 100, "TIMEOUT", ["time=5"], "too little before"),
        ({"cpus_per_task": "node"}, None, "OUT_OF_MEMORY", ["mem=0"], "starts 2 processes in place of 5"),
        ({"mem_gb": 3.9}, 3994, "OUT_OF_MEMORY", ["mem=4000M"], "--partition big has nodes of 64,000 MB"),
        ({"mem_gb": 3.9, "cpus_per_task": 4}, 3994, "OUT_OF_MEMORY", ["mem=4000M"], "starts 2 processes"),
        ({"mem_gb": 2}, 2048, "OUT_OF_MEMORY", ["mem=4000M"], "asks for 4,000 MB, the most"),
    ],
)
def test_a_retry_asks_for_what_is_allowed_and_says_what_else_helps(
    desk: Desk, request_: dict[str, Any], had_mb: int | None, cause: str, asks: list[str], says: str
) -> None:
    site(desk, limit="5:00")
    is_one = request_.get("cpus_per_task", 1) == 1
    tasks = ["0", "1-4"] if is_one else ["0-4"]
    time_min = request_.get("time_min")
    desk.submitted(array(request=request_, tasks=tasks, mem_mb=had_mb, time_min=time_min))
    began = {"shards": tasks[0], "time": 1000}
    desk.record("1_0", ended(75, stopped_by=cause, time=1000 + 60 * request_.get("time_min", 1)), **began)
    shown = desk.slurm("retry", "--dry_run", "--shards", tasks[0])
    assert says in shown
    for option in asks:
        assert f"#SBATCH --{option}\n" in shown
    if "processes" in says:
        assert "(run " in shown
        assert "--num_proc 2" in shown
        assert "if [[ $shards = * ]]" in shown, "also for one shard, as only run has this flag"


def test_one_group_that_is_refused_does_not_hold_back_shards_of_other_causes(desk: Desk) -> None:
    desk.submitted(array(request={"time_min": 60}, time_min=60))
    desk.record("1_0", ended(75, stopped_by="TIMEOUT", time=4600))
    desk.record("1_1", ended(74))
    refuses = "[[ $script != *--time=120* ]] || { echo 'above a limit that nobody can read' >&2; exit 1; }"
    desk.answers_by("sbatch", f"script=$(cat); {refuses}; printf '%s\\n' \"$script\" | REAL")
    said = desk.slurm("retry")
    assert "left out: shard 0: " in said
    assert desk.sent_shards() == ["1 2 3 4"]


FULL = "{ echo 'allocation failure: Resource temporarily unavailable' >&2; exit 1; }"


def test_a_full_queue_is_no_request_that_is_too_large_and_until_done_waits(desk: Desk) -> None:
    desk.answers_by("sbatch", f"[[ -e PLACE/room ]] || {FULL}; REAL")
    assert "queue is full" in desk.slurm("submit", code=74)
    waits: list[float] = []

    def wait(delay_s: float) -> None:
        waits.append(delay_s)
        (desk.place / "room").touch()

    desk.at_waits(wait)
    desk.slurm("submit", "--until_done")
    assert waits == [5]
    assert desk.released() == ["1", "2"]


def test_limits_of_accounts_are_asked_for_only_where_slurm_enforces_them(desk: Desk) -> None:
    desk.answers("sinfo", SINFO.format(limit="infinite"))
    desk.slurm("submit")
    assert not [call for call in desk.calls("scontrol") if "assoc_mgr" in call]
    assert sum("config" in call for call in desk.calls("scontrol")) == 1
    tests = [call for call in desk.calls("sbatch") if "--test-only" in call]
    assert len(tests) == 1, "verify asks for the same"


WHOLE = "whole*|idle|4000|{cpus}|infinite|EXCLUSIVE\nsmall|idle|4000|8|10:00|NO\n"


def test_where_nodes_are_not_shared_tasks_fill_them(desk: Desk) -> None:
    desk.answers("sinfo", WHOLE.format(cpus=3))
    shown = desk.slurm("submit", "--mem_gb", 1, "--time_min", 30, "--dry_run")
    assert options(shown, "exclusive")[0] == ""
    assert "#SBATCH --exclusive\n#SBATCH --mem=0\n" in shown
    assert "shards_of=(0-1 2-4)" in shown
    assert "1.0 node-hours" in shown
    assert "--nodes 1" in shown, "one job is less than two short ones"
    assert "--nodes" not in desk.slurm("submit", "--shards_per_task", 5, "--dry_run").partition("#!/bin")[0]
    shared = desk.slurm("submit", "--partition", "small", "--dry_run")
    assert "--exclusive" not in shared


def test_a_job_of_several_nodes_makes_all_shards(desk: Desk) -> None:
    desk.answers("sinfo", WHOLE.format(cpus=4))
    desk.slurm("submit", "--nodes", 2, "--until_done", "--small_partition", "small")
    tasks, verify, controller = desk.sent()
    for line in ("--array=0-0%1", "--nodes=2", "--ntasks-per-node=1", "--exclusive", "--mem=0", "--time=11"):
        assert f"#SBATCH {line}\n" in tasks, line
    assert "shards_of=(0-4)" in tasks
    for small in (verify, controller):
        assert "#SBATCH --partition=small\n" in small
        assert "#SBATCH --nodes=1\n" in small
    assert "#SBATCH --time=10\n" in verify, "the limit of that partition"
    desk.answers("squeue", "")
    desk.record("1_0", ended(75, stopped_by="NODE_FAIL"), shards="0-4")
    shown = desk.slurm("retry", "--dry_run", "--shards", "0-4")
    assert options(shown, "nodes") == ["2", "1"]
    desk.make_done(0, 1, 2, 3)
    assert options(desk.slurm("retry", "--dry_run"), "nodes")[0] == "1", "more nodes than shards would wait"
    on_cpus = desk.slurm("retry", "--cpus_per_task", 2, "--partition=small", "--time_min=9", "--dry_run")
    assert options(on_cpus, "cpus-per-task")[0] == "2"


def test_several_jobs_of_several_nodes_share_the_shards(desk: Desk) -> None:
    desk.slurm("submit", "--nodes", 2, "--shards_per_task", 3)
    assert desk.sent_shards() == ["0-1 2-4"]
    assert "--nodes" in desk.slurm("submit", "--nodes", 2, "--cpus_per_task", 4, code=2)


def test_a_number_of_nodes_that_the_partition_does_not_give_is_refused(desk: Desk) -> None:
    site(desk)
    facts = "PartitionName=cpu Default=YES QoS=N/A MinNodes=2 MaxNodes=3 MaxMemPerNode=UNLIMITED\n"
    desk.answers("partition", facts)
    assert "--nodes 2 or more" in desk.slurm("submit", code=2)
    assert "at most --nodes 3" in desk.slurm("submit", "--nodes", 4, code=2)
    assert "--small_partition" in desk.slurm("submit", "--nodes", 3, code=2), "verify needs one node"
    desk.slurm("submit", "--nodes", 3, "--small_partition", "big")


def test_slurms_own_forms_of_time_and_memory_are_taken_or_answered_with_ours(desk: Desk) -> None:
    shown = desk.slurm("submit", "--time_min", "1:00:00", "--mem_gb", "4G", "--dry_run")
    assert (options(shown, "time")[0], options(shown, "mem")[0]) == ("60", "4096M")
    shown = desk.slurm("submit", "--time_min", "1-12", "--mem_per_cpu_gb", "512M", "--dry_run")
    assert (options(shown, "time")[0], options(shown, "mem-per-cpu")[0]) == ("2160", "512M")
    for flag, ours in {"--time": "--time_min", "--mem": "--mem_gb", "-p": "--partition"}.items():
        assert ours in call_main("submit", desk.data, flag, "1").ends(2).err
    for flag in ("--time_min", "--mem_gb"):
        assert flag in call_main("submit", desk.data, flag, "soon").ends(2).err


def test_a_dry_run_begins_with_a_summary_also_on_a_machine_without_slurm(desk: Desk) -> None:
    for index in range(5):
        desk.record(f"7_{index}", ended(74))
    flags = ("--time_min", 30, "--max_parallel", 2, "--dry_run")
    for words in (("submit", "--shards", "0-4", *flags), ("retry", "--shards", "0-4", *flags)):
        shown = desk.slurm(*words, PATH=str(desk.tmp))
        summary = shown.partition("#!/bin/bash")[0]
        for part in ("2 jobs", "5 tasks", "2 at once", "2.5 CPU-hours", "1.5 hours"):
            assert part in summary, part


def test_the_time_of_a_job_is_compared_in_minutes(desk: Desk) -> None:
    """A limit of 1-00:00:00 leaves a request of 1440 minutes alone."""
    site(desk, limit="1-00:00:00")
    desk.slurm("submit", "--time_min", 1440, "--dry_run")
    desk.slurm("submit", "--time_min", 1441, code=2)
