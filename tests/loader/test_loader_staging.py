"""Staging: processes killed at any time end in verified copies, and the loader's batches do not change."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loader import TokenLoader, get_llama3_dataloader
from loader.__main__ import main
from loader.reading import ReaderIndex
from loader.staging import choose_shards, reader_index_of
from shardprep.format.manifest import read_manifest
from tests.children import child, end_of, run_child
from tests.held_children import Hold
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.conftest import Prep

NUM_SHARDS = 6
FORMS: dict[str, dict[str, Any]] = {"json": {}, "packed": {"record": "packed", "seq_len": 32}}


@pytest.fixture(scope="module")
def made(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prep.make_forms(sample_dir, tmp_path_factory.mktemp("made"), FORMS, num_shards=NUM_SHARDS)


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """A data set to break."""
    return Path(shutil.copytree(made / "json", tmp_path / "copy"))


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node's own disk, empty."""
    return tmp_path / "node"


@pytest.fixture
def stage(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str]]]:
    """``python -m loader stage`` in this process: its exit code and what it said."""
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    }

    def run(*args: object) -> tuple[int, str]:
        try:
            code: Any = main(["stage", *map(str, args)])
        except SystemExit as ending:
            code = ending.code
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``python -m loader stage``, with more variables; whatever still lives at the end is killed."""
    with contextlib.ExitStack() as started:

        def process(*args: object, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "loader", "stage", *map(str, args)]
            settings = {"env": {**os.environ, **(environ or {})}, "stderr": subprocess.STDOUT}
            return started.enter_context(child(command, **settings))

        yield process


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    """Stands before a read of a shard of the source: the second of four, of the idx and the tar, ends one."""
    return Hold(tmp_path, "readv", r"/shard-\d+\.(tar|idx)$")


def folder_of(node: Path) -> Path:
    (folder,) = node.iterdir()
    return folder


def temporaries(node: Path) -> list[str]:
    return sorted(path.name for path in node.rglob(".*"))


def staged_ids(data: Path, node: Path) -> list[int]:
    """The shards whose copies are whole, by sha256; fails where a file under a shard's name is wrong."""
    found = []
    for folder in node.iterdir() if node.exists() else []:
        for shard_id in range(NUM_SHARDS):
            manifest = read_manifest(data, shard_id)
            right = []
            for suffix, stamp in (("tar", manifest.tar), ("idx", manifest.idx)):
                path = folder / f"shard-{shard_id:05d}.{suffix}"
                if path.exists():
                    assert hashlib.sha256(path.read_bytes()).hexdigest() == stamp.sha256, path
                    right.append(suffix)
            if right == ["tar", "idx"]:
                found.append(shard_id)
    return found


def load(shards: Any, batch_size: int = 8, **options: Any) -> TokenLoader:
    return get_llama3_dataloader(shards, batch_size, **{"num_workers": 0, **options})


def epoch(loader: TokenLoader) -> list[Any]:
    with loader:
        return [{name: value.tolist() for name, value in batch.items()} for batch in loader]


class OpenedTars:
    """The tars that this process opens, while it lives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[Path] = []
        real = os.open

        def opening(path: Any, *args: Any, **named: Any) -> int:
            if str(path).endswith(".tar"):
                self.paths.append(Path(path))
            return real(path, *args, **named)

        monkeypatch.setattr(os, "open", opening)

    @property
    def folders(self) -> set[Path]:
        return {path.parent for path in self.paths}


# Staging by processes


@pytest.mark.processes
def test_four_processes_on_two_nodes_killed_at_any_read_end_in_verified_copies(
    made: Path, tmp_path: Path, start: Any
) -> None:
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    chance = random.Random(7)
    num_partial = 0
    for attempt, reads in enumerate(((1, 1), (6, 7), (2, 9), (3, 4))):
        processes, holds = [], []
        for node in nodes:  # one at least comes to its read: the other may wait for what it copies
            holds.append(Hold(tmp_path / f"{attempt} of {node.name}", "readv", r"/shard-\d+\.(tar|idx)$"))
            processes += [
                start(made / "json", "--to", node, environ=holds[-1].environ(number)) for number in reads
            ]
        for hold in holds:
            hold.wait(1)
        for process in chance.sample(processes, len(processes)):
            process.kill()
        for process in processes:
            end_of(process, code=-signal.SIGKILL)
        assert all(temporaries(node) for node in nodes), "a copy was killed in the middle"
        num_partial += any(0 < len(staged_ids(made / "json", node)) < NUM_SHARDS for node in nodes)
    assert num_partial, "no run was killed between two shards"
    for process in [start(made / "json", "--to", node) for node in nodes for _ in range(2)]:
        end_of(process)
    for node in nodes:
        assert staged_ids(made / "json", node) == list(range(NUM_SHARDS))
        assert sorted(path.suffix for path in folder_of(node).iterdir()) == [".idx"] * 6 + [".tar"] * 6
        assert not temporaries(node)


@pytest.mark.processes
def test_processes_of_a_node_share_the_copying_out(made: Path, node: Path, hold: Hold, start: Any) -> None:
    """While one is in the middle of a copy, another copies the rest and waits for that one."""
    folder = made / "json"
    first = start(folder, "--to", node, environ=hold.environ(2))
    hold.wait(1, first)
    (begun,) = node.rglob(".*.tmp")
    os.utime(begun, (0, time.time() + 3600))  # it grows, as the other sees it
    other = start(folder, "--to", node)
    wait_until(lambda: len(staged_ids(folder, node)) == NUM_SHARDS - 1, every_s=0.01)
    hold.release()
    copied = [int(end_of(each).split(" shards: ")[1].split(" copied")[0]) for each in (first, other)]
    assert copied == [1, NUM_SHARDS - 1]
    assert staged_ids(folder, node) == list(range(NUM_SHARDS))


@pytest.mark.processes
def test_a_signal_ends_staging_with_75_and_leaves_no_temporary(
    made: Path, node: Path, hold: Hold, start: Any
) -> None:
    process = start(made / "json", "--to", node, environ=hold.environ(7))
    hold.wait(1, process)
    assert temporaries(node)
    assert staged_ids(made / "json", node)
    process.send_signal(signal.SIGTERM)
    assert "error: stopped by SIGTERM" in end_of(process, code=75)
    assert not temporaries(node)
    assert len(staged_ids(made / "json", node)) == 1
    end_of(start(made / "json", "--to", node))
    assert staged_ids(made / "json", node) == list(range(NUM_SHARDS))


@pytest.mark.processes
def test_staging_a_whole_data_set_imports_no_torch(made: Path, node: Path) -> None:
    """Each node of a job does it at its start, and torch would take seconds."""
    code = "import sys; from loader.__main__ import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, "stage", str(made / "json"), "--to", str(node)]
    assert run_child(command).stdout.splitlines()[-1] == "0 False"


def test_what_is_staged_is_not_copied_again(made: Path, node: Path, stage: Any) -> None:
    assert stage(made / "json", "--to", node)[0] == 0
    stamps = {path: path.stat().st_mtime_ns for path in folder_of(node).iterdir()}
    code, text = stage(made / "json", "--to", node)
    assert code == 0
    assert f"0 copied, {NUM_SHARDS} there before" in text
    assert {path: path.stat().st_mtime_ns for path in folder_of(node).iterdir()} == stamps


@pytest.mark.parametrize("suffix", ["tar", "idx"])
def test_a_copy_of_a_wrong_size_is_copied_anew(made: Path, node: Path, stage: Any, suffix: str) -> None:
    assert stage(made / "json", "--to", node)[0] == 0
    path = folder_of(node) / f"shard-00003.{suffix}"
    path.write_bytes(path.read_bytes()[:-512])
    code, text = stage(made / "json", "--to", node)
    assert code == 0
    assert "1 copied, 5 there before" in text
    assert staged_ids(made / "json", node) == list(range(NUM_SHARDS))


def test_a_copy_that_another_process_is_making_is_waited_for_while_it_grows(
    made: Path, node: Path, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stage(made / "json", "--to", node)[0] == 0
    tar = folder_of(node) / "shard-00003.tar"
    others = folder_of(node) / f".shard-00003.tar.elsewhere-1-{'0' * 8}.tmp"
    tar.rename(others)
    os.utime(others)
    slept = []

    def sleeping(seconds: float) -> None:
        slept.append(seconds)
        assert len(slept) < 10, "it waits for ever"
        if len(slept) == 3:
            others.rename(tar)

    monkeypatch.setattr(time, "sleep", sleeping)
    code, text = stage(made / "json", "--to", node)
    assert code == 0
    assert len(slept) == 3
    assert "0 copied" in text
    tar.rename(others)
    os.utime(others, (0, time.time() - 60))
    code, text = stage(made / "json", "--to", node)
    assert code == 0
    assert len(slept) == 3, "what does not grow is not waited for"
    assert "1 copied" in text
    assert not temporaries(node)


@pytest.mark.processes
def test_what_a_dead_process_of_this_node_left_goes_at_once_and_others_after_a_day(
    made: Path, node: Path, stage: Any
) -> None:
    assert stage(made / "json/shard-00000.tar", "--to", node)[0] == 0
    host, gone = os.uname().nodename, subprocess.Popen(["true"])
    gone.wait()
    names = {
        "dead": f".shard-00004.tar.{host}-{gone.pid}-{'a' * 8}.tmp",
        "living": f".shard-00004.tar.{host}-{os.getppid()}-{'b' * 8}.tmp",
        "elsewhere": f".shard-00004.tar.other-host-{gone.pid}-{'c' * 8}.tmp",
        "old": f".shard-00005.tar.other-host-{gone.pid}-{'d' * 8}.tmp",
    }
    for name in names.values():
        (folder_of(node) / name).write_bytes(b"begun")
    os.utime(folder_of(node) / names["old"], (0, time.time() - 25 * 3600))
    assert stage(made / "json/shard-00001.tar", "--to", node)[0] == 0
    assert temporaries(node) == sorted([names["living"], names["elsewhere"]])


# What is wrong


@pytest.mark.parametrize("suffix", ["tar", "idx"])
@pytest.mark.parametrize("how", ["altered", "cut short"])
def test_a_broken_source_is_refused_by_name_and_the_other_shards_are_staged(
    copied: Path, node: Path, stage: Any, suffix: str, how: str
) -> None:
    broken = copied / f"shard-00002.{suffix}"
    data = bytearray(broken.read_bytes())
    data[len(data) // 2] ^= 1
    broken.write_bytes(data if how == "altered" else data[:-512])
    code, text = stage(copied, "--to", node)
    assert code == 65
    assert f"error: the source is broken, not the copy: {broken} is {broken.stat().st_size} bytes" in text
    assert "--shard_id 2 --output_dir" in text
    assert f"staged 5 of {NUM_SHARDS} shards: 5 copied, 0 there before or copied by others, 1 failed" in text
    assert staged_ids(copied, node) == [0, 1, 3, 4, 5]
    assert not list(folder_of(node).glob("*00002*"))
    assert not temporaries(node)


def test_a_missing_source_file_is_66_and_another_plans_manifest_78(
    prep: Prep, made: Path, copied: Path, node: Path, stage: Any
) -> None:
    assert prep.command("verify", copied, "--fast").code == 0
    idx = copied / "shard-00001.idx"
    idx.unlink()
    code, text = stage(copied, "--to", node)
    assert code == 66
    assert f"{idx} is missing; run: shardprep verify" in text
    shutil.copy(made / "packed" / "shard-00001.json", copied)
    code, text = stage(copied, "--to", node)
    assert code == 78
    assert "shard-00001.json is of plan" in text
    assert staged_ids(made / "json", node) == [0, 2, 3, 4, 5]
    assert not temporaries(node)


def test_a_wrong_read_is_done_once_more_and_two_different_ones_are_not_blamed_on_the_file(
    made: Path, node: Path, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, flips = os.readv, [1]

    def flipping(handle: int, buffers: Any) -> int:
        count = real(handle, buffers)
        if flips and count:
            buffers[0][5] ^= flips.pop()
        return count

    monkeypatch.setattr(os, "readv", flipping)
    code, text = stage(made / "json", "--to", node)
    assert code == 0, text
    assert text.count("warning: ") == 1
    assert "was read as" in text
    assert staged_ids(made / "json", node) == list(range(NUM_SHARDS))
    shutil.rmtree(node)
    flips[:] = [1, 2]
    code, text = stage(made / "json", "--to", node)
    assert code == 65
    assert "is read differently each time" in text
    assert "the source is broken" not in text


def test_a_failing_read_is_tried_once_more_then_74_and_the_others_are_staged(
    made: Path, node: Path, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, codes = os.readv, [errno.EIO]

    def failing(handle: int, buffers: Any) -> int:
        if codes:
            raise OSError(codes[0], os.strerror(codes.pop()))
        return real(handle, buffers)

    monkeypatch.setattr(os, "readv", failing)
    code, text = stage(made / "json", "--to", node)
    assert code == 0
    assert "Input/output error; trying once more" in text
    shutil.rmtree(node)
    codes[:] = [errno.EIO, errno.EIO]
    code, text = stage(made / "json", "--to", node)
    assert code == 74
    assert "cannot be read at byte 0: Input/output error" in text
    assert len(staged_ids(made / "json", node)) == NUM_SHARDS - 1
    assert not temporaries(node)


def test_recheck_copies_anew_what_differs_and_blames_the_copy(made: Path, node: Path, stage: Any) -> None:
    assert stage(made / "json", "--to", node)[0] == 0
    for name in ("shard-00001.tar", "shard-00004.idx"):
        path = folder_of(node) / name
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    code, text = stage(made / "json", "--to", node)
    assert code == 0
    assert "0 copied" in text, "sizes are right"
    code, text = stage(made / "json", "--to", node, "--recheck")
    assert code == 0
    assert text.count("the copy is broken, not the source") == 2
    assert "2 copied" in text
    assert staged_ids(made / "json", node) == list(range(NUM_SHARDS))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 2 MiB; the data set has 2.9 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0755", "none", str(folder)]
    if not shutil.which("mount"):
        pytest.skip("there is no mount command here, so no small disk to be filled")
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here to be filled: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.processes
def test_too_small_a_disk_is_73_before_anything_is_copied_and_a_limit_stages_what_fits(
    made: Path, small_disk: Path, stage: Any
) -> None:
    code, text = stage(made / "json", "--to", small_disk)
    assert code == 73
    assert "error: 6 shards of 2.8" in text
    assert f"are still to be staged, {small_disk} has 2.10 MB free" in text
    assert "nothing was copied: make room, or pass --limit_bytes" in text
    assert staged_ids(made / "json", small_disk) == []
    code, text = stage(made / "json", "--to", small_disk, "--limit_bytes", "1900K")
    assert code == 0, text
    num_staged = len(staged_ids(made / "json", small_disk))
    assert 2 <= num_staged <= 4
    assert f"{NUM_SHARDS - num_staged} shards of " in text
    assert "are over --limit_bytes and will be read where they are" in text


@pytest.mark.processes
def test_a_disk_that_fills_up_meanwhile_is_74_and_what_is_staged_stays_valid(
    made: Path, small_disk: Path, hold: Hold, start: Any
) -> None:
    limited = (made / "json", "--to", small_disk, "--limit_bytes", "1900K")
    process = start(*limited, environ=hold.environ(5))
    hold.wait(1, process)
    assert staged_ids(made / "json", small_disk)
    found = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(found.f_bavail * found.f_frsize))
    hold.release()
    text = end_of(process, code=74)
    (small_disk / "filler").unlink()
    assert "No space left on device" in text
    assert "are still to be staged" in text
    assert "what is staged stays valid" in text
    assert not temporaries(small_disk)
    assert staged_ids(made / "json", small_disk)
    end_of(start(*limited))


def test_a_folder_that_cannot_be_made_is_73(made: Path, tmp_path: Path, stage: Any) -> None:
    (tmp_path / "file").write_text("")
    code, text = stage(made / "json", "--to", tmp_path / "file" / "node")
    assert code == 73
    assert "Not a directory; choose another --to" in text


def test_tars_of_others_are_refused_as_nothing_vouches_for_their_copies(
    made: Path, tmp_path: Path, stage: Any
) -> None:
    shutil.copy(made / "json" / "shard-00000.tar", tmp_path / "a.tar")
    code, text = stage(tmp_path / "a.tar", "--to", tmp_path / "node")
    assert code == 2
    assert "a.tar is a tar that shardprep did not write" in text


def test_a_limit_that_is_no_number_of_bytes_is_2(made: Path, node: Path, stage: Any) -> None:
    code, text = stage(made / "json", "--to", node, "--limit_bytes", "much")
    assert code == 2
    assert "--limit_bytes is 'much', expected a number of bytes" in text
    assert not node.exists()


# Which shards


def test_flags_that_chose_shards_for_ranks_are_taken_and_every_shard_is_staged(
    made: Path, node: Path, stage: Any
) -> None:
    flags = ["--world_size", 8, "--ranks_per_node", 2, "--batch_size", 2, "--no-shuffle", "--num_steps=1"]
    code, text = stage(made / "json", "--to", node, *flags, "--group_by_length")
    assert code == 0
    assert "--num_steps, --shuffle choose nothing any more: ranks read blocks of every shard" in text
    assert staged_ids(made / "json", node) == list(range(NUM_SHARDS))


def test_processes_begin_at_different_places_of_the_list(made: Path, node: Path) -> None:
    def first(reader_index: ReaderIndex) -> int:
        return choose_shards([str(made / "json")], node, reader_index=reader_index)[1][0].shard_id

    assert [first(ReaderIndex(number=n, count=3)) for n in range(3)] == [0, 2, 4]
    task = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "6"}
    assert reader_index_of(task) == ReaderIndex(number=2, count=6)
    assert reader_index_of({}) == reader_index_of({"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "6"})
    assert reader_index_of({}).count > 1000
    assert choose_shards([str(made / "json")], node, limit_bytes=10, reader_index=ReaderIndex())[1] == []


# The loader


@pytest.mark.processes
@pytest.mark.parametrize(
    ("form", "options", "part", "num_workers"),
    [
        ("json", {}, "all", 2),
        ("json", {"seq_len": 20}, "some", 0),
        ("json", {"group_by_length": True}, "some", 2),
        ("packed", {"seed": 3}, "some", 0),
    ],
    ids=str,
)
def test_batches_and_state_are_the_same_from_either_place(
    made: Path, node: Path, stage: Any, form: str, options: Any, num_workers: int, part: str
) -> None:
    shards = made / form if part == "all" else f"{made / form}/shard-0000[0-2].tar"
    assert stage(shards, "--to", node)[0] == 0
    plain = load(made / form, num_workers=num_workers, **options)
    staged = load(made / form, num_workers=num_workers, staged_dir=node, **options)
    assert staged.state_at(7) == plain.state_at(7)
    assert epoch(staged) == epoch(plain)
    assert staged.state_dict() == plain.state_dict()


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
def test_staged_shards_are_read_from_the_copies_and_only_the_others_from_the_data_set(
    copied: Path, node: Path, stage: Any, num_workers: int
) -> None:
    """What is staged no longer has a tar elsewhere, so only its copy can be what is read."""
    whole = epoch(load(copied))
    assert stage(f"{copied}/shard-0000[0-3].tar", "--to", node)[0] == 0
    for shard_id in range(4):
        path = copied / f"shard-{shard_id:05d}.tar"
        path.write_bytes(bytes(path.stat().st_size))
    assert epoch(load(copied, staged_dir=node, num_workers=num_workers)) == whole


@pytest.mark.slow
def test_a_staged_folder_that_is_filled_while_training_is_used_from_then_on(
    made: Path, node: Path, stage: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = epoch(load(made / "json"))
    with load(made / "json", staged_dir=node) as loader:
        assert "To stage: shardprep stage" in caplog.text
        assert caplog.text.count("holds no copies of") == 1
        assert stage(made / "json", "--to", node)[0] == 0
        opened = OpenedTars(monkeypatch)
        assert [{name: value.tolist() for name, value in batch.items()} for batch in loader] == whole
    assert opened.folders == {folder_of(node)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "suffix"),
    # a tar of the right size is told by its hash alone; see --recheck
    [("short", "tar"), ("short", "idx"), ("gone", "tar"), ("gone", "idx"), ("of another plan", "idx")],
)
def test_a_copy_that_is_not_whole_is_not_used_and_said_once(
    made: Path,
    node: Path,
    stage: Any,
    suffix: str,
    how: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = epoch(load(made / "json"))
    assert stage(made / "json", "--to", node)[0] == 0
    for shard_id in (2, 3):
        path = folder_of(node) / f"shard-{shard_id:05d}.{suffix}"
        if how == "short":
            path.write_bytes(path.read_bytes()[:-512])
        elif how == "gone":
            path.unlink()
        else:
            path.write_bytes(b"\0" * path.stat().st_size)
    opened = OpenedTars(monkeypatch)
    assert epoch(load(made / "json", staged_dir=node)) == whole
    assert {path.name for path in opened.paths if path.parent == made / "json"} >= {
        "shard-00002.tar",
        "shard-00003.tar",
    }
    assert caplog.text.count("a staged copy fails") == (0 if how == "gone" and suffix == "tar" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["tar", "idx"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, "short"])
def test_copies_whose_disk_fails_are_left_with_one_warning_and_without_waiting(
    made: Path,
    node: Path,
    stage: Any,
    code: int | str,
    suffix: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = epoch(load(made / "json"))
    assert stage(made / "json", "--to", node)[0] == 0
    real, num_failed = os.preadv, []
    folder = str(folder_of(node))

    def failing(handle: int, buffers: Any, offset: int) -> int:
        path = str(Path(f"/proc/self/fd/{handle}").readlink())
        if path.startswith(folder) and path.endswith(suffix):
            num_failed.append(handle)
            if isinstance(code, int):
                raise OSError(code, os.strerror(code))
            return 0
        return real(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waited"))
    assert epoch(load(made / "json", staged_dir=node)) == whole
    assert 0 < len(num_failed) <= NUM_SHARDS
    assert caplog.text.count("a staged copy fails") == 1
    assert f"no copy in {folder} is opened any more" in caplog.text


@pytest.mark.slow
def test_copies_removed_while_they_are_read_change_nothing(made: Path, node: Path, stage: Any) -> None:
    whole = epoch(load(made / "json"))
    assert stage(made / "json", "--to", node)[0] == 0
    with load(made / "json", staged_dir=node) as loader:
        batches = iter(loader)
        found = [next(batches)]
        shutil.rmtree(node)
        found += batches
    assert [{name: value.tolist() for name, value in batch.items()} for batch in found] == whole


@pytest.mark.slow
def test_data_sets_staged_to_one_folder_keep_apart(made: Path, node: Path, stage: Any) -> None:
    for form in FORMS:
        assert stage(made / form, "--to", node)[0] == 0
    assert len(list(node.iterdir())) == 2
    for form in FORMS:
        assert epoch(load(made / form, staged_dir=node)) == epoch(load(made / form))


# Errors of the file systems, injected


INJECTED = [
    *("open", "stat", "fstat", "readv", "write", "close", "scandir", "statvfs"),
    *("mkdir", "rename", "fsync", "unlink", "posix_fadvise"),
]
CODES = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.ESTALE, errno.EMFILE)


class Injected:
    """One of os's functions that fails at its n-th call under some folders, or at each; closing closes."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, name: str, folders: list[Path], *, code: int, at: int | None
    ) -> None:
        self.name, self.folders, self.code, self.at = name, list(map(str, folders)), code, at
        self.num_calls = 0
        self.real = getattr(os, name)
        monkeypatch.setattr(os, name, self)

    def __call__(self, path: Any, *args: Any, **named: Any) -> Any:
        shown = str(Path(f"/proc/self/fd/{path}").readlink()) if isinstance(path, int) else str(path)
        fails = shown.startswith(tuple(self.folders)) and self.at in (None, self.num_calls)
        self.num_calls += shown.startswith(tuple(self.folders))
        if not fails:
            return self.real(path, *args, **named)
        if self.name == "close":
            self.real(path)
        raise OSError(self.code, os.strerror(self.code), None if isinstance(path, int) else path)


@pytest.mark.slow
@pytest.mark.parametrize("name", INJECTED)
@pytest.mark.parametrize("side", ["source", "node"])
def test_whatever_call_fails_staging_ends_with_right_copies_or_an_error_that_names_a_file(
    made: Path, node: Path, stage: Any, monkeypatch: pytest.MonkeyPatch, name: str, side: str
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    folder = made / "json" if side == "source" else node
    shards = f"{made}/json/shard-0000[0-1].tar"

    def staged(code: int, at: int | None) -> int:
        shutil.rmtree(node, ignore_errors=True)
        with monkeypatch.context() as patch:
            injected = Injected(patch, name, [folder], code=code, at=at)
            ended, text = stage(shards, "--to", node, "--recheck")
        assert ended in (0, 65, 66, 73, 74, 78)
        assert ended == 0 or ("error: " in text and str(made.parent.parent) in text), text
        found = staged_ids(made / "json", node)
        assert ended != 0 or found == [0, 1]
        return injected.num_calls

    num_calls = staged(errno.EIO, -1)
    cases = sorted({0, 1, num_calls // 2, num_calls - 1} & set(range(num_calls)))
    for at in [*cases, *([None] if num_calls else [])]:
        for code in CODES:
            staged(code, at)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["open", "stat", "lstat", "fstat", "preadv", "close"])
def test_whatever_call_fails_on_the_disk_of_copies_the_batches_are_the_same(
    made: Path, node: Path, stage: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    whole = epoch(load(made / "json"))
    assert stage(made / "json", "--to", node)[0] == 0
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waited"))
    for code in CODES:
        with monkeypatch.context() as patch:
            Injected(patch, name, [node], code=code, at=None)
            assert epoch(load(made / "json", staged_dir=node)) == whole, os.strerror(code)
