"""No name that stands in a file of a data set, and no link that lies in it, leads a command elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.forged import rewrite_plan
from tests.slurm.fake_slurm import Desk, FakeSlurm, ended, install_fake_slurm
from tests.world import World

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
SUBFOLDERS = {"ids": ".jsonl", "digests": ".digests", "quarantine": ".jsonl"}


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A plan whose shard has files in all subfolders, and a secret of an input's size and time beside it."""
    lines = [f'{{"text": "text {number}", "id": "{number}"}}' for number in range(60)]
    world = World(tmp_path).raw({
        "a.txt": SECRET.replace(b"a secret", b"the data"), "b.jsonl": "\n".join([*lines, "no json"]),
        "sub/c.txt": "a\n",
    })  # fmt: skip
    world.plan(num_shards=1, id_field="id", digests=True, max_bad_fraction=0.5)
    secret = tmp_path / "secret.txt"
    secret.write_bytes(SECRET)
    status = (world.raw_dir / "a.txt").stat()
    os.utime(secret, ns=(status.st_atime_ns, status.st_mtime_ns))
    return world


def forge_name(world: World, old: str, new: str) -> None:
    """Put another name in place of one in plan.json, with the hashes that follow."""
    rewrite_plan(world.data_dir / "plan.json", json.dumps(old), json.dumps(new))


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_input_that_is_not_in_the_input_folder_is_refused_by_every_command(
    world: World, tmp_path: Path, name: str
) -> None:
    forge_name(world, "a.txt", name.format(abs=tmp_path / "secret.txt"))
    data = world.data_dir
    for words in (
        ["shard", "--shard_id", 0, "--output_dir", data],
        ["run", data],
        ["verify", data],
        ["peek", data],
        ["export", data, "--to", "nanogpt", "--output_dir", tmp_path / "out"],
    ):
        done = world.main(*words)
        assert done.code in (65, 66), (words, done.text)  # 66: it looks for shards first
        assert done.code == 66 or "plan.json" in done.err, (words, done.text)
    assert not list(data.glob("*.tar"))
    assert not any(b"secret" in path.read_bytes() for path in data.glob("shard-*"))


@pytest.mark.processes
def test_a_link_in_the_input_folder_is_an_input_as_planning_says(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_bytes(SECRET)
    world = World(tmp_path)
    (world.raw_dir / "a.txt").symlink_to(tmp_path / "real.txt")
    world.plan(num_shards=1)
    assert world.main("run", world.data_dir).code == 0


@pytest.mark.parametrize("name", ["../../escaped", "../escaped", "/escaped", "sub/escaped", "..", "", "."])
def test_a_file_of_the_tokenizer_that_is_not_in_its_folder_is_refused(world: World, name: str) -> None:
    forge_name(world, "tokenizer_config.json", name)
    for words in (["shard", "--shard_id", 0, "--output_dir", world.data_dir], ["verify", world.data_dir]):
        assert world.main(*words).code == 65
    assert not list(world.data_dir.parent.rglob("*escaped*"))


@pytest.mark.parametrize("name", SUBFOLDERS)
def test_a_subfolder_that_is_a_link_is_not_written_through(world: World, tmp_path: Path, name: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    file = other / f"shard-00000{SUBFOLDERS[name]}"
    file.write_bytes(b"another data set's")
    (world.data_dir / name).symlink_to(other)
    done = world.main("shard", shard_id=0, output_dir=world.data_dir)
    assert (done.code, str(world.data_dir / name) in done.err) == (73, True), done.text
    assert {path.name: path.read_bytes() for path in other.iterdir()} == {file.name: b"another data set's"}


@pytest.mark.processes
@pytest.mark.parametrize("name", ["ids", "quarantine", "jobs"])
def test_no_command_removes_temporaries_through_a_link(world: World, tmp_path: Path, name: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    temporary = other / ".shard-00000.jsonl.host-1-00000000.tmp"
    temporary.touch()
    then = time.time() - 48 * 3600
    os.utime(temporary, (then, then))
    (world.data_dir / name).symlink_to(other)
    for command in ("clean", "run", "clean"):
        world.main(command, world.data_dir)
    assert list(other.iterdir()) == [temporary]


@pytest.mark.processes
@pytest.mark.parametrize("link", ["jobs", "jobs/attempts"])
def test_a_run_keeps_no_record_through_a_link(world: World, tmp_path: Path, link: str) -> None:
    other = tmp_path / "other"
    (other / "attempts").mkdir(parents=True)
    (world.data_dir / link).parent.mkdir(exist_ok=True)
    (world.data_dir / link).symlink_to(other)
    (world.data_dir / "ids").symlink_to(tmp_path)  # it fails, so its record would stay
    assert world.main("run", world.data_dir).code == 73
    assert [path.name for path in other.rglob("*")] == ["attempts"]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return install_fake_slurm(tmp_path, monkeypatch)


@pytest.mark.processes
@pytest.mark.parametrize("link", ["jobs", "jobs/logs"])
def test_submit_sends_nothing_where_logs_and_records_would_lie_elsewhere(
    fake: FakeSlurm, world: World, tmp_path: Path, link: str
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (world.data_dir / link).parent.mkdir(exist_ok=True)
    (world.data_dir / link).symlink_to(other)
    done = world.main("submit", world.data_dir)
    assert (done.code, str(world.data_dir / link) in done.err) == (73, True)
    assert not fake.sent()
    assert not list(other.iterdir())


@pytest.mark.processes
def test_a_history_that_is_a_link_is_not_written_through(
    fake: FakeSlurm, world: World, tmp_path: Path
) -> None:
    other = tmp_path / "bashrc"
    other.write_text("export PATH\n")
    (world.data_dir / "jobs").mkdir()
    (world.data_dir / "jobs" / "history.jsonl").symlink_to(other)
    assert world.main("submit", world.data_dir).code == 0
    assert other.read_text() == "export PATH\n"


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("place", ["elsewhere", "link"])
def test_a_record_of_another_user_shows_no_file_outside_of_the_data_set(
    fake: FakeSlurm, world: World, tmp_path: Path, place: str
) -> None:
    secret = tmp_path / "secret.log"
    secret.write_text("a secret line\n")
    log = world.data_dir / "jobs" / "logs" / "1_0.log"
    log.parent.mkdir(parents=True)
    log.symlink_to(secret)
    desk = Desk(data=world.data_dir, fake=fake)
    record = desk.record("1_0", ended(74), log=str(secret if place == "elsewhere" else log))
    os.chown(record, 12345, -1)
    for words in (
        ["logs", world.data_dir, 0],
        ["status", world.data_dir],
        ["status", world.data_dir, "--json"],
    ):
        assert "a secret line" not in world.main(*words).text
    os.chown(record, os.geteuid(), -1)
    assert "a secret line" in world.main("logs", world.data_dir, 0).text, "one's own may lie anywhere"


def test_a_copy_that_is_a_farm_of_links_is_read_as_the_data_set(world: World, tmp_path: Path) -> None:
    """As cp -rs makes it: links to files, in folders of its own."""
    world.run()
    farm = tmp_path / "farm"
    shutil.copytree(world.data_dir, farm, copy_function=lambda old, new: Path(new).symlink_to(old))
    assert world.main("verify", farm).code == 0
