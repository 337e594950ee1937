"""What the fault campaigns (tests/faults) found, each as its own small test."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loader import tokenizer as loader_tokenizer
from preprocess.look.doctor import output_findings
from preprocess.look.export import EXPORTERS
from preprocess.look.train_tokenizer import _refuse_existing
from preprocess.make.engines import tokenizers_engine
from preprocess.make.worker import load_engine
from preprocess.plan.tokenizer import read_files, resolve_tokenizer
from shardprep.errors import BrokenShard, CannotWrite, NotFound, ReadWriteError
from shardprep.format.names import INDEX_NAME
from shardprep.format.plan import need_plan
from shardprep.format.submissions import JobRequest
from slurm.site import check_folder
from slurm.state import find_state

if TYPE_CHECKING:
    from tests.conftest import Prep


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``stale("stat", "a.json")``: from now on that call of ``os`` fails for paths of that name."""

    def apply(call: str, name: str) -> None:
        real = getattr(os, call)

        def failing(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, str | os.PathLike) and Path(path).name == name:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), os.fspath(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, call, failing)

    return apply


def test_a_worker_that_cannot_look_at_the_tokenizer_says_so(
    data_dir: Path, stale: Callable[..., None]
) -> None:
    plan = need_plan(data_dir)
    stale("stat", "tokenizer.json")
    with pytest.raises(ReadWriteError, match="cannot be read: Stale file handle"):
        load_engine(plan, data_dir, "tokenizers", pytest.fail)


def test_planning_names_the_tokenizer_file_that_it_cannot_read(
    tmp_path: Path, stale: Callable[..., None]
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    stale("open", path.name)
    with pytest.raises(ReadWriteError, match="cannot be read: Stale file handle"):
        read_files(tmp_path)


@pytest.mark.parametrize(("to", "name"), [("nanogpt", "train.bin"), ("megatron", "shard-00000_document.idx")])
def test_an_export_that_cannot_look_at_its_files_says_so(
    tmp_path: Path, stale: Callable[..., None], to: str, name: str
) -> None:
    exporter = EXPORTERS[to](folder=tmp_path, vocab_size=9, num_shards=1, first_token=[0, 9])
    stale("stat", name)
    with pytest.raises(ReadWriteError, match="cannot be read: Stale file handle"):
        exporter.is_done(0)


@pytest.mark.processes
def test_status_that_cannot_read_the_index_says_so(
    prep: Prep, sample_dir: Path, tmp_path: Path, stale: Callable[..., None]
) -> None:
    prep.plan(sample_dir, tmp_path / "O", num_shards=1)
    prep.make(tmp_path / "O", 0)
    stale("open", INDEX_NAME)
    with pytest.raises(ReadWriteError, match="cannot be read: Stale file handle"):
        find_state(tmp_path / "O", need_plan(tmp_path / "O"), if_away=lambda _: None)


@pytest.mark.parametrize("number", range(1, 9))
def test_submit_that_cannot_look_at_its_folders_says_so(
    planned_dir: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whichever look it is that fails."""
    real, left = os.stat, [number]

    def failing(path: Any, *args: Any, **kwargs: Any) -> Any:
        if path == planned_dir or str(path).startswith(f"{planned_dir}/jobs"):
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", failing)
    ended = []
    with contextlib.suppress(CannotWrite):
        ended.append(check_folder(planned_dir, JobRequest()))
    assert ended or left[0] <= 0


@pytest.mark.parametrize(
    "look",
    [
        lambda folder: list(output_findings(folder, None, 0)),
        lambda folder: _refuse_existing(folder),
    ],
    ids=["doctor, output", "train_tokenizer"],
)
def test_doctor_and_train_tokenizer_name_the_folder_that_they_cannot_look_at(
    tmp_path: Path, stale: Callable[..., None], look: Callable[[Path], object]
) -> None:
    (tmp_path / "folder").mkdir()
    for call in ("stat", "listdir"):
        stale(call, "folder")
    with pytest.raises(ReadWriteError, match="folder cannot be read: Stale file handle"):
        look(tmp_path / "folder")


def test_planning_takes_the_sizes_of_its_sample_from_the_manifest(
    prep: Prep, sample_dir: Path, tmp_path: Path, stale: Callable[..., None]
) -> None:
    stale("stat", "shard-00000.tar")
    assert prep.plan(sample_dir, tmp_path / "data", num_shards=1).num_shards == 1


def test_planning_names_the_tokenizer_file_that_tokenizers_cannot_open(tmp_path: Path) -> None:
    with pytest.raises(ReadWriteError, match="cannot be loaded"):
        tokenizers_engine(tmp_path / "tokenizer.json", allow_special_tokens=False)


@pytest.mark.processes
def test_a_model_folder_that_cannot_be_looked_at_is_named(tmp_path: Path, stale: Callable[..., None]) -> None:
    (tmp_path / "model").mkdir()
    stale("stat", "model")
    with pytest.raises(NotFound, match="no usable tokenizer was found"):
        resolve_tokenizer(str(tmp_path / "model"), tmp_path, allow_special_tokens=False)


@pytest.fixture(params=["tokenizer.json", "added_tokens.json", "additional_chat_templates/rag.jinja"])
def held_model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder with a FIFO where transformers would read; it is not called, as it would wait."""
    import transformers

    path = tmp_path / request.param
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", pytest.fail)
    return tmp_path


def test_a_fifo_in_a_models_folder_does_not_hold_the_loader(held_model: Path) -> None:
    with pytest.raises(BrokenShard, match="is a FIFO, expected a regular file"):
        loader_tokenizer._load(str(held_model))


def test_a_fifo_in_a_models_folder_does_not_hold_planning(held_model: Path, tmp_path: Path) -> None:
    with pytest.raises(BrokenShard, match="is a FIFO, expected a regular file"):
        resolve_tokenizer(str(held_model), tmp_path, allow_special_tokens=False)


def test_a_device_in_a_models_folder_is_named_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").symlink_to("/dev/zero")
    with pytest.raises(BrokenShard, match=r"chat_template\.jinja is a character device"):
        resolve_tokenizer(str(tmp_path), tmp_path, allow_special_tokens=False)
