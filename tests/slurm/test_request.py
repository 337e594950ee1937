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
SINFO = "cpu*|idle|4000|8|{limit}|NO|{nodes}\nbig|idle|64000|8|infinite|NO|1-infinite\n"
# As `scontrol --oneliner show assoc_mgr` prints them, without the fields that are not read.
ASSOCIATIONS = """\
Association Records
ClusterName=test Account=root UserName= ParentAccount= DefAssoc=No MaxWallPJ={parent} MaxTRESPJ= MaxTRESPN=
ClusterName=test Account=p UserName=root(0) Partition=gpu ParentAccount= DefAssoc=Yes MaxWallPJ=1 MaxTRESPJ=
ClusterName=test Account=p UserName= ParentAccount=root(1) DefAssoc=No MaxWallPJ= MaxTRESPJ= MaxTRESPN=
ClusterName=test Account=p UserName=root(0) Partition= ParentAccount= DefAssoc=Yes MaxWallPJ= MaxTRESPJ=
ClusterName=test Account=p UserName=root(0) Partition=old ParentAccount= DefAssoc=Yes MaxWallPJ=1 MaxTRESPJ=
QOS Records
QOS=normal(1) MaxWallPJ= MaxTRESPJ= MaxTRESPN= MinTRESPJ= PreemptMode=OFF
QOS=team(3) GrpTRES=cpu=N(0),mem=3000(9) MaxWallPJ= MaxTRESPJ= MaxTRESPN= MinTRESPJ= PreemptMode=OFF
QOS=long(4) MaxWallPJ=90 MaxTRESPJ= MaxTRESPN= MinTRESPJ= PreemptMode=OFF
QOS=short(2) MaxWallPJ=5 MaxTRESPJ=mem=2048,cpu=4 MaxTRESPN= MinTRESPJ=cpu=2 PreemptMode=OFF
"""


def site(
    desk: Desk,
    *,
    limit: str = "infinite",
    parent: str = "",
    partition_qos: str = "N/A",
    nodes: str = "1-infinite",
    flags: str = "",
) -> None:
    """Let the stand-ins answer as a site with a QOS of 2 to 4 CPUs, 2 GB and five minutes.

    ``flags``: of every QOS.
    """
    desk.answers("config", ENFORCED)
    desk.answers("sinfo", SINFO.format(limit=limit, nodes=nodes))
    desk.answers("partition", f"PartitionName=cpu Default=YES QoS={partition_qos} MaxMemPerNode=UNLIMITED\n")
    desk.answers("assoc_mgr", ASSOCIATIONS.format(parent=parent))
    asked = 'case "$*" in *"show partition"*) cat PLACE/partition;; *assoc_mgr*) cat PLACE/assoc_mgr;; '
    desk.answers_by("scontrol", f"{asked}*) REAL;; esac")
    accounts = desk.place / "bin" / "sacctmgr"
    says = f'[[ $* = *"show qos"* ]] && echo "{flags}" || echo "p||normal,short"'
    accounts.write_text(f"#!/bin/bash\n{says}\n")
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


@pytest.mark.parametrize(
    "args", ["-qshort", "--qos=short --comment=a", "-q short", "--comment a --qos short"]
)
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
    ("given", "environ", "minutes", "least"),
    [({"limit": "5:00", "flags": "PartitionTimeLimit"}, {"SBATCH_QOS": "long"}, 90, 91),
     ({"partition_qos": "short", "flags": "DenyOnLimit,OverPartQOS"}, {"SBATCH_QOS": "long"}, 90, 91),
     ({"partition_qos": "short"}, {"SBATCH_QOS": "long"}, 5, 6),
     ({}, {"SBATCH_PARTITION": "big"}, 9999, 0), ({}, {"SBATCH_PARTITION": "big,gpu"}, 1, 2)],
)  # fmt: skip
def test_the_limits_are_those_that_slurm_applies(
    desk: Desk, given: dict[str, Any], environ: dict[str, Any], minutes: int, least: int
) -> None:
    """A flag of a QOS puts it before the partition, and a user may have an association for each partition."""
    site(desk, **given)
    desk.slurm("submit", "--time_min", minutes, "--cpus_per_task", 2, "--dry_run", **environ)
    if least:
        desk.slurm("submit", "--time_min", least, "--cpus_per_task", 2, code=2, **environ)


def test_a_job_that_is_larger_than_all_jobs_of_a_group_may_be_is_refused(desk: Desk) -> None:
    site(desk)
    refusal = desk.slurm("submit", "--mem_gb", 3, code=2, SBATCH_QOS="team")
    assert "GrpTRES mem of QOS team" in refusal
    desk.slurm("submit", "--mem_gb", 2.9, SBATCH_QOS="team")


@pytest.mark.parametrize(("plugins", "code"), [("lua", 0), ("(null)", 2), ("require_timelimit", 2)])
def test_limits_of_the_default_partition_bind_no_job_that_a_plugin_may_send_elsewhere(
    desk: Desk, plugins: str, code: int
) -> None:
    site(desk, limit="5:00")
    desk.answers("config", f"{ENFORCED}JobSubmitPlugins = {plugins}\n")
    shown = desk.slurm("submit", "--time_min", 60, "--dry_run", "--until_done", code=code)
    if not code:
        assert options(shown, "time") == ["60", "61", "61"]
        assert options(desk.slurm("submit", "--time_min", 5, "--dry_run"), "time") == ["5", "5"]
    desk.slurm("submit", "--time_min", 60, "--partition", "cpu", code=2)


@pytest.mark.parametrize(
    ("facts", "is_named"),
    [("State=UP AllowAccounts=ALL", True), ("State=DOWN AllowAccounts=ALL", False),
     ("State=UP AllowAccounts=others", False), ("State=UP DenyAccounts=p,q", False)],
)  # fmt: skip
def test_no_partition_is_advised_that_would_refuse_the_user(desk: Desk, facts: str, is_named: bool) -> None:
    site(desk)
    desk.answers("partition", f"PartitionName=cpu QoS=N/A\nPartitionName=big QoS=N/A {facts}\n")
    desk.submitted(array(request={"mem_gb": 3.9, "account": "p"}, tasks=["0"], mem_mb=3994))
    desk.record("1_0", ended(75, stopped_by="OUT_OF_MEMORY"))
    assert ("--partition big" in desk.slurm("retry", "--dry_run")) == is_named


def test_a_retry_in_another_partition_asks_for_what_that_one_allows(desk: Desk) -> None:
    desk.answers("sinfo", "cpu*|idle|4000|8|infinite|NO\nbrief|idle|9000|8|0:05:00|NO\n")
    desk.submitted(array(request={"time_min": 4}, time_min=4, tasks=["0", "1", "2-4"]))
    desk.record("1_0", ended(75, stopped_by="TIMEOUT", time=1240))
    desk.record("1_1", ended(75, stopped_by="OUT_OF_MEMORY"))
    shown = desk.slurm("retry", "--shards", "0-1", "--partition", "brief", "--dry_run")
    assert set(options(shown, "time")) == {"5", "4"}
    assert "MaxTime of partition brief" in shown


@pytest.mark.parametrize("default_mb", [512, 4000])
def test_memory_in_sbatch_args_is_the_only_form_of_memory(desk: Desk, default_mb: int) -> None:
    """Slurm takes one form: the controller's own memory replaces the user's."""
    desk.answers("config", f"{CONFIG}DefMemPerCPU = {default_mb}\n")
    flags = ("--sbatch_args", "--mem-per-cpu=2G", "--until_done", "--dry_run")
    shown = desk.slurm("submit", *flags)
    both = zip(options(shown, "mem"), options(shown, "mem-per-cpu"), strict=True)
    assert [bool(mem) + bool(per_cpu) for mem, per_cpu in both] == [1, 1, 1]
    shown = desk.slurm("submit", "--sbatch_args", "--mem=3G", "--cpus_per_task", "node", "--dry_run")
    assert options(shown, "mem")[0] == "3G"


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


def test_a_retry_with_other_worker_args_starts_fewer_processes_too(desk: Desk) -> None:
    """The user's words and those that the failure asks for are both there."""
    site(desk, limit="5:00")
    desk.submitted(array(request={"cpus_per_task": "node"}, tasks=["0-4"], mem_mb=None))
    desk.record("1_0", ended(75, stopped_by="OUT_OF_MEMORY"), shards="0-4")
    shown = desk.slurm("retry", "--dry_run", "--worker_args", "--max_bad_fraction 0.05")
    assert "starts 2 processes in place of 5" in shown
    assert "--max_bad_fraction 0.05 --num_proc 2" in shown


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
    assert desk.released() == ["1"]


@pytest.mark.parametrize("limit", ["AssocMaxSubmitJobLimit", "QOSMaxSubmitJobPerUserLimit"])
def test_until_done_waits_until_the_users_other_jobs_have_ended(desk: Desk, limit: str) -> None:
    """Not even one task is taken."""
    refuses = FULL.replace("allocation failure: Resource temporarily unavailable", f"sbatch: error: {limit}")
    desk.answers_by("sbatch", f"[[ -e PLACE/room ]] || {refuses}; REAL")
    assert "MaxSubmitJobs" in desk.slurm("submit", code=74)
    waits: list[float] = []

    def wait(delay_s: float) -> None:
        waits.append(delay_s)
        (desk.place / "room").touch()

    desk.at_waits(wait)
    desk.slurm("submit", "--until_done")
    assert waits == [5]
    assert desk.sent_shards() == ["0 1 2 3 4"]


@pytest.mark.parametrize(
    ("flags", "most"),
    [(("--until_done",), 10), ((), 9), (("--mem_gb", "4", "--time_min", "60", "--until_done"), 11)],
)
def test_a_submission_makes_few_calls_of_slurms_commands(
    desk: Desk, flags: tuple[str, ...], most: int
) -> None:
    desk.answers("sinfo", SINFO.format(limit="infinite", nodes="1-infinite"))
    desk.slurm("submit", *flags)
    names = ("sbatch", "scontrol", "sinfo", "squeue", "sacct", "scancel")
    calls = {name: desk.calls(name) for name in names}
    assert sum(map(len, calls.values())) == most, calls


def test_a_small_job_that_is_refused_only_when_it_is_sent_is_named(desk: Desk) -> None:
    """It asks for less than the tasks, so it is not tried before."""
    refuses = "echo 'too small' >&2; exit 1"
    desk.answers_by("sbatch", f"script=$(cat); [[ $script != *-control* ]] || {{ {refuses}; }}; "
                              "printf '%s\\n' \"$script\" | REAL")  # fmt: skip
    refusal = desk.slurm("submit", "--mem_gb", 4, "--until_done", code=2)
    for words in ("too small", "the controller of --until_done", "--mem=1024M", "--controller_args"):
        assert words in refusal
    assert desk.calls("scancel") == ["2", "1"]
    assert not list((desk.data / "jobs").glob("*.json"))


@pytest.mark.parametrize(
    ("flags", "cpus", "memory"),
    [
        (("--cpus_per_task", "node"), ["2", "1"], ["", "1024M"]),
        (("--cpus_per_task", "8", "--mem_gb", "8"), ["2", "1"], ["2999M", "1024M"]),
        (("--cpus_per_task", "2", "--mem_per_cpu_gb", "4"), ["2", "1"], ["1499M", "1024M"]),
        (("--cpus_per_task", "3", "--mem_gb", "1"), ["2", "1"], ["1024M", "1024M"]),
    ],
)
def test_verify_and_controller_fit_the_nodes_of_their_partition(
    desk: Desk, flags: tuple[str, ...], cpus: list[str], memory: list[str]
) -> None:
    desk.answers("sinfo", "cpu*|idle|64000|8|infinite|NO|1-infinite\nsmall|idle|3000|2|infinite|NO|1\n")
    shown = desk.slurm("submit", "--until_done", "--small_partition", "small", "--dry_run", *flags)
    assert options(shown, "cpus-per-task")[1:] == cpus
    given = zip(options(shown, "mem")[1:], options(shown, "mem-per-cpu")[1:], strict=True)
    assert ["".join(each) for each in given] == memory


def test_nodes_that_only_one_user_may_share_count_as_whole_nodes(desk: Desk) -> None:
    site(desk)
    desk.answers("partition", "PartitionName=cpu QoS=N/A ExclusiveUser=YES\n")
    shown = desk.slurm("submit", "--mem_gb", 1, "--dry_run")
    assert "#SBATCH --exclusive\n" in shown
    desk.answers("partition", "PartitionName=cpu QoS=N/A ExclusiveUser=NO\n")
    assert "#SBATCH --exclusive\n" not in desk.slurm("submit", "--mem_gb", 1, "--dry_run")


def test_limits_of_accounts_are_asked_for_only_where_slurm_enforces_them(desk: Desk) -> None:
    desk.answers("sinfo", SINFO.format(limit="infinite", nodes="1-infinite"))
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


def test_a_retry_of_plain_jobs_of_several_nodes_has_as_many(desk: Desk) -> None:
    desk.record("7_0", ended(74), shards="0-4", SLURM_JOB_NUM_NODES="2")
    assert options(desk.slurm("retry", "--dry_run"), "nodes") == ["2", "1"]


def test_where_memory_of_a_whole_node_is_refused_the_flag_that_helps_is_named(desk: Desk) -> None:
    refuses = "[[ $script != *--mem=* ]] || { echo 'no --mem here' >&2; exit 1; }"
    desk.answers_by("sbatch", f"script=$(cat); {refuses}; printf '%s\\n' \"$script\" | REAL")
    assert "--mem_per_cpu_gb" in desk.slurm("submit", "--nodes", 2, code=2)
    desk.slurm("submit", "--nodes", 2, "--mem_per_cpu_gb", 1)


def test_several_jobs_of_several_nodes_share_the_shards(desk: Desk) -> None:
    desk.slurm("submit", "--nodes", 2, "--shards_per_task", 3)
    assert desk.sent_shards() == ["0-1 2-4"]
    assert "--nodes" in desk.slurm("submit", "--nodes", 2, "--cpus_per_task", 4, code=2)


def test_a_number_of_nodes_that_the_partition_does_not_give_is_refused(desk: Desk) -> None:
    site(desk, nodes="2-3")
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
        for text in ("soon", "UNLIMITED", "D-HH", "1.5.1"):
            assert flag in call_main("submit", desk.data, flag, text).ends(2).err
    assert "1.5" in call_main("submit", desk.data, "--time_min", "1.5").ends(2).err, "hours or minutes?"
    assert "--nodes" in call_main("submit", desk.data, "-N", "2").ends(2).err
    for flag in ("-J", "--job-name", "-o"):
        assert "submit names jobs" in call_main("submit", desk.data, flag, "x").ends(2).err


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
