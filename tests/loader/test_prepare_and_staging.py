"""``ensure_prepared`` makes a data set once per job, and ``stage`` copies one.

tests/faults kills copies, and makes several at the same time.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loader import ReadWriteError, ShardprepError, UsageError, ensure_prepared
from shardprep.errors import BadInput, Refused
from tests.children import child, end_of, environ_of_children, is_living, shardprep
from tests.forged import rewrite_json
from tests.held_children import Hold
from tests.oracle.forms import DataSets
from tests.waiting import wait_until
from tests.world import Ended, World, call_main, hostile_text, open_loader, refuses

NUM_SHARDS = 3
Prepare = Callable[..., str]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a data set, except jobs/."""
    files = (path for path in folder.rglob("*") if path.is_file() and "jobs" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# ensure_prepared

RANK = """
import sys
from loader import ensure_prepared
from shardprep.errors import ShardprepError
raw, data, model, rank = sys.argv[1:]
try:
    print("ready", ensure_prepared(data, input_dir=raw, model_id=model, num_shards=3, num_proc=1,
                                   rank=int(rank), world_size=8))
except ShardprepError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def planned(tmp_path: Path) -> World:
    """A planned data set, with a raw folder that the test may change."""
    texts = {f"{name}.txt": f"the kettle of {name}\n" * 40 for name in ("a", "b", "c")}
    return World(tmp_path).raw(texts).plan(num_shards=NUM_SHARDS)


def start(world: World, rank: int, hold: Hold | None = None) -> Any:
    """Start a rank of a job, as a context manager."""
    words = [world.raw_dir, world.data_dir, world.tokenizer, rank]
    environ = {**os.environ, "SLURM_JOB_ID": "1", **(hold.environ() if hold else {})}
    return child([sys.executable, "-c", RANK, *map(str, words)], env=environ)


@pytest.mark.processes
def test_rank_0_prepares_the_data_set_and_all_ranks_wait_until_it_is_verified(planned: World) -> None:
    """Also after an earlier job was killed."""
    hold = Hold(planned.raw_dir.parent, "write", r"/\.shard-\d+\.tar\.")
    with start(planned, 0, hold) as killed:
        children = hold.wait(1, killed)
        killed.kill()
        wait_until(lambda: not any(map(is_living, children)), every_s=0.01)
    assert not (planned.data_dir / "index.json").exists()
    with start(planned, 1) as one, start(planned, 2) as two, start(planned, 0) as first:
        assert [end_of(rank) for rank in (one, two, first)] == [f"ready {planned.data_dir}\n"] * 3
    planned.verify()
    assert not [path for path in planned.data_dir.parent.iterdir() if path.name.startswith(".")]


NODE = """
import sys
from loader import ensure_prepared
raw, data, model = sys.argv[1:]
print("ready", ensure_prepared(data, input_dir=raw, model_id=model, num_shards=9, num_proc=1))
"""

WRITES_A_SHARD = r"/data/\.shard-\d+\.tar\."  # not the trial of ``plan``


def start_on_node(world: World, node: int, local_rank: int = 0, hold: Hold | None = None) -> Any:
    """Start one of four tasks of srun, of which two are on each of two nodes, as a context manager."""
    slurm = {
        "SLURM_JOB_ID": 1,
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_NUM_TASKS": 4,
        "SLURM_STEP_NUM_NODES": 2,
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": 2 * node + local_rank,
        "SLURM_NODEID": node,
        "SLURM_LOCALID": local_rank,
        "SLURMD_NODENAME": f"node{node}",
    }
    held = hold.environ() if hold else {}
    environ = environ_of_children(**{name: str(value) for name, value in slurm.items()}, **held)
    words = [world.raw_dir, world.data_dir, world.tokenizer]
    return child([sys.executable, "-c", NODE, *map(str, words)], env=environ)


@pytest.fixture
def unplanned(tmp_path: Path) -> tuple[World, dict[str, bytes]]:
    """A raw folder, and the files of its data set as one process makes them."""
    world = World(tmp_path).raw({"a.txt": hostile_text(200)})
    alone = World(tmp_path / "alone", raw_dir=world.raw_dir).plan(num_shards=9).run().verify()
    return world, alone.contents()


def hosts_of(world: World) -> list[str]:
    """Return the node that made each shard so far."""
    return [manifest["run"]["host"] for manifest in world.manifests()]


@pytest.mark.processes
def test_the_first_rank_of_each_node_makes_shards(
    unplanned: tuple[World, dict[str, bytes]], tmp_path: Path
) -> None:
    """Node 0 pauses at its first shard until node 1 has made all others."""
    world, expected = unplanned
    hold = Hold(tmp_path, "write", WRITES_A_SHARD)
    leads = start_on_node(world, 0, hold=hold)
    with leads as leader, start_on_node(world, 1) as first, start_on_node(world, 1, 1) as other:
        hold.wait(1, leader)
        wait_until(lambda: len(hosts_of(world)) == 8)
        hold.release()
        texts = [end_of(rank) for rank in (leader, first, other)]
    assert texts == [f"ready {world.data_dir}\n"] * 3
    assert hosts_of(world).count("node1") == 8
    assert world.contents() == expected
    assert not world.temporaries()


@pytest.mark.processes
def test_shards_of_a_node_that_is_killed_are_made_by_the_others(
    unplanned: tuple[World, dict[str, bytes]], tmp_path: Path
) -> None:
    world, expected = unplanned
    held = [Hold(tmp_path / f"{node}", "write", WRITES_A_SHARD) for node in range(2)]
    with start_on_node(world, 0, hold=held[0]) as leader:
        with start_on_node(world, 1, hold=held[1]) as killed:
            children = held[1].wait(1, killed)
            held[0].wait(1, leader)
            killed.kill()
            wait_until(lambda: not any(map(is_living, children)), every_s=0.01)
        held[0].release()
        assert end_of(leader) == f"ready {world.data_dir}\n"
    assert hosts_of(world) == ["node0"] * 9
    assert world.contents() == expected
    assert not world.temporaries()


@pytest.fixture
def prepared(planned: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Calls ensure_prepared in this process, as a rank of job 7."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def call(rank: int, **given: Any) -> str:
        options = {"num_shards": NUM_SHARDS, "num_proc": 1, "world_size": 2, **given}
        data, raw, model = planned.data_dir, planned.raw_dir, str(planned.tokenizer)
        return ensure_prepared(data, input_dir=raw, model_id=model, rank=rank, **options)

    return call


@pytest.mark.processes
def test_other_options_and_other_inputs_are_refused_on_every_rank(
    planned: World, prepared: Prepare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """tests/oracle/test_refusals.py has more differences of inputs, with ``--check_inputs``."""
    planned.run().verify()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "preprocess.py").write_text("raise SystemExit('of the user')")  # must not run
    for path in planned.raw_dir.iterdir():
        path.touch()  # changes nothing
    assert prepared(0) == prepared(1) == str(planned.data_dir)
    before = contents(planned.data_dir)
    for rank, others in ((1, {"append_eos": True}), (0, {"num_shards": 4})):
        with refuses(Refused):
            prepared(rank, **others)
    assert contents(planned.data_dir) == before
    shutil.rmtree(planned.raw_dir)
    for rank in (0, 1):
        with refuses(Refused):
            prepared(rank)


@pytest.mark.processes
def test_options_that_are_left_out_later_are_refused_too(
    planned: World, prepared: Prepare, tmp_path: Path
) -> None:
    """The data set has a function, packed rows, and holds documents out; the call asks for other things."""
    shutil.rmtree(planned.data_dir)
    function = tmp_path / "function.py"
    function.write_text("def transform(record):\n    return record['text'].upper()\n")
    options: dict[str, Any] = {"record": "packed", "seq_len": 8, "validation_fraction": 0.1}
    options["transform"] = function
    assert prepared(0, **options) == prepared(0, **options) == str(planned.data_dir)
    with refuses(Refused):
        prepared(0, record="packed", seq_len=8)
    with refuses(Refused):
        prepared(0)


def test_a_rank_waits_until_limit_s(
    planned: World, prepared: Prepare, capsys: pytest.CaptureFixture[str]
) -> None:
    with refuses(ReadWriteError, path=planned.data_dir):
        prepared(1, limit_s=0.5)
    assert capsys.readouterr().err.count(str(planned.data_dir)) == 1
    with refuses(UsageError, found="limit_s=0"):
        prepared(0, limit_s=0)


@pytest.mark.processes
def test_other_ranks_raise_the_error_of_rank_0_but_not_one_of_an_earlier_start(
    planned: World, prepared: Prepare
) -> None:
    path = planned.data_dir.with_name(".data.failed.json")
    note = {"launch": "SLURM_JOB_ID=6", "exit_code": 65, "error": "long ago"}
    for content in ("{", "[]", '{"launch": 1}', "[" * 10**5, json.dumps(note)):
        path.write_text(content)
        with refuses(ReadWriteError):
            prepared(1, limit_s=0.2)
    path.write_text(json.dumps({**note, "launch": "SLURM_JOB_ID=7"}))
    with refuses(BadInput):
        prepared(1, limit_s=60)
    with refuses(UsageError):
        prepared(0, seq_len=7)
    with refuses(UsageError):
        prepared(1, limit_s=60)
    assert prepared(0)
    assert not path.exists(), "a success removes the error"
    with refuses(UsageError):
        prepared(0, world_size=1, seq_len=7)
    assert not path.exists(), "a single rank writes no error file"


# stage


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A folder on a node's own disk, which does not exist yet."""
    return tmp_path / "node"


def stage(source: object, node: Path) -> Ended:
    return call_main("stage", source, "--to", node)


@pytest.mark.processes
def test_a_stage_that_looks_while_another_copies_the_tokenizer_refuses_nothing(
    sets: DataSets, tmp_path: Path, node: Path
) -> None:
    looking = Hold(tmp_path / "looking", "open", r"\.index\.json\.claimed")
    copying = Hold(tmp_path / "copying", "open", r"\.?tokenizer_config\.json\..*tmp")
    command = shardprep("stage", sets["concat"], "--to", node)
    with child(command, env=environ_of_children(**looking.environ())) as first:
        looking.wait(1, first)
        with child(command, env=environ_of_children(**copying.environ())) as second:
            copying.wait(1, second)
            looking.release()
            end_of(first, code=0)
            copying.release()
            end_of(second, code=0)
    assert contents(node) == contents(sets["concat"])


@pytest.mark.parametrize("suffix", ["tar", "idx", "json", "tar, flipped"])
def test_only_incomplete_or_altered_shards_are_staged_again(sets: DataSets, node: Path, suffix: str) -> None:
    assert stage(sets["concat"], node).code == 0
    assert contents(node) == contents(sets["concat"])
    with open_loader(sets["concat"], seed=3) as plain, open_loader(node, seed=3) as staged:
        assert staged.state_at(7) == plain.state_at(7)
    stamps = {path: path.stat().st_mtime_ns for path in node.glob("shard-*")}
    path = node / f"shard-00001.{suffix.partition(',')[0]}"
    content = path.read_bytes()
    if suffix == "json":
        path.unlink()
    elif "flipped" in suffix:
        path.write_bytes(content[:700] + bytes([content[700] ^ 1]) + content[701:])
    else:
        path.write_bytes(content[:-512])
    assert stage(sets["concat"], node).code == 0
    assert contents(node) == contents(sets["concat"])
    changed = {each.name for each, stamp in stamps.items() if each.stat().st_mtime_ns != stamp}
    assert path.name in changed
    assert {name.partition(".")[0] for name in changed} == {"shard-00001"}
    # Another data set is refused. tests/oracle/test_refusals.py has more refusals.
    assert stage(sets["best_fit"], node).code == 78
    assert contents(node) == contents(sets["concat"])


@pytest.mark.parametrize("is_verified", [True, False])
def test_shards_without_a_plan_can_be_staged_again(
    sets: DataSets, tmp_path: Path, node: Path, *, is_verified: bool
) -> None:
    copied = Path(shutil.copytree(sets["concat"], tmp_path / "copy"))
    for name in ["plan.json"] if is_verified else ["plan.json", "index.json"]:
        (copied / name).unlink()
    assert stage(copied, node).code == 0
    assert "0 copied, 3 kept" in stage(copied, node).ends(0).out


@pytest.mark.parametrize(
    ("suffix", "code", "spoil"),
    [("tar", 65, lambda path: path.write_bytes(path.read_bytes()[::-1])), ("idx", 66, Path.unlink)],
)
def test_a_broken_shard_is_not_staged_and_the_others_are(
    sets: DataSets, tmp_path: Path, node: Path, suffix: str, code: int, spoil: Callable[[Path], object]
) -> None:
    """tests/faults has more damages and errors."""
    copied = Path(shutil.copytree(sets["concat"], tmp_path / "copy"))
    broken = copied / f"shard-00001.{suffix}"
    spoil(broken)
    ended = stage(copied, node)
    assert ended.code == code
    assert str(broken) in ended.text
    assert {path.name for path in node.glob("shard-*.json")} == {"shard-00000.json", "shard-00002.json"}
    assert not (node / "index.json").exists()
    with pytest.raises(ShardprepError):
        open_loader(node)


def test_the_index_of_other_shards_of_the_same_plan_is_not_staged(
    sets: DataSets, tmp_path: Path, node: Path
) -> None:
    copied = Path(shutil.copytree(sets["concat"], tmp_path / "copy"))
    rewrite_json(copied / "index.json", **{"shards.1.5": 0, "shards.1.2": 3})
    ended = stage(copied, node)
    assert (ended.code, str(copied / "index.json") in ended.text) == (65, True)
    assert not (node / "index.json").exists()


@pytest.mark.parametrize("content", [b'{"steps": []}', b""])
def test_stage_replaces_no_plan_json_of_another_program(sets: DataSets, node: Path, content: bytes) -> None:
    node.mkdir()
    (node / "plan.json").write_bytes(content)
    ended = stage(sets["concat"], node)
    assert (ended.code, str(node / "plan.json") in ended.text) == (78, True)
    assert [(path.name, path.read_bytes()) for path in node.iterdir()] == [("plan.json", content)]


def test_a_folder_that_stage_cannot_write_to_is_named(
    sets: DataSets, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file that stage creates is its mark."""
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(".index.json."):
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    ended = stage(sets["concat"], node)
    assert (ended.code, f"{node} cannot be written to: Permission denied" in ended.text) == (73, True)


def test_a_small_disk_ends_stage_with_73(sets: DataSets, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node.mkdir()
    small, real = SimpleNamespace(f_bavail=16, f_frsize=4096), os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: small if Path(path) == node else real(path))
    ended = stage(sets["documents"], node)
    assert ended.code == 73
    assert str(node) in ended.text
    assert not list(node.iterdir())
