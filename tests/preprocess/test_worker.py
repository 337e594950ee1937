"""Equal bytes whatever made them, and nothing unfinished left by whatever stopped it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from preprocess.make import resources
from shardprep.files import STALE_AFTER_S, remove_temporaries
from tests.children import end_of
from tests.held_children import Hold
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.conftest import Prep

RECORDS: dict[str, dict[str, Any]] = {
    "documents": {},
    "npy": {"token_format": "npy", "append_eos": True},
    "packed": {"record": "packed", "seq_len": 128},
    "whole files": {"doc": "file", "keep_text": False},
}


@pytest.fixture(scope="module")
def raw_dir(sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample text with a line in each language that is no UTF-8, so that there is a quarantine."""
    folder = tmp_path_factory.mktemp("raw")
    for path in sample_dir.iterdir():
        bad = b"broken \xff line\r\n" if path.name.endswith("_1.txt") else b""
        (folder / path.name).write_bytes(path.read_bytes() + bad)
    return folder


@pytest.fixture(scope="module")
def reference(prep: Prep, raw_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a record, planned and made by the fast engine; made when first asked for."""
    made: dict[str, Path] = {}

    def folder_of(record: str) -> Path:
        if record not in made:
            made[record] = tmp_path_factory.mktemp("reference")
            options: dict[str, Any] = {
                **RECORDS[record],
                "max_bad_fraction": 0.5,
            }  # of whole files two in six are bad
            prep.plan(raw_dir, made[record], num_shards=3, **options)
            prep.make(made[record], engine="gigatoken")
            assert any(name.startswith("quarantine/") for name in prep.contents(made[record]))
        return made[record]

    return folder_of


def planned_copy(reference: Path, folder: Path) -> Path:
    """A folder of its own with the same plan and nothing made."""
    folder.mkdir()
    shutil.copy(reference / "plan.json", folder)
    shutil.copytree(reference / "tokenizer", folder / "tokenizer")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("record", RECORDS)
def test_both_engines_and_all_sizes_of_blocks_give_equal_bytes(
    prep: Prep, reference: Callable[[str], Path], tmp_path: Path, record: str
) -> None:
    expected = prep.contents(reference(record))
    assert len(expected) >= 10
    for number, (engine, block_bytes) in enumerate(
        (("tokenizers", 1 << 17), ("gigatoken", 700), ("gigatoken", 5_000), ("gigatoken", 1 << 22))
    ):
        folder = planned_copy(reference(record), tmp_path / str(number))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resources, "BATCH_BYTES", block_bytes)
            prep.make(folder, engine=engine)
        assert prep.contents(folder) == expected
        run = json.loads((folder / "shard-00000.json").read_bytes())["run"]
        assert run["engine"].startswith(engine)


def written(path: Path) -> tuple[int, int]:
    """Which file it is and when it was written; reading it changes neither."""
    return path.stat().st_ino, path.stat().st_mtime_ns


def test_a_done_shard_is_left_alone(prep: Prep, data_dir: Path) -> None:
    prep.make(data_dir, 2)
    before = {path: written(path) for path in data_dir.glob("shard-00002.*")}
    ended = prep.command("--shard_id", 2, "--output_dir", data_dir)
    assert (ended.code, ended.text) == (0, "shard 00002 is done already\n")
    assert {path: written(path) for path in data_dir.glob("shard-00002.*")} == before


@pytest.fixture(scope="module")
def big_dir(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of one shard whose tar is written in several pieces."""
    raw, folder = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("big")
    text = b"".join(path.read_bytes() for path in sorted(sample_dir.iterdir()))
    (raw / "a.txt").write_bytes(text * (1 + 2_000_000 // len(text)))
    prep.plan(raw, folder)
    return folder


@pytest.fixture(scope="module")
def big_contents(prep: Prep, big_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = planned_copy(big_dir, tmp_path_factory.mktemp("whole") / "data")
    prep.make(folder)
    return prep.contents(folder)


def temporary_tars(folder: Path) -> list[Path]:
    return list(folder.glob(".shard-00000.tar.*.tmp"))


class HeldWriters:
    """Real writers of shard 0, each with a part of its tar on disk and none of them done."""

    def __init__(self, prep: Prep, folder: Path, place: Path, num_writers: int = 1) -> None:
        self.hold = Hold(place, "write", r"/\.shard-00000\.tar\.")
        self.processes = [
            prep.start("--shard_id", 0, "--output_dir", folder, env=self.hold.environ(number=2))
            for _ in range(num_writers)
        ]

    def __enter__(self) -> HeldWriters:
        pids = self.hold.wait(len(self.processes), *self.processes)
        assert pids == sorted(process.pid for process in self.processes)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.mark.processes
def test_a_rerun_after_kill_9_in_the_middle_gives_equal_bytes_and_clears_up(
    prep: Prep, big_dir: Path, big_contents: dict[str, bytes], tmp_path: Path
) -> None:
    folder = planned_copy(big_dir, tmp_path / "data")
    for attempt in range(2):
        with HeldWriters(prep, folder, tmp_path / f"{attempt}") as held:
            held.processes[0].kill()
        assert prep.contents(folder) == {}
    assert [path.stat().st_size > 0 for path in temporary_tars(folder)] == [True] * 2, (
        "a killed process cannot clear up"
    )
    ended = prep.command("--shard_id", 0, "--output_dir", folder)
    assert ended.code == 0, ended.text
    assert prep.contents(folder) == big_contents
    assert prep.temporaries(folder) == []


def test_what_a_killed_attempt_left_in_quarantine_goes_when_the_shard_is_done(
    prep: Prep, data_dir: Path
) -> None:
    left = data_dir / "quarantine" / ".shard-00000.jsonl.host-1-0123abcd.tmp"
    left.parent.mkdir()
    left.write_text("{}\n")
    (data_dir / ".shard-00000.begun.tmp").touch()  # it did not end itself
    prep.make(data_dir, 0)
    assert not left.exists()
    assert not [*data_dir.glob(".shard-*")]


@pytest.mark.processes
def test_two_live_writers_of_one_shard_end_well(
    prep: Prep, big_dir: Path, big_contents: dict[str, bytes], tmp_path: Path
) -> None:
    folder = planned_copy(big_dir, tmp_path / "data")
    with HeldWriters(prep, folder, tmp_path, num_writers=2) as held:
        held.hold.release()
        texts = [end_of(writer, code=None) for writer in held.processes]
        codes = sorted(writer.returncode for writer in held.processes)
    assert codes in ([0, 0], [0, 74]), texts
    assert prep.contents(folder) == big_contents
    assert prep.temporaries(folder) == []
    assert prep.command("verify", folder).code == 0


@pytest.mark.processes
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda item: item.name
)
def test_a_signal_ends_a_task_with_75_and_leaves_nothing(
    prep: Prep, big_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    folder = planned_copy(big_dir, tmp_path / "data")
    with HeldWriters(prep, folder, tmp_path) as held:
        held.processes[0].send_signal(number)
        held.hold.release()  # the thread that writes; the signal is the main thread's
        text = end_of(held.processes[0], code=75)
    assert f"error: stopped by {number.name}; nothing unfinished is left, run this again" in text
    assert "Traceback" not in text
    assert prep.names(folder) == ["plan.json", "tokenizer"]


def living_of_group(group: int) -> list[int]:
    """Processes of a group that are no zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(int(path.parent.name))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("target", ["task alone", "whole group"])
def test_a_signal_while_a_task_plans_ends_it_with_75_and_leaves_no_plan(
    prep: Prep, sample_dir: Path, tmp_path: Path, target: str
) -> None:
    """When the signal comes transformers is at work, which must not take it for an error of its own."""
    hold = Hold(tmp_path, "open", "/transformers/models/auto/tokenization_auto.*\\.py")
    model = Path(shutil.copytree(prep.model_dir, tmp_path / "model"))
    config = json.loads((model / "tokenizer_config.json").read_bytes())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "mask_token": "<|mask|>"}))
    task = prep.start(
        "--shard_id", 0, "--input_dir", sample_dir, "--output_dir", tmp_path / "data",
        "--model_id", model, start_new_session=True,
        env={**hold.environ(), "XDG_CACHE_HOME": str(tmp_path / "cache")},  # where it is not known yet
    )  # fmt: skip
    assert hold.wait(1, task) != [task.pid], "the planning process"
    (os.kill if target == "task alone" else os.killpg)(task.pid, signal.SIGTERM)
    assert "Traceback" not in end_of(task, code=75)
    wait_until(lambda: not living_of_group(task.pid), every_s=0.02)
    assert not (tmp_path / "data").exists()


def test_temporaries_of_other_attempts_go_after_a_day_and_not_before(tmp_path: Path) -> None:
    now = time.time()
    ages = {"young": 60, "old": STALE_AFTER_S + 60}
    for age, seconds in ages.items():
        for shard in ("shard-00001", "shard-00010"):
            path = tmp_path / f".{shard}.tar.{age}.tmp"
            path.touch()
            os.utime(path, (now - seconds, now - seconds))
    (tmp_path / "shard-00001.tar").touch()
    os.utime(tmp_path / "shard-00001.tar", (0, 0))
    remove_temporaries(tmp_path, "shard-00001", older_than_s=STALE_AFTER_S, subfolders=["quarantine"])
    kept = [".shard-00001.tar.young.tmp", ".shard-00010.tar.old.tmp", ".shard-00010.tar.young.tmp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, "shard-00001.tar"]
    remove_temporaries(tmp_path, "shard-00001", older_than_s=0, subfolders=["quarantine"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept[1:], "shard-00001.tar"]


def test_colleagues_can_read_what_a_task_wrote(prep: Prep, raw_dir: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        prep.plan(raw_dir, tmp_path / "data", num_shards=3, max_bad_fraction=0.2)
        prep.make(tmp_path / "data")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert len(files) > 12
    own = {path for path in files if path.parent.name != "tokenizer"}
    assert {path.stat().st_mode & 0o777 for path in own} == {0o640}
    assert (tmp_path / "data" / "tokenizer").stat().st_mode & 0o777 == 0o750


@pytest.mark.slow
@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("size", [1, 1024])
def test_all_batch_sizes_and_little_memory_give_equal_bytes(
    prep: Prep,
    reference: Callable[[str], Path],
    tmp_path: Path,
    record: str,
    size: int,
) -> None:
    folder = planned_copy(reference(record), tmp_path / "data")
    sizes = {"DATASET_BATCH_SIZE": str(size), "DATASET_WRITER_BATCH_SIZE": "1024"}
    ended = prep.command("--shard_id", 1, "--output_dir", folder, "--memory_gb", 0.3, **sizes)
    assert ended.code == 0, ended.text
    found = prep.contents(folder)
    assert len(found) >= 3
    assert found.items() <= prep.contents(reference(record)).items()
