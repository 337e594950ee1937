"""An error of the system at any call ends with the right code, a line, and nothing that counts."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from preprocess.make.resources import WorkerSettings
from preprocess.make.worker import Worker, finished_manifest, load_worker
from preprocess.plan import tokenizer as resolved_tokenizer
from preprocess.plan.tokenizer import save_tokenizer
from preprocess.read import long_documents
from shardprep import files as regular_files
from shardprep.errors import CannotWrite, ShardprepError
from shardprep.format.plan import need_plan
from tests.children import run_child

if TYPE_CHECKING:
    from tests.conftest import Prep

CALLS = ["open", "pread", "fstat", "close", "write", "fsync", "rename", "stat", "scandir", "unlink", "mkdir"]


@pytest.fixture
def folder(prep: Prep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan of short lines, a long one, and one that cannot be decoded."""
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.txt").write_bytes(b"short\n" * 20 + b"word and " * 9_000 + b"\nbad \xff\nlast\n")
    monkeypatch.setattr(long_documents, "LONG_BYTES", 20_000)
    monkeypatch.setattr(WorkerSettings, "batch_bytes", 5_000)
    monkeypatch.setattr(regular_files, "RETRY_DELAYS_S", (0.0, 0.0))
    prep.plan(raw, tmp_path / "data", max_bad_fraction=0.5)
    return tmp_path / "data"


def worker_of(folder: Path) -> Worker:
    return load_worker(need_plan(folder), folder, WorkerSettings(), num_cpus=1, warn=pytest.fail)


def failing(call: Callable[..., Any], number: int, left: list[int]) -> Callable[..., Any]:
    """The same call, but for its ``number``-th time."""
    left[0] = number

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(*args, **kwargs)

    return wrapped


def exit_code_of(attempt: Worker) -> int:
    """0, or the code of an error of ours; any other error is none."""
    try:
        attempt.run_shard(attempt.plan.shard(0), lambda _: None)
    except ShardprepError as error:
        return error.exit_code
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_an_error_at_any_call_of_a_shard_is_one_of_ours_and_leaves_nothing_that_counts(
    prep: Prep, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plan = need_plan(folder)
    worker = worker_of(folder)
    worker.run_shard(worker.plan.shard(0), lambda _: None)
    expected = prep.contents(folder)
    number, left = 0, [0]
    while left[0] <= 0:
        number += 1
        data = Path(shutil.copytree(folder, tmp_path / f"data-{number}"))
        for path in (*data.glob("shard-*"), *data.glob("quarantine/*")):
            path.unlink()
        attempt = Worker(plan=plan, folder=data, settings=worker.settings, engine=worker.engine, num_cpus=1)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing(getattr(os, name), number, left))
            code = exit_code_of(attempt)
        assert code in (0, 66, 73, 74)
        assert code or finished_manifest(plan, data, 0)
        if finished_manifest(plan, data, 0):
            assert prep.contents(data) == expected
        attempt.run_shard(attempt.plan.shard(0), lambda _: None)
        assert prep.contents(data) == expected
        shutil.rmtree(data)
    assert number > 1 or name in ("stat", "scandir", "mkdir", "unlink", "rename")


def failing_for(name: str, call: Callable[..., Any], error: int, num_times: int, failed: list[int]) -> Any:
    """The same call, but for its first times for a file of this name, or one that is open."""

    def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
        shown = Path(f"/proc/self/fd/{path}").readlink() if isinstance(path, int) else path
        if str(shown).endswith(name) and len(failed) < num_times:
            failed.append(error)
            raise OSError(error, os.strerror(error), None if isinstance(path, int) else path)
        return call(path, *args, **kwargs)

    return wrapped


@pytest.mark.parametrize("command", ["plan", "shard"])
@pytest.mark.parametrize("error", ["EMFILE", "ENFILE", "ESTALE", "EDQUOT", "EROFS", "EIO", "ENOMEM"])
def test_an_input_that_the_system_cannot_open_is_74_and_not_called_missing(
    prep: Prep, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, command: str
) -> None:
    failed: list[int] = []
    monkeypatch.setattr(os, "open", failing_for("a.txt", os.open, getattr(errno, error), 99, failed))
    argv = {
        "plan": ["plan", *plan_args(prep, tmp_path / "raw", tmp_path / "other")],
        "shard": ["--shard_id", 0, "--output_dir", folder],
    }
    ended = prep.command(*argv[command])
    assert ended.code == 74, ended.text
    assert f"a.txt cannot be opened{' in 3 attempts' if len(failed) == 3 else ''}: " in ended.text
    assert os.strerror(getattr(errno, error)) in ended.text
    comes_back = error in ("EMFILE", "ENFILE", "ESTALE", "EIO")
    assert len(failed) == (3 if comes_back else 1), "tried again where it may come back"
    assert not list(folder.glob("shard-*"))


@pytest.mark.parametrize("call", ["open", "pread"])
def test_an_input_that_comes_back_is_opened_and_read_again(
    prep: Prep, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    failed: list[int] = []
    monkeypatch.setattr(os, call, failing_for("a.txt", getattr(os, call), errno.ESTALE, 2, failed))
    ended = prep.command("--shard_id", 0, "--output_dir", folder)
    assert (ended.code, len(failed)) == (0, 2), ended.text
    assert (folder / "shard-00000.json").exists()


def plan_args(prep: Prep, folder: Path, out: Path) -> list[object]:
    return ["--input_dir", folder, "--output_dir", out, "--model_id", prep.model_dir]


@pytest.mark.processes
def test_a_scratch_folder_that_cannot_be_made_is_73_and_names_tmpdir(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    gone = {"TMPDIR": str(tmp_path / "gone")}
    code = (
        "import sys, tempfile; tempfile._candidate_tempdir_list = lambda: ['/proc/nowhere']; "
        "from preprocess.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", code, "plan", *map(str, plan_args(prep, sample_dir, tmp_path / "data"))]
    ended = run_child(argv, env={**prep.environ(), **gone}, code=73)
    assert "no scratch folder can be made" in ended.stderr
    assert "TMPDIR" in ended.stderr


def test_a_full_scratch_folder_is_73_though_tokenizers_raises_a_bare_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model:
        is_fast = True

        def save_pretrained(self, _: str) -> None:
            raise Exception("No space left on device (os error 28)")  # noqa: TRY002 - as tokenizers does

    monkeypatch.setattr(resolved_tokenizer, "_auto_tokenizer", lambda _: Model())
    with pytest.raises(CannotWrite, match="No space left on device"):
        save_tokenizer("model", tmp_path)


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0"])
def test_memory_that_is_no_amount_is_2(prep: Prep, data_dir: Path, value: str) -> None:
    ended = prep.command("--shard_id", 0, "--output_dir", data_dir, f"--memory_gb={value}")
    assert ended.code == 2, ended.text
    assert f"--memory_gb is {float(value)}, expected more than 0" in ended.text


@pytest.mark.processes
def test_memory_below_a_workers_need_is_said_with_what_it_needs(prep: Prep, data_dir: Path) -> None:
    ended = prep.command("--shard_id", 0, "--output_dir", data_dir, "--memory_gb", "0.2")
    assert ended.code == 0, ended.text
    assert "note: a worker needs about 0.31 GB" in ended.text
    assert "0.20 GB" in ended.text
    assert "note" not in prep.command("--shard_id", 1, "--output_dir", data_dir, "--memory_gb", "0.4").text
    ended = prep.command("run", data_dir, "--memory_gb", "0.5", "--num_proc", "2")
    assert "0.25 GB for each of 2 processes" in ended.text


@pytest.mark.slow
def test_a_shard_a_file_of_very_many_small_files_is_warned_of(prep: Prep, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    for number in range(1_000):
        (raw / f"{number}.txt").write_text("a text\n")
    ended = prep.command("plan", *plan_args(prep, raw, tmp_path / "data"))
    assert ended.code == 0, ended.text
    assert "warning: each of 1000 input files is a shard of its own" in ended.text
    assert "--num_shards 1" in ended.text
    chosen = prep.command("plan", *plan_args(prep, raw, tmp_path / "even"), "--num_shards", 4)
    assert "shard of its own" not in chosen.text
