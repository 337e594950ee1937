"""No name that stands in a file of a data set, and no link that lies in it, leads a command elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.forged import rewrite_plan
from tests.slurm.fake_slurm import Desk, FakeSlurm, ended, install_fake_slurm
from tests.world import World

SECRET = b"a secret that nobody may read into a shard\n" * 40
ELSEWHERE = {
    "a.txt": (
        "../secret.txt", "sub/../../secret.txt", "{abs}", "../raw/../secret.txt", "sub/..", "..", ".", "",
    ),
    "tokenizer_config.json": ("../../secret", "../secret", "/secret", "sub/secret", "..", "", "."),
}  # fmt: skip


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
    """A folder to which links lead, as another data set's would be."""
    (tmp_path / "other" / "attempts").mkdir(parents=True)
    for name in ("shard-00000.jsonl", "shard-00000.digests", ".shard-00000.jsonl.host-1-00000000.tmp"):
        (tmp_path / "other" / name).write_text("another data set's\n")
    then = time.time() - 48 * 3600
    os.utime(tmp_path / "other" / ".shard-00000.jsonl.host-1-00000000.tmp", (then, then))
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


@pytest.mark.parametrize(("old", "new"), [(old, new) for old, names in ELSEWHERE.items() for new in names])
def test_a_name_in_a_plan_that_leads_elsewhere_is_refused_by_every_command(
    world: World, tmp_path: Path, old: str, new: str
) -> None:
    """Of an input and of a file of the tokenizer, with the hashes that follow."""
    data, new = world.data_dir, new.format(abs=world.raw_dir.with_name("secret.txt"))
    rewrite_plan(data / "plan.json", json.dumps(old), json.dumps(new))
    for words in (
        ["shard", "--shard_id", 0, "--output_dir", data],
        ["run", data],
        ["verify", data],
        ["peek", data],
        ["export", data, "--to", "nanogpt", "--output_dir", tmp_path / "out"],
    ):
        done = world.main(*words)
        # 66: it looks for shards first.
        assert done.code == 66 or (done.code == 65 and "plan.json" in done.err), (words, done.text)
    assert not list(data.glob("*.tar"))
    assert not any(b"secret" in path.read_bytes() for path in data.glob("shard-*"))
    assert not list(tmp_path.rglob("*secret*"))


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


LINKED: list[Any] = [
    *((name, "shard", 73) for name in ("ids", "digests", "quarantine")),
    *((name, "clean", 0) for name in ("ids", "digests", "quarantine", "jobs")),
    *(
        pytest.param(*row, marks=pytest.mark.processes)
        for row in (
            ("quarantine", "run", 73), ("jobs ids", "run", 73),  # it fails, so its record would stay
            ("jobs/attempts ids", "run", 73), ("jobs", "submit", 73), ("jobs/logs", "submit", 73),
            ("jobs/history.jsonl", "submit", 0),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("names", "command", "code"), LINKED)
def test_no_command_writes_or_removes_anything_through_a_link(
    fake: FakeSlurm, world: World, other: Path, names: str, command: str, code: int
) -> None:
    to = {"jobs/history.jsonl": other / "shard-00000.jsonl"}
    paths = [link(world, name, to.get(name, other)) for name in names.split()]
    before = {path: path.is_dir() or path.read_text() for path in other.rglob("*")}
    done = world.try_shard(0) if command == "shard" else world.main(command, world.data_dir)
    assert done.code == code, done.text
    if command != "run":
        assert code == 0 or str(paths[0]) in done.err
    assert {path: path.is_dir() or path.read_text() for path in other.rglob("*")} == before
    assert bool(fake.sent()) == ((command, code) == ("submit", 0))


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
