"""Staging: processes killed at any time end in a verified copy, which is a data set like the one copied."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loader import TokenLoader, get_llama3_dataloader
from loader.__main__ import main
from shardprep.errors import ShardprepError
from tests.children import child, end_of
from tests.held_children import Hold

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
    """A folder on a node's own disk, not made yet."""
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


def temporaries(node: Path) -> list[str]:
    return sorted(path.name for path in node.rglob(".*"))


def contents(folder: Path) -> dict[str, bytes]:
    """All that a data set has, by its name in it."""
    files = (path for path in folder.rglob("*") if path.is_file() and "jobs" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def load(shards: Any, **options: Any) -> TokenLoader:
    return get_llama3_dataloader(shards, 8, **{"num_workers": 0, **options})


def epoch(loader: TokenLoader) -> list[Any]:
    with loader:
        return [{name: value.tolist() for name, value in batch.items()} for batch in loader]


@pytest.mark.processes
def test_processes_killed_at_any_read_end_in_a_copy_of_equal_bytes(
    made: Path, tmp_path: Path, node: Path, start: Any
) -> None:
    for number, reads in enumerate((1, 4, 5)):
        hold = Hold(tmp_path / f"hold {number}", "preadv", r"/json/shard-\d+\.(tar|idx)$")
        process = start(made / "json", "--to", node, environ=hold.environ(reads))
        hold.wait(1, process)
        process.kill()
        end_of(process, code=-signal.SIGKILL)
        assert temporaries(node), "a copy was killed in the middle"
        with pytest.raises(ShardprepError):
            load(node)
    for process in [start(made / "json", "--to", node) for _ in range(2)]:
        end_of(process)
    found = {name: data for name, data in contents(node).items() if not name.endswith(".tmp")}
    assert found == contents(made / "json")


@pytest.mark.processes
def test_a_signal_ends_staging_with_75_and_leaves_no_temporary(
    made: Path, tmp_path: Path, node: Path, start: Any
) -> None:
    hold = Hold(tmp_path, "preadv", r"/shard-\d+\.(tar|idx)$")
    process = start(made / "json", "--to", node, environ=hold.environ(7))
    hold.wait(1, process)
    assert temporaries(node)
    process.send_signal(signal.SIGTERM)
    assert "error: stopped by SIGTERM" in end_of(process, code=75)
    assert not temporaries(node)
    end_of(start(made / "json", "--to", node))
    assert contents(node) == contents(made / "json")


@pytest.mark.processes
@pytest.mark.parametrize("form", FORMS)
def test_the_copy_is_a_data_set_with_the_same_batches_and_states(
    prep: Prep, made: Path, node: Path, stage: Any, form: str
) -> None:
    code, text = stage(made / form, "--to", node)
    assert (code, f"{NUM_SHARDS} copied" in text) == (0, True), text
    assert not temporaries(node)
    assert prep.command("verify", node).code == 0
    with load(made / form, seed=3) as plain, load(node, seed=3) as staged:
        assert staged.state_at(7) == plain.state_at(7)
        staged.load_state_dict(plain.state_at(2))
    assert epoch(load(node, seed=3)) == epoch(load(made / form, seed=3))


@pytest.mark.parametrize("suffix", ["tar", "idx", "json"])
def test_what_is_staged_is_kept_and_what_is_not_whole_is_copied_anew(
    made: Path, node: Path, stage: Any, suffix: str
) -> None:
    assert stage(made / "json", "--to", node)[0] == 0
    stamps = {path: path.stat().st_mtime_ns for path in node.glob("shard-*")}
    code, text = stage(made / "json", "--to", node)
    assert (code, f"0 copied, {NUM_SHARDS} kept" in text) == (0, True), text
    assert {path: path.stat().st_mtime_ns for path in node.glob("shard-*")} == stamps
    path = node / f"shard-00003.{suffix}"
    if suffix == "json":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-512])
    code, text = stage(made / "json", "--to", node)
    assert (code, "1 copied" in text) == (0, True), text
    assert contents(node) == contents(made / "json")


@pytest.mark.parametrize("suffix", ["tar", "idx"])
@pytest.mark.parametrize("how", ["altered", "cut short", "missing"])
def test_a_broken_source_is_refused_by_name_and_the_other_shards_are_staged(
    copied: Path, node: Path, stage: Any, suffix: str, how: str
) -> None:
    broken = copied / f"shard-00002.{suffix}"
    data = bytearray(broken.read_bytes())
    data[len(data) // 2] ^= 1
    broken.write_bytes(data if how == "altered" else data[:-512])
    if how == "missing":
        broken.unlink()
    code, text = stage(copied, "--to", node)
    assert code == (66 if how == "missing" else 65)
    assert str(broken) in text
    assert f"staged 5 of {NUM_SHARDS} shards: 5 copied, 0 kept, 1 failed" in text
    assert not (node / "shard-00002.json").exists()
    assert not (node / "index.json").exists()
    assert not temporaries(node)
    with pytest.raises(ShardprepError):
        load(node)


def test_a_failing_read_is_74_and_what_is_staged_stays(
    made: Path, node: Path, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.preadv, [4]

    def failing(handle: int, buffers: Any, offset: int) -> int:
        if ".tar" in str(Path(f"/proc/self/fd/{handle}").readlink()):
            left[0] -= 1
            if not left[0]:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    code, text = stage(made / "json", "--to", node)
    assert code == 74
    assert "Input/output error" in text
    assert not temporaries(node)
    code, text = stage(made / "json", "--to", node)
    assert code == 0
    assert " 0 kept" not in text
    assert contents(node) == contents(made / "json")


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
def test_too_small_a_disk_is_73_before_anything_is_copied(made: Path, small_disk: Path, stage: Any) -> None:
    code, text = stage(made / "json", "--to", small_disk)
    assert code == 73
    assert f"are still to be staged, {small_disk} has 2.10 MB free; nothing was copied" in text
    assert not list(small_disk.iterdir())


def test_what_cannot_be_staged_is_refused(
    made: Path, copied: Path, tmp_path: Path, node: Path, stage: Any
) -> None:
    (tmp_path / "file").write_text("")
    shutil.copy(made / "json" / "shard-00000.tar", tmp_path / "a.tar")
    assert stage(made / "json", "--to", tmp_path / "file" / "node")[0] == 73
    assert stage(tmp_path / "a.tar", "--to", node)[0] == 2
    assert stage(made / "json" / "shard-00000.tar", "--to", node)[0] == 2
    assert stage(copied, "--to", copied / "inside")[0] == 2
    assert stage(tmp_path / "none", "--to", node)[0] == 66
    assert not node.exists()
    assert stage(made / "json", "--to", node)[0] == 0
    assert stage(made / "packed", "--to", node)[0] == 78
    assert contents(node) == contents(made / "json")
