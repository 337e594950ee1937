"""What a submission asks for: set-up files, sbatch's variables, and the limits of accounts and QOS."""

from __future__ import annotations

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
    new_record = (data_dir / "jobs" / "0001.json").read_text()
    assert value in "".join([*fake.sent()[2:], new_record]), "the user's own word"


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


def test_without_a_number_of_cpus_a_task_asks_for_no_more_than_a_node_has(
    fake: FakeSlurm, data_dir: Path
) -> None:
    fake.answers("sinfo", "cpu*|idle|4000|4|infinite\n")
    said = slurm("submit", data_dir, "--dry_run")
    assert options(said)["cpus-per-task"] == "4"
    assert "cpus_per_task is 4" in said
    assert options(slurm("submit", data_dir, "--cpus_per_task", 9, "--dry_run"))["cpus-per-task"] == "9"


REFUSES_ARRAYS = """
script=$(cat)
if [[ $script =~ SBATCH\\ --array=0-([0-9]+) ]] && ((BASH_REMATCH[1] >= {most})); then
  echo 'sbatch: error: Batch job submission failed: Job violates accounting/QOS policy' >&2; exit 1
fi
printf '%s\\n' "$script" | "{real}" "$@"
"""


@pytest.mark.parametrize("when", ["--test-only", "--parsable"])
def test_where_slurm_takes_no_array_so_large_tasks_make_more_shards_each(
    fake: FakeSlurm, data_dir: Path, when: str
) -> None:
    """The limit is of an account or a QOS, which nobody asks for; five shards fit two tasks."""
    refuses = REFUSES_ARRAYS.format(most=3, real=fake.place / "sbatch.sh")
    fake.answers_by(
        "sbatch", f'if [[ "$*" = *{when}* ]]; then {refuses}\nelse "{fake.place}/sbatch.sh" "$@"; fi'
    )
    said = slurm("submit", data_dir)
    assert "5 shards become 2 tasks of up to 3 each" in said
    assert "shards_of=(0-1 2-4)" in read_script(data_dir)
    assert len(read_submissions(data_dir)) == 1


def read_script(data_dir: Path) -> str:
    """The script of the first array, as it is kept."""
    job = read_submissions(data_dir)[0].arrays[0].job_id
    return (data_dir / "jobs" / f"0000-{job}.sh").read_text()


def test_what_slurm_refuses_however_few_tasks_there_are_is_told_in_its_words(
    fake: FakeSlurm, data_dir: Path
) -> None:
    fake.answers_by("sbatch", "echo 'Job violates accounting/QOS policy (size)' >&2; exit 1")
    said = slurm("submit", data_dir, "--time_min", 90, code=2)
    assert "Job violates accounting/QOS policy (size)" in said
    assert "--time=90" in said
    assert not (data_dir / "jobs" / "0000.json").exists()


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
