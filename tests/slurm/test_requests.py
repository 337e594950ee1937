"""What a submission asks for: set-up files, sbatch's variables, and the limits of accounts and QOS."""

from __future__ import annotations

import getpass
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from slurm.submissions import read_submissions
from tests.checkout import ROOT
from tests.slurm.fake_slurm import FakeSlurm, slurm

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes

PARTITION = "PartitionName=cpu Default=YES MaxTime=UNLIMITED QoS={} DefMemPerCPU=UNLIMITED\n"
CONFIG = """ClusterName = test
MaxArraySize            = 1001
AccountingStorageType   = accounting_storage/slurmdbd
AccountingStorageEnforce = associations,limits,qos
DefMemPerCPU            = 1000
"""


def write_accounts(
    fake: FakeSlurm, *, qos: str = "name=normal", own: str = "", partition_qos: str = "N/A"
) -> None:
    """A partition of 4-CPU nodes, and a user with two accounts, of which the second is the default one."""
    user = getpass.getuser()
    fake.answers("config", CONFIG)
    fake.answers("partitions", PARTITION.format(partition_qos))
    fake.answers("sinfo", "cpu|4000|4\n")
    fake.answers("sacctmgr-user", f"name={user} user={user} defaultaccount=two\n")
    rows = [
        f"user={user} account=one qos=normal maxsubmitjobs=1",
        f"user={user} account=two qos=normal,small,wide {own}",
        "account=one parentname=root",
        "account=two parentname=root",
        "account=root",
    ]
    fake.answers("sacctmgr-assoc", "\n".join(rows) + "\n")
    fake.answers("sacctmgr-qos", qos + "\n")


def options(script: str) -> dict[str, str]:
    """The options of the first script of a dry run."""
    found: dict[str, str] = {}
    for name, value in re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.MULTILINE):
        found.setdefault(name, value)
    return found


def test_a_relative_setup_file_is_recorded_with_its_whole_path_and_retry_finds_it_from_elsewhere(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    places = [tmp_path / "here", tmp_path / "elsewhere"]
    for place in places:
        place.mkdir()
        (place / "setup.sh").touch()
    slurm("submit", data_dir, "--setup", "setup.sh", cwd=places[0])
    said = slurm("retry", data_dir, cwd=places[1])
    assert "job " in said
    assert read_submissions(data_dir)[0].arrays[0].request.setup == str(places[0] / "setup.sh")
    for script in fake.sent():
        assert f"export SHARDPREP_SETUP={places[0] / 'setup.sh'}\n" in script


def test_a_setup_file_that_is_not_there_is_refused_by_its_whole_path(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    said = slurm("submit", data_dir, "--setup", "setup.sh", cwd=tmp_path, code=2)
    assert f"--setup {tmp_path / 'setup.sh'} is no file" in said


COMMANDS = ("setup", "container", "srun_args", "notify", "sbatch_args", "worker_args")


def commands_of(folder: Path) -> dict[str, str]:
    """A value for each field of a request that names a command, or that may stand for one."""
    (folder / "setup.sh").touch()
    names = {name: f"--{name}-of-another" for name in COMMANDS[1:]}
    return {**names, "setup": str(folder / "setup.sh")}


def flags(values: dict[str, str]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", value)]


def test_no_file_of_a_data_set_names_a_command_of_a_submission(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    lines = [f"{name} = {json.dumps(value)}" for name, value in commands_of(tmp_path).items()]
    (data_dir / "shardprep.toml").write_text("\n".join(["[slurm]", *lines, "mem_gb = 77"]))
    script = slurm("submit", data_dir, "--dry_run")
    assert "of-another" not in script
    assert str(tmp_path / "setup.sh") not in script
    assert "--mem=" not in script


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("until_done", [[], ["--until_done"]])
def test_retry_takes_no_command_from_a_record_that_others_can_write_to_and_shows_what_to_type(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path, name: str, until_done: list[str]
) -> None:
    value = commands_of(tmp_path)[name]
    slurm("submit", data_dir, f"--{name}={value}")
    record = data_dir / "jobs" / "0000.json"
    record.chmod(0o666)
    said = slurm("retry", data_dir, *until_done, code=78)
    assert f"--{name}={value}" in said
    assert len(fake.sent()) == 2, "nothing of it was sent"
    slurm("retry", data_dir, f"--{name}={value}", *until_done)
    assert value in "".join(fake.sent()[2:]), "the user's own word"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_retry_takes_no_command_from_the_record_of_another_user(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    slurm("submit", data_dir, "--container", "image-of-another")
    os.chown(data_dir / "jobs" / "0000.json", 12345, -1)
    assert "image-of-another" in slurm("retry", data_dir, code=78)
    slurm("retry", data_dir, "--container", "")
    assert "image-of-another" not in "".join(fake.sent()[2:])


def test_a_record_that_names_no_command_serves_whoever_retries(fake: FakeSlurm, data_dir: Path) -> None:
    slurm("submit", data_dir, "--mem_gb", 2)
    (data_dir / "jobs" / "0000.json").chmod(0o666)
    slurm("retry", data_dir)
    assert "#SBATCH --mem=2048M" in fake.sent()[2]


def test_a_record_is_written_so_that_a_group_cannot_change_its_commands(
    fake: FakeSlurm, data_dir: Path
) -> None:
    mask = os.umask(0o002)
    try:
        slurm("submit", data_dir, "--container", "mine")
    finally:
        os.umask(mask)
    slurm("retry", data_dir)
    assert "export SHARDPREP_EXEC=mine" in fake.sent()[2]


def test_the_variables_of_the_batch_script_are_recorded_so_that_a_retry_in_another_shell_has_them(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "setup.sh").touch()
    monkeypatch.setenv("SHARDPREP_SETUP", "setup.sh")
    monkeypatch.setenv("SHARDPREP_EXEC", "apptainer exec image.sif")
    slurm("submit", data_dir, cwd=tmp_path)
    monkeypatch.delenv("SHARDPREP_SETUP")
    monkeypatch.delenv("SHARDPREP_EXEC")
    slurm("retry", data_dir)
    for script in fake.sent():
        assert f"export SHARDPREP_SETUP={tmp_path / 'setup.sh'}\n" in script
        assert "export SHARDPREP_EXEC='apptainer exec image.sif'\n" in script
    monkeypatch.setenv("SHARDPREP_SETUP", "gone.sh")
    said = slurm("retry", data_dir, code=2, cwd=tmp_path)
    assert f"--setup {tmp_path / 'gone.sh'} is no file" in said


@pytest.mark.parametrize(
    ("variable", "value", "option"),
    [
        ("SBATCH_TIMELIMIT", "7", ("time", "7")),
        ("SBATCH_TIMELIMIT", "1-02", ("time", "1560")),
        ("SBATCH_TIMELIMIT", "2:30:01", ("time", "151")),
        ("SBATCH_MEM_PER_NODE", "300", ("mem", "300M")),
        ("SBATCH_MEM_PER_NODE", "2G", ("mem", "2048M")),
        ("SBATCH_MEM_PER_CPU", "512M", ("mem-per-cpu", "512M")),
    ],
)
def test_sbatchs_variables_for_time_and_memory_are_the_requests_values(
    fake: FakeSlurm,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    option: tuple[str, str],
) -> None:
    monkeypatch.setenv(variable, value)
    said = slurm("submit", data_dir, "--dry_run")
    assert option in options(said).items()
    assert f"({variable})" in said


@pytest.mark.parametrize("variable", ["SBATCH_TIMELIMIT", "SBATCH_MEM_PER_NODE"])
def test_a_variable_of_sbatch_that_cannot_be_read_is_refused_by_its_name(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "much")
    assert f"{variable} is 'much', expected" in slurm("submit", data_dir, "--dry_run", code=2)


def test_memory_of_one_kind_replaces_memory_of_the_other_kind_that_stands_further_away(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_MEM_PER_NODE", "3000")
    assert options(slurm("submit", data_dir, "--dry_run"))["mem"] == "3000M"
    shown = options(slurm("submit", data_dir, "--dry_run", "--mem_per_cpu_gb", 2))
    assert (shown["mem-per-cpu"], shown.get("mem")) == ("2048M", None)


def test_without_an_account_the_limits_of_the_default_account_count(fake: FakeSlurm, data_dir: Path) -> None:
    write_accounts(fake)
    assert "#SBATCH --array=0-4%5" in slurm("submit", data_dir, "--dry_run")
    said = slurm("submit", data_dir, "--dry_run", "--account", "one", code=2)
    assert "MaxSubmitJobs of account one (1, 0 in use) leaves no room" in said


@pytest.mark.parametrize(
    ("flags", "qos", "words"),
    [
        (["--cpus_per_task", 4], "maxtres=cpu=2", "is 4, MaxTRES of QOS normal allows at most 2 CPUs"),
        (["--mem_gb", 3], "maxtrespu=mem=2G", "--mem_gb is 3, MaxTRESPU of QOS normal allows at most 2 GB"),
        (["--time_min", 90], "maxwall=01:00:00", "--time_min is 90, MaxWall of QOS normal allows at most 60"),
        (["--cpus_per_task", 3], "grptres=cpu=2,mem=9T", "GrpTRES of QOS normal allows at most 2 CPUs"),
        (["--cpus_per_task", 4], "maxtres=mem=2G", "memory of the site's default"),
    ],
)  # fmt: skip
def test_what_a_qos_would_keep_pending_for_ever_is_refused_with_the_limits_name(
    fake: FakeSlurm, data_dir: Path, flags: list[object], qos: str, words: str
) -> None:
    write_accounts(fake, qos=f"name=normal {qos}")
    said = slurm("submit", data_dir, *flags, code=2)
    assert words in said
    assert "would stay pending for ever" in said
    assert not fake.sent()


def test_a_limit_of_the_partitions_qos_wins_over_that_of_the_jobs_qos_and_of_the_account(
    fake: FakeSlurm, data_dir: Path
) -> None:
    rows = "name=wide maxtres=cpu=3\nname=normal maxtres=cpu=1"
    write_accounts(fake, qos=rows, own="maxtres=cpu=1", partition_qos="wide")
    slurm("submit", data_dir, "--cpus_per_task", 3, "--dry_run")
    assert "MaxTRES of QOS wide" in slurm("submit", data_dir, "--cpus_per_task", 4, "--dry_run", code=2)
    write_accounts(fake, own="maxtres=cpu=1")
    said = slurm("submit", data_dir, "--cpus_per_task", 2, "--dry_run", code=2)
    assert "MaxTRES of account two allows at most 1 CPU" in said


def test_limits_that_the_site_does_not_enforce_refuse_nothing(fake: FakeSlurm, data_dir: Path) -> None:
    write_accounts(fake, qos="name=normal maxtres=cpu=1")
    fake.answers("config", CONFIG.replace("associations,limits,qos", "associations"))
    slurm("submit", data_dir, "--cpus_per_task", 4, "--dry_run")


def test_without_a_number_of_cpus_a_task_asks_for_no_more_than_a_node_or_a_qos_allows(
    fake: FakeSlurm, data_dir: Path
) -> None:
    write_accounts(fake)
    said = slurm("submit", data_dir, "--dry_run")
    assert options(said)["cpus-per-task"] == "4"
    assert "cpus_per_task is 4 (the most of partition cpu)" in said
    write_accounts(fake, qos="name=normal maxtres=cpu=2")
    assert options(slurm("submit", data_dir, "--dry_run"))["cpus-per-task"] == "2"


def test_auto_asks_for_what_fits_the_qos_and_for_no_more_cpus_than_a_short_shard_can_use(
    fake: FakeSlurm, data_dir: Path
) -> None:
    """The shards of this data set take a second: a second core would have nothing to do."""
    write_accounts(fake, qos="name=normal maxtres=cpu=2,mem=512M maxwall=3")
    shown = options(slurm("submit", data_dir, "--auto", "--dry_run"))
    assert (shown["cpus-per-task"], shown["mem"], shown["time"]) == ("1", "512M", "3")


def sbatch_that_says(fake: FakeSlurm, words: str) -> None:
    """A site's wrapper: it passes the job on and prints more than the id."""
    real = fake.place / "sbatch.sh"
    fake.answers_by("sbatch", f'id=$("{real}" "$@") || exit\n[[ -n $id ]] || exit 0\n{words}')


def test_a_banner_of_the_sites_sbatch_before_the_job_id_is_no_error(fake: FakeSlurm, data_dir: Path) -> None:
    sbatch_that_says(fake, 'echo "Welcome to 7 nodes"; echo; echo "$id;test"; echo')
    assert "job 1: 5 tasks" in slurm("submit", data_dir)
    assert [job.job_id for job in read_submissions(data_dir)[0].jobs] == ["1", "2"]


def test_a_job_whose_id_cannot_be_understood_is_found_by_its_name_and_cancelled(
    fake: FakeSlurm, data_dir: Path
) -> None:
    sbatch_that_says(fake, 'echo "Submitted, thank you"')
    fake.answers("squeue", "")
    said = slurm("submit", data_dir, code=74)
    assert "sbatch answered 'Submitted, thank you', expected a job id on the last line" in said
    assert "squeue --me" in said, "it was not found by its name"
    fake.answers_by("squeue", '[[ "$*" != *--name=shardprep-*--format=%A ]] || echo 41')
    said = slurm("submit", data_dir, code=74)
    assert "job 41 was cancelled" in said
    assert fake.calls("scancel") == ["41"]
    assert read_submissions(data_dir) == []


def test_the_lines_that_plan_prints_are_accepted_by_this_site_from_any_folder(
    fake: FakeSlurm, prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    """Nodes have 4 CPUs where the script asks for 8, the folder's name has a blank, MaxArraySize is 1001."""
    fake.answers("sinfo", "gpu|64\ncpu*|4\n")
    data = tmp_path / "my data"
    flags = ("--input_dir", sample_dir, "--model_id", prep.model_dir, "--num_shards", 5, "--output_dir")
    said = prep.command("plan", *flags, os.path.relpath(data)).text
    assert f"next: sbatch --array=0-4 --cpus-per-task=4 {ROOT / 'slurm' / 'prep_array.sh'} '{data}'" in said
    assert f"  or: shardprep submit '{data}'" in said
    fake.answers("config", "MaxArraySize            = 4\n")
    said = prep.command("plan", *flags, tmp_path / "second").text
    assert "sbatch" not in said
    assert f"next: shardprep submit {tmp_path / 'second'}" in said
