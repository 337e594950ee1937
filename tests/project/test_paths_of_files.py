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
ELSEWHERE = (
    "../secret.txt",
    "sub/../../secret.txt",
    "{abs}",
    "../raw/../secret.txt",
    "sub/..",
    "..",
    ".",
    "",
)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A plan whose shard has files in all subfolders, and a secret of an input's size and time beside it."""
    lines = [f'{{"text": "text {number}", "id": "{number}"}}' for number in range(60)]
    world = World(tmp_path_factory.mktemp("planned")).raw({
        "a.txt": SECRET.replace(b"a secret", b"the data"), "b.jsonl": "\n".join([*lines, "no json"]),
        "sub/c.txt": "a\n",
    })  # fmt: skip
    secret, status = world.raw_dir.with_name("secret.txt"), (world.raw_dir / "a.txt").stat()
    secret.write_bytes(SECRET)
    os.utime(secret, ns=(status.st_atime_ns, status.st_mtime_ns))
    return world.plan(num_shards=1, id_field="id", digests=True, max_bad_fraction=0.5)


@pytest.fixture
def world(planned: World, tmp_path: Path) -> World:
    return planned.copy(tmp_path)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder to which links lead."""
    (tmp_path / "other").mkdir()
    return tmp_path / "other"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return install_fake_slurm(tmp_path, monkeypatch)


def link(world: World, name: str, to: Path) -> Path:
    """Put a link into the data set."""
    path = world.data_dir / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(to)
    return path


def forge_name(world: World, old: str, new: str) -> None:
    """Put another name in place of one in plan.json, with the hashes that follow."""
    rewrite_plan(world.data_dir / "plan.json", json.dumps(old), json.dumps(new))


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_input_that_is_not_in_the_input_folder_is_refused_by_every_command(
    world: World, tmp_path: Path, name: str
) -> None:
    data = world.data_dir
    forge_name(world, "a.txt", name.format(abs=world.raw_dir.with_name("secret.txt")))
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


@pytest.mark.parametrize("name", ["../../escaped", "../escaped", "/escaped", "sub/escaped", "..", "", "."])
def test_a_file_of_the_tokenizer_that_is_not_in_its_folder_is_refused(world: World, name: str) -> None:
    forge_name(world, "tokenizer_config.json", name)
    assert world.try_shard(0).code == world.main("verify", world.data_dir).code == 65
    assert not list(world.data_dir.parent.rglob("*escaped*"))


@pytest.mark.processes
def test_a_link_in_the_input_folder_is_an_input_and_a_farm_of_links_is_read_as_the_data_set(
    tmp_path: Path,
) -> None:
    """As planning says of the first; cp -rs makes the second, of links to files."""
    (tmp_path / "real.txt").write_bytes(SECRET)
    world = World(tmp_path)
    (world.raw_dir / "a.txt").symlink_to(tmp_path / "real.txt")
    world.plan(num_shards=1)
    assert world.main("run", world.data_dir).code == 0
    farm = tmp_path / "farm"
    shutil.copytree(world.data_dir, farm, copy_function=lambda old, new: Path(new).symlink_to(old))
    assert world.main("verify", farm).code == 0


@pytest.mark.parametrize(
    ("name", "suffix"), [("ids", "jsonl"), ("digests", "digests"), ("quarantine", "jsonl")]
)
def test_a_subfolder_that_is_a_link_is_not_written_through(
    world: World, other: Path, name: str, suffix: str
) -> None:
    (other / f"shard-00000.{suffix}").write_bytes(b"another data set's")
    path = link(world, name, other)
    done = world.try_shard(0)
    assert (done.code, str(path) in done.err) == (73, True), done.text
    assert [path.read_bytes() for path in other.iterdir()] == [b"another data set's"]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["ids", "quarantine", "jobs"])
def test_no_command_removes_temporaries_through_a_link(world: World, other: Path, name: str) -> None:
    temporary = other / ".shard-00000.jsonl.host-1-00000000.tmp"
    temporary.touch()
    then = time.time() - 48 * 3600
    os.utime(temporary, (then, then))
    link(world, name, other)
    for command in ("clean", "run", "clean"):
        world.main(command, world.data_dir)
    assert list(other.iterdir()) == [temporary]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["jobs", "jobs/attempts"])
def test_a_run_keeps_no_record_through_a_link(world: World, other: Path, name: str) -> None:
    (other / "attempts").mkdir()
    link(world, name, other)
    link(world, "ids", other)  # it fails, so its record would stay
    assert world.main("run", world.data_dir).code == 73
    assert [path.name for path in other.rglob("*")] == ["attempts"]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["jobs", "jobs/logs"])
def test_submit_sends_nothing_where_logs_and_records_would_lie_elsewhere(
    fake: FakeSlurm, world: World, other: Path, name: str
) -> None:
    path = link(world, name, other)
    done = world.main("submit", world.data_dir)
    assert (done.code, str(path) in done.err) == (73, True)
    assert not fake.sent()
    assert not list(other.iterdir())


@pytest.mark.processes
def test_a_history_that_is_a_link_is_not_written_through(fake: FakeSlurm, world: World, other: Path) -> None:
    (other / "bashrc").write_text("export PATH\n")
    link(world, "jobs/history.jsonl", other / "bashrc")
    assert world.main("submit", world.data_dir).code == 0
    assert (other / "bashrc").read_text() == "export PATH\n"


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("place", ["elsewhere", "link"])
def test_a_record_of_another_user_shows_no_file_outside_of_the_data_set(
    fake: FakeSlurm, world: World, other: Path, place: str
) -> None:
    secret = other / "secret.log"
    secret.write_text("a secret line\n")
    (world.data_dir / "jobs").mkdir()
    log = link(world, "jobs/logs/1_0.log", secret)
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
