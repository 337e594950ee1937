"""What other loaders were seen to do wrong, done by them and by this one."""

from __future__ import annotations

import errno
import fcntl
import gc
import multiprocessing
import os
import re
import sys
import tempfile
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import webdataset
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from loader import CausalLMCollator, TokenLoader, get_llama3_dataloader
from shardprep.errors import BrokenShard, UsageError
from tests.checkout import ROOT
from tests.children import child, is_living, run_child
from tests.external_tars import write_numbered_tars
from tests.waiting import wait_until, wait_until_gone
from tests.word_tokenizers import save_word_tokenizer

if TYPE_CHECKING:
    from tests.conftest import Prep

VOCAB_SIZE = 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return save_word_tokenizer(folder, VOCAB_SIZE)


def write_long_documents(path: Path, num_documents: int, num_tokens: int) -> int:
    """Documents of random ids as .npy; the bytes of all ids."""
    rng = np.random.default_rng(0)
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(num_documents):
            ids = rng.integers(0, 900, num_tokens, np.int32)
            writer.write({"__key__": f"d{number}", "token_ids.npy": ids})
    return 4 * num_documents * num_tokens


def load(shards: Any, batch_size: int, model: str, **options: Any) -> TokenLoader:
    return get_llama3_dataloader(shards, batch_size, model, **{"num_workers": 0, **options})


def numbers(batches: Any) -> list[int]:
    """The samples of some batches of ``write_tars``, in order."""
    return [int(ids[0]) for batch in batches for ids in batch["input_ids"]]


def theirs(samples: Any) -> list[int]:
    """The samples of ``write_tars`` that a webdataset pipeline gives."""
    return [int(sample["__key__"][1:]) for sample in samples]


def set_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


class NumberedSamples(IterableDataset[Any]):
    """Samples 0 to n - 1 shared out among workers, as most data sets do it."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker
        return iter(range(worker.id, self.num_samples, worker.num_workers))


def test_within_20_epochs_a_rank_sees_every_shard(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """webdataset splits shards among ranks before it shuffles them, so a rank has always the same ones."""
    paths = write_numbered_tars(tmp_path, 160, 40)
    set_rank(monkeypatch, 0, 4)
    split = webdataset.WebDataset(paths, shardshuffle=40, nodesplitter=webdataset.split_by_node)
    assert len({number // 4 for _ in range(20) for number in theirs(split)}) == 10
    with load(tmp_path, 4, model) as loader:
        epochs = [numbers(loader) for _ in range(20)]
    assert {number // 4 for epoch in epochs for number in epoch} == set(range(40))
    assert len({tuple(epoch) for epoch in epochs}) == 20


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_know_the_epoch_that_they_count_and_the_one_that_is_set(
    tmp_path: Path, model: str, persistent: bool
) -> None:
    write_numbered_tars(tmp_path, 64, 3)
    with load(tmp_path, 8, model, num_workers=2, persistent_workers=persistent) as loader:
        counted = [numbers(loader) for _ in range(3)]
        assert len({tuple(epoch) for epoch in counted}) == 3
        for number in (0, 2, 0):
            loader.set_epoch(number)
            assert numbers(loader) == counted[number]


@pytest.mark.processes
def test_what_makes_a_loader_of_its_own_from_the_dataset_is_refused(tmp_path: Path, model: str) -> None:
    """As accelerate's prepare and skip_first_batches do, which would take chunks of batches for samples."""
    write_numbered_tars(tmp_path, 64, 3)
    with load(tmp_path, 4, model) as loader:
        another = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate_fn=loader.collate_fn,
            num_workers=1,
        )
        batches: Any = iter(another)
        with pytest.raises(UsageError, match="iterate the TokenLoader itself"):
            next(batches)
        batches._shutdown_workers()
        assert len(numbers(loader)) == 64


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_a_tuple_that_collate_fn_returns_stays_a_tuple(tmp_path: Path, model: str, workers: int) -> None:
    pairs: Any = [(1, 2)]
    naive: DataLoader[Any] = DataLoader(pairs, batch_size=None)
    assert next(iter(naive)) == [1, 2]
    write_numbered_tars(tmp_path, 64, 3)
    options: dict[str, Any] = {"collate_fn": lambda rows: tuple(row["input_ids"] for row in rows)}
    with load(tmp_path, 4, model, num_workers=workers, **options) as loader:
        batches: list[Any] = list(loader)
    assert {(type(batch), len(batch)) for batch in batches} == {(tuple, 4)}


@pytest.mark.processes
def test_a_rank_with_workers_reads_little_more_than_it_delivers(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each worker takes every n-th batch instead of slots of its own, all read everything."""
    num_bytes = write_long_documents(tmp_path / "a.tar", 256, 8192)
    real, read_bytes = os.preadv, multiprocessing.Value("q", 0)

    def counting(*args: Any) -> int:
        count = real(*args)
        with read_bytes.get_lock():
            read_bytes.value += count
        return count

    monkeypatch.setattr(os, "preadv", counting)
    for rank in range(4):
        options = {"rank": rank, "world_size": 4, "num_workers": 2, "persistent_workers": False}
        with load(tmp_path, 4, model, **options) as loader:
            read_bytes.value = 0  # the headers were read: this tar has no manifest
            delivered = sum(4 * batch["input_ids"].numel() for batch in loader)
        assert delivered == num_bytes // 4
        assert delivered <= read_bytes.value <= 1.1 * delivered


@pytest.mark.processes
def test_no_file_is_locked_while_shards_are_made_and_read(
    prep: Prep, sample_dir: Path, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flock hangs, fails or holds on one node only, as a parallel file system is mounted."""

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    def without_locks(fd: int, command: int, *args: Any) -> Any:
        return refuse() if command in {fcntl.F_SETLK, fcntl.F_SETLKW} else real(fd, command, *args)

    real = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", without_locks)
    for module, name in ((fcntl, "flock"), (fcntl, "lockf"), (os, "lockf")):
        monkeypatch.setattr(module, name, refuse)
    with pytest.raises(OSError, match="no locks"):
        fcntl.flock(0, fcntl.LOCK_EX)
    prep.plan(sample_dir, tmp_path / "data", num_shards=2)
    prep.make(tmp_path / "data")
    with get_llama3_dataloader(tmp_path / "data", 8, num_workers=2) as loader:
        assert len(list(loader)) == len(loader)


def alive() -> set[Any]:
    return set(multiprocessing.active_children())


@pytest.mark.processes
def test_an_iterator_in_a_reference_cycle_keeps_no_worker_alive_once_the_loader_is_closed(
    tmp_path: Path, model: str
) -> None:
    write_numbered_tars(tmp_path, 64, 3)
    gc.collect()
    before = alive()
    gc.disable()
    try:
        naive: list[Any] = [iter(DataLoader(NumberedSamples(50), num_workers=2))]
        naive.append(naive)
        kept: Any = weakref.ref(naive[0])
        del naive
        assert len(alive() - before) == 2  # until the collector comes by
        kept()._shutdown_workers()
        wait_until_gone(before)
        loader = load(tmp_path, 8, model, num_workers=2)
        cycle: list[Any] = [iter(loader), loader]
        cycle.append(cycle)
        next(cycle[0])
        assert len(alive() - before) == 2
        loader.close()
        wait_until_gone(before)
        del cycle, loader
        dropped = load(tmp_path, 8, model, num_workers=2)
        next(iter(dropped))
        assert len(alive() - before) == 2
        del dropped  # without a cycle it needs neither close() nor the collector
        wait_until_gone(before)
    finally:
        gc.enable()
        gc.collect()


@pytest.mark.processes
def test_after_an_error_in_a_worker_none_is_left_and_the_loader_can_be_iterated_again(
    tmp_path: Path, model: str
) -> None:
    paths = write_numbered_tars(tmp_path, 64, 3)
    before = alive()
    with load(tmp_path, 8, model, num_workers=2) as loader:
        whole = Path(paths[1]).read_bytes()
        Path(paths[1]).write_bytes(whole[:-512])
        with pytest.raises(BrokenShard, match=r"part-001\.tar"):
            list(loader)
        wait_until_gone(before)
        Path(paths[1]).write_bytes(whole)
        assert sorted(numbers(loader)) == list(range(64))
    assert not alive() - before


INTERRUPTED = """
import multiprocessing, os, signal, sys, time
from loader import get_llama3_dataloader
from loader.token_loader import BatchStream

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

def interrupt():  # as a terminal does
    os.killpg(0, signal.SIGINT)
    time.sleep(60)

fetch = BatchStream._next_chunks
loader = get_llama3_dataloader(sys.argv[1], 8, model_id=sys.argv[2], num_workers=2)
seen = []
for where in ("loop", "loader", "idle"):
    if where == "loader":
        BatchStream._next_chunks = lambda self: (fetch(self), interrupt())
    try:
        for number, batch in enumerate(loader):
            seen += map(int, batch["input_ids"][:, 0])
            if where == "loop" and number == 2:
                interrupt()
    except KeyboardInterrupt:
        print("interrupted", where, flush=True)
    if where == "idle":
        seen = []  # all of an epoch came
        for worker in multiprocessing.active_children():
            try:
                worker.kill()
                worker.join()
            except RuntimeError:  # of torch's handler, where it hears of the death before join does
                worker.join()
    BatchStream._next_chunks = fetch
    time.sleep(1)  # workers that end of it have ended
    if where != "loader":
        seen += [int(ids[0]) for batch in loader for ids in batch["input_ids"]]
        assert sorted(seen) == list(range(640)), len(seen)
        seen = []
print("all came", flush=True)
"""


@pytest.mark.processes
def test_after_ctrl_c_or_the_death_of_idle_workers_the_next_loop_has_workers_anew(
    tmp_path: Path, model: str
) -> None:
    write_numbered_tars(tmp_path, 640, 3)
    done = run_child([sys.executable, "-c", INTERRUPTED, tmp_path, model])
    assert done.stdout.splitlines() == ["interrupted loop", "interrupted loader", "all came"]


class MarkedBatches(CausalLMCollator):
    def torch_call(self, examples: list[Any]) -> Any:
        return {**super().torch_call(examples), "marked": len(examples)}


def test_a_collator_that_inherits_from_ours_is_called(tmp_path: Path, model: str) -> None:
    write_numbered_tars(tmp_path, 64, 3)
    with load(tmp_path, 4, model) as plain:
        expected = list(plain)
        collator = MarkedBatches(plain.tokenizer)
    with load(tmp_path, 4, model, collate_fn=collator) as loader:
        found = list(loader)
    assert [batch["marked"] for batch in found] == [4] * 16
    assert numbers(found) == numbers(expected)


def test_the_loaders_tokenizer_names_the_pad_token_that_batches_have(tmp_path: Path) -> None:
    vocab = {**{f"w{number}": number for number in range(99)}, "<|finetune_right_pad_id|>": 99}
    own = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, "w0")), eos_token="w98")
    own.add_special_tokens({"additional_special_tokens": ["<|finetune_right_pad_id|>"]})
    own.save_pretrained(tmp_path / "model")
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(2):
            writer.write({"__key__": f"s{number}", "token_ids.json": [1] * (1 + number)})
    with load(tmp_path / "a.tar", 2, str(tmp_path / "model"), shuffle=False) as loader:
        assert loader.tokenizer.pad_token == "<|finetune_right_pad_id|>"
        assert loader.tokenizer.pad_token_id == 99
        assert next(iter(loader))["input_ids"].tolist() == [[1, 99], [1, 1]]
        assert len(loader.tokenizer) == len(own)


def test_a_loader_given_as_a_data_set_says_what_to_write(tmp_path: Path, model: str) -> None:
    write_numbered_tars(tmp_path, 64, 3)
    with load(tmp_path, 4, model) as loader:
        data_set: Any = loader
        batches = iter(DataLoader(data_set, batch_size=4, sampler=range(8)))
        with pytest.raises(UsageError, match="LoaderMixin"):
            next(batches)
        with pytest.raises(UsageError, match="LoaderMixin"):
            data_set.dataset[0]


def test_a_loader_remade_with_a_sampler_as_lightning_does_it_says_what_to_write(
    tmp_path: Path, model: str
) -> None:
    """For overfit_batches and predict, from the loader's public attributes."""
    write_numbered_tars(tmp_path, 64, 3)
    with load(tmp_path, 4, model) as loader:
        names = ("run", "step_batches", "loader_tokenizer", "process_rank", "pin_memory")
        shown = {name: vars(loader)[name] for name in names}
        assert type(loader)(**shown).run == loader.run
        with pytest.raises(UsageError, match=r"takes no sampler, .* predict dataloaders=\(batch for batch"):
            type(loader)(**shown, sampler=None)


@pytest.mark.slow
def test_ten_epochs_keep_no_more_objects_than_two(tmp_path: Path, model: str) -> None:
    """Tensors, and what Python and numpy allocated. benchmarks/loader_footprint.py measures processes."""
    write_long_documents(tmp_path / "a.tar", 64, 32768)
    used = {}
    tracemalloc.start()
    try:
        with load(tmp_path, 8, model) as loader:
            for epoch in range(1, 11):
                for batch in loader:
                    assert sum(tensor.nbytes for tensor in batch.values()) == 6 << 20
                if epoch in {2, 10}:
                    gc.collect()
                    num_tensors = sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())
                    used[epoch] = (num_tensors, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert used[10][0] <= used[2][0]
    assert used[10][1] - used[2][1] < 64 << 10, "less than one document of each epoch"


def children_of(process: int) -> list[int]:
    stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
    return [int(stat.split()[0]) for stat in stats if int(stat.rpartition(")")[2].split()[1]) == process]


TRAIN = """
import sys, time
from loader import get_llama3_dataloader
batches = iter(get_llama3_dataloader(sys.argv[1], 8, model_id=sys.argv[2], num_workers=2))
next(batches)
print("started", flush=True)
time.sleep(600)
"""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for temporary files with a path short enough for sockets in it; pytest's may be too long."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.processes
def test_a_killed_run_leaves_no_worker_no_shared_memory_and_no_file_and_the_next_one_starts(
    tmp_path: Path, short_folder: Path, model: str
) -> None:
    write_long_documents(tmp_path / "a.tar", 64, 32768)
    environ = {**os.environ, "TMPDIR": str(short_folder)}
    with child([sys.executable, "-c", TRAIN, tmp_path, model], env=environ, start_new_session=False) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "started\n"
        workers = children_of(run.pid)
        assert len(workers) == 2
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in (run.pid, *workers))
        shared = set(re.findall(r"/dev/shm/\S+", maps))
        assert any(name.startswith("/dev/shm/torch_") for name in shared)
        run.kill()
    wait_until(lambda: not any(map(is_living, workers)))  # torch's workers look every 5 s for their parent
    assert not {name for name in shared if Path(name).exists()}
    assert not list(short_folder.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]
    with load(tmp_path, 8, model, num_workers=2) as loader:
        assert len(list(loader)) == 8


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_script_that_ends_while_its_workers_live_leaves_no_file(
    tmp_path: Path, short_folder: Path, model: str, method: str
) -> None:
    write_long_documents(tmp_path / "a.tar", 64, 32768)
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import multiprocessing
from loader import get_llama3_dataloader
if __name__ == "__main__":
    multiprocessing.set_start_method({method!r})
    loader = get_llama3_dataloader({str(tmp_path / "a.tar")!r}, 8, model_id={model!r}, num_workers=2)
    batches = iter(loader)
    next(batches)
    raise SystemExit(3)
""",
        encoding="utf-8",
    )
    environ = {**os.environ, "TMPDIR": str(short_folder), "PYTHONPATH": str(ROOT)}
    run_child([sys.executable, str(script)], env=environ, code=3)
    wait_until(lambda: not list(short_folder.iterdir()))


@pytest.mark.processes
@pytest.mark.parametrize("length", [75, 76])
def test_a_temporary_folder_too_long_for_a_workers_socket_is_refused_where_torch_would_hang(
    tmp_path: Path, short_folder: Path, model: str, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    write_numbered_tars(tmp_path, 64, 2)
    folder = short_folder / ("x" * (length - 1 - len(str(short_folder))))
    folder.mkdir()
    listen = "from multiprocessing.connection import Listener; Listener(family='AF_UNIX')"
    environ = {**os.environ, "TMPDIR": str(folder)}
    done = run_child([sys.executable, "-c", listen], env=environ, code=0 if length == 75 else 1)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    if length == 75:
        assert sorted(numbers(load(tmp_path, 8, model, num_workers=2))) == list(range(64))
    else:
        assert "AF_UNIX path too long" in done.stderr
        with pytest.raises(UsageError, match=r"path of 76 bytes, .* one of 75 at most; set TMPDIR"):
            load(tmp_path, 8, model, num_workers=2)
        assert sorted(numbers(load(tmp_path, 8, model))) == list(range(64))


def test_webdataset_reads_our_shards_as_the_documentation_says(
    prep: Prep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though names of inputs have dots, of which webdataset takes the first for the end of a key."""
    raw = tmp_path / "raw"
    raw.mkdir()
    lines = {name: [f"{name} {number}" for number in range(20)] for name in ("part-0.8_1", "part-0.8_2")}
    for name, texts in lines.items():
        (raw / f"{name}.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    prep.plan(raw, tmp_path / "DATA", num_shards=2)
    prep.make(tmp_path / "DATA")
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "webdataset" in block
    )
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(code.replace("00099", "00001"), scope)
    found = list(scope["samples"])
    assert [sample["text.txt"] for sample in found] == [text for texts in lines.values() for text in texts]
    with load(tmp_path / "DATA", 1, str(prep.model_dir), shuffle=False) as loader:
        assert [sample["token_ids.json"] for sample in found] == [
            batch["input_ids"][0].tolist() for batch in loader
        ]


def test_what_scripts_for_webdataset_were_seen_to_say_does_not_work(tmp_path: Path, model: str) -> None:
    """Why the baseline's pipeline is not the one in the documentation."""
    paths = write_numbered_tars(tmp_path, 8, 1)
    with pytest.raises(TypeError, match="shardselection"):
        webdataset.WebDataset(paths, shardselection="all")
    with pytest.raises(ValueError, match="imagespec"):
        list(webdataset.WebDataset(paths, shardshuffle=False).decode("json"))
    mapped = webdataset.WebDataset(paths, shardshuffle=False).decode()
    samples = list(mapped.map(lambda sample: {"input_ids": sample["token_ids.json"]}))
    assert "__key__" in samples[0]
    with load(tmp_path, 8, model) as loader:
        original = DataCollatorForLanguageModeling(loader.tokenizer, mlm=False)
        with pytest.raises(ValueError, match="Unable to create tensor"):
            original(samples)
        with load(tmp_path, 8, model, collate_fn=original) as other:
            assert numbers(other) == numbers(loader)
