"""No name that stands in a file of a data set, and no link that lies in it, leads a command elsewhere."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardprep.files import STALE_AFTER_S, names_in
from shardprep.format import plan as plan_file
from shardprep.format.plan import need_plan, plan_id, plan_json
from tests.slurm.fake_slurm import FakeSlurm, ended, install_fake_slurm, slurm, write_record

if TYPE_CHECKING:
    from tests.conftest import Prep

SECRET = b"a secret that nobody may read into a shard\n" * 40
ELSEWHERE = [
    "../secret.txt",
    "sub/../../secret.txt",
    "{abs}",
    "../raw/../secret.txt",
    "sub/..",
    "..",
    ".",
    "",
]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return install_fake_slurm(tmp_path, monkeypatch)


@pytest.fixture
def planned(prep: Prep, raw: Path, tmp_path: Path) -> Path:
    """A plan of one file, and beside its folder a secret of the same size and time."""
    (raw / "a.txt").write_bytes(SECRET.replace(b"a secret", b"the data"))
    (raw / "sub").mkdir()
    folder = tmp_path / "data"
    prep.plan(raw, folder, num_shards=2)
    (tmp_path / "secret.txt").write_bytes(SECRET)
    status = (raw / "a.txt").stat()
    os.utime(tmp_path / "secret.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    return folder


def forge_plan(folder: Path, **changes: Any) -> None:
    """Put a plan with other values in its place, with the id and the hashes that follow."""
    plan = dataclasses.replace(need_plan(folder), **changes)
    plan = dataclasses.replace(plan, plan_id=plan_id(plan))
    (folder / "plan.json").write_bytes(plan_json(plan))


@pytest.mark.parametrize("is_in_parts", [False, True])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_input_that_is_not_in_the_input_folder_is_refused_by_every_command(
    planned: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch, name: str, is_in_parts: bool
) -> None:
    if is_in_parts:
        monkeypatch.setattr(plan_file, "_MOST_WHOLE", 1)
    (item,) = need_plan(planned).inputs
    forge_plan(planned, inputs=[dataclasses.replace(item, path=name.format(abs=tmp_path / "secret.txt"))])
    for words in (
        ["--shard_id", 0, "--output_dir", planned],
        ["run", planned],
        ["verify", planned],
        ["peek", planned],
        ["export", planned, "--to", "nanogpt", "--output_dir", tmp_path / "out"],
    ):
        done = prep.command(*words)
        assert done.code in (65, 66), (words, done.text)
    assert "plan.json" in prep.command("--shard_id", 0, "--output_dir", planned).text
    assert not list(planned.glob("*.tar"))
    assert not any(b"secret" in path.read_bytes() for path in planned.glob("shard-*"))


@pytest.mark.processes
def test_a_link_in_the_input_folder_is_an_input_as_planning_says(
    prep: Prep, raw: Path, tmp_path: Path
) -> None:
    (tmp_path / "real.txt").write_bytes(SECRET)
    (raw / "a.txt").symlink_to(tmp_path / "real.txt")
    prep.plan(raw, tmp_path / "data", num_shards=1)
    assert prep.command("run", tmp_path / "data").code == 0


@pytest.mark.parametrize("name", ["../../escaped", "../escaped", "/escaped", "sub/escaped", "..", "", "."])
def test_a_file_of_the_tokenizer_that_is_not_in_its_folder_is_refused(
    planned: Path, prep: Prep, name: str
) -> None:
    files = need_plan(planned).tokenizer_files
    stamp = next(iter(files.values()))
    forge_plan(planned, tokenizer_files={**files, name: stamp})
    for words in (["--shard_id", 0, "--output_dir", planned], ["verify", planned]):
        done = prep.command(*words)
        assert (done.code, "tokenizer_files" in done.text) == (65, True)


SUBFOLDERS = {
    "ids": ".jsonl",
    "digests": ".digests",
    "quarantine": ".jsonl",
}


@pytest.fixture
def with_side_files(prep: Prep, raw: Path, tmp_path: Path) -> Path:
    """A plan whose shard has files in all subfolders."""
    lines = [f'{{"text": "text {number}", "id": "{number}", "url": "u"}}' for number in range(60)]
    (raw / "a.jsonl").write_text("\n".join([*lines, "no json"]))
    folder = tmp_path / "data"
    options: dict[str, Any] = {
        "id_field": "id",
        "digests": True,
        "max_bad_fraction": 0.5,
    }
    prep.plan(raw, folder, num_shards=1, **options)
    return folder


@pytest.mark.parametrize("name", SUBFOLDERS)
def test_a_subfolder_that_is_a_link_is_not_written_through(
    with_side_files: Path, tmp_path: Path, prep: Prep, name: str
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    file = other / f"shard-00000{SUBFOLDERS[name]}"
    file.write_bytes(b"another data set's")
    (with_side_files / name).symlink_to(other)
    made = prep.command("--shard_id", 0, "--output_dir", with_side_files)
    code, text = made.code, made.text
    assert (code, str(with_side_files / name) in text) == (73, True), text
    assert names_in(other) == [file.name]
    assert file.read_bytes() == b"another data set's"


@pytest.mark.processes
@pytest.mark.parametrize("name", ["ids", "quarantine", "jobs"])
def test_no_command_removes_temporaries_through_a_link(
    with_side_files: Path, tmp_path: Path, prep: Prep, name: str
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    temporary = other / ".shard-00000.jsonl.host-1-00000000.tmp"
    temporary.touch()
    then = time.time() - 2 * STALE_AFTER_S
    os.utime(temporary, (then, then))
    (with_side_files / name).symlink_to(other)
    prep.command("clean", with_side_files)
    prep.command("run", with_side_files)
    prep.command("clean", with_side_files)
    assert names_in(other) == [temporary.name]


@pytest.mark.processes
@pytest.mark.parametrize("link", ["jobs", "jobs/attempts"])
def test_a_run_keeps_no_record_through_a_link(
    with_side_files: Path, tmp_path: Path, prep: Prep, link: str
) -> None:
    other = tmp_path / "other"
    (other / "attempts").mkdir(parents=True)
    (with_side_files / link).parent.mkdir(exist_ok=True)
    (with_side_files / link).symlink_to(other)
    (with_side_files / "ids").symlink_to(tmp_path)  # it fails, so its record would stay
    assert prep.command("run", with_side_files).code == 73
    assert sorted(path.name for path in other.rglob("*")) == ["attempts"]


@pytest.mark.processes
@pytest.mark.parametrize("link", ["jobs", "jobs/logs"])
def test_submit_sends_nothing_where_logs_and_records_would_lie_elsewhere(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path, link: str
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (data_dir / link).parent.mkdir(exist_ok=True)
    (data_dir / link).symlink_to(other)
    assert str(data_dir / link) in slurm("submit", data_dir, code=73)
    assert not fake.sent()
    assert not names_in(other)


@pytest.mark.processes
def test_a_history_that_is_a_link_is_not_written_through(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "bashrc"
    other.write_text("export PATH\n")
    (data_dir / "jobs").mkdir()
    (data_dir / "jobs" / "history.jsonl").symlink_to(other)
    slurm("submit", data_dir)
    assert other.read_text() == "export PATH\n"


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("place", ["elsewhere", "link"])
def test_a_record_of_another_user_shows_no_file_outside_of_the_data_set(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path, place: str
) -> None:
    secret = tmp_path / "secret.log"
    secret.write_text("a secret line\n")
    log = data_dir / "jobs" / "logs" / "1_0.log"
    log.parent.mkdir(parents=True)
    log.symlink_to(secret)
    path = write_record(data_dir, "1_0", ended(74), log=str(secret if place == "elsewhere" else log))
    os.chown(path, 12345, -1)
    for words in (["logs", data_dir, 0], ["status", data_dir], ["status", data_dir, "--json"]):
        assert "a secret line" not in slurm(*words)
    os.chown(path, os.geteuid(), -1)
    assert "a secret line" in slurm("logs", data_dir, 0), "one's own may lie anywhere"


def test_a_copy_that_is_a_farm_of_links_is_read_as_the_data_set(
    made_dir: Path, tmp_path: Path, prep: Prep
) -> None:
    """As cp -rs makes it: links to files, in folders of its own."""
    shutil.copytree(made_dir, tmp_path / "farm", copy_function=lambda old, new: Path(new).symlink_to(old))
    assert prep.command("verify", tmp_path / "farm").code == 0
