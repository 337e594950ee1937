"""Data sets that ``python -m preprocess`` made, through the loader."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, DataCollatorForLanguageModeling
from webdataset.utils import pytorch_worker_info

from loader import TokenLoader, get_llama3_dataloader
from loader.__main__ import main as show
from loader.batches import Batch
from loader.chunks import Chunk, Parts, step_edges
from preprocess.__main__ import main as preprocess
from shardprep.errors import BrokenShard, MissingShard, NotFound, OtherTokenizer, UsageError
from tests.children import run_child
from tests.conftest import seal
from tests.ticks import samples_of_tick
from tests.waiting import wait_until_gone

NUM_SHARDS, NUM_LINES, SEQ_LEN = 4, 203, 16
WORDS = ("하늘", "바다", "나무", "sun", "moon", "river", "stone", "길", "the", "of")


def lines(num_lines: int) -> list[str]:
    """Lines of 1 to 12 words, no two alike."""
    return [
        " ".join([str(number), *(WORDS[(number * 7 + k * k) % 10] for k in range(number * 5 % 12))])
        for number in range(num_lines)
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One text, two tokenizers, and data sets of it: json, npy, packed, and json by the other tokenizer."""
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    }
    root = tmp_path_factory.mktemp("made")
    (root / "raw").mkdir()
    (root / "raw" / "a.txt").write_text("\n".join(lines(NUM_LINES)[:90]) + "\n", encoding="utf-8")
    (root / "raw" / "b.txt").write_text("\n".join(lines(NUM_LINES)[90:]) + "\n", encoding="utf-8")
    for name, size in (("model", "300"), ("other", "280")):
        arguments = ["--input_dir", str(root / "raw"), "--vocab_size", size, "--output_dir", str(root / name)]
        assert preprocess(["train_tokenizer", *arguments]) == 0
    forms = {
        "json": ("model", []),
        "npy": ("model", ["--token_format", "npy", "--no-keep_text"]),
        "packed": ("model", ["--record", "packed", "--seq_len", str(SEQ_LEN)]),
        "elsewhere": ("other", []),
    }
    for name, (model, options) in forms.items():
        folders = ["--input_dir", str(root / "raw"), "--output_dir", str(root / name)]
        model_id = ["--model_id", str(root / model)]
        assert preprocess(["plan", *folders, *model_id, "--num_shards", str(NUM_SHARDS), *options]) == 0
        assert preprocess(["run", str(root / name), "--num_proc", "1"]) == 0
    for number, handler in handlers.items():
        signal.signal(number, handler)
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    encoded = [tuple(tokenizer.encode(line)) for line in lines(NUM_LINES)]
    assert len(set(encoded)) == NUM_LINES
    return SimpleNamespace(root=root, model=str(root / "model"), tokenizer=tokenizer, encoded=encoded)


@pytest.fixture
def copied(made: SimpleNamespace, tmp_path: Path) -> Path:
    """A copy of the json data set, to break."""
    return shutil.copytree(made.root / "json", tmp_path / "copy")


def load(shards: Any, batch_size: int = 8, **options: Any) -> TokenLoader:
    return get_llama3_dataloader(shards, batch_size, **{"num_workers": 0, **options})


def samples(batch: Any) -> list[tuple[int, ...]]:
    """The unpadded ids of a batch's samples."""
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [tuple(ids[: int(mask.sum())].tolist()) for ids, mask in pairs]


def epoch(loader: TokenLoader) -> list[list[tuple[int, ...]]]:
    found = [samples(batch) for batch in loader]
    assert len(found) == len(loader)
    return found


def flat(found: list[list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    return [ids for batch in found for ids in batch]


@pytest.mark.processes
@pytest.mark.parametrize("form", ["json", "npy"])
def test_an_epoch_of_documents_is_what_the_tokenizer_gives_for_the_lines(made: Any, form: str) -> None:
    with load(made.root / form, 7) as loader:  # 203 = 7 * 29: none is left out
        assert isinstance(loader, torch.utils.data.DataLoader)
        assert len(loader) == 29
        assert sorted(flat(epoch(loader))) == sorted(made.encoded)


@pytest.mark.processes
@pytest.mark.parametrize("options", [{}, {"num_workers": 3}, {"shuffle": False}], ids=str)
def test_batches_hold_the_samples_that_the_law_of_the_order_says(made: Any, options: Any) -> None:
    with load(made.root / "json", 8, **options) as loader:
        for number in range(2):
            order = loader.run.sources[0].order
            law = [samples_of_tick(order, number, tick) for tick in range(len(loader))]
            assert epoch(loader) == [[made.encoded[sample] for sample in step] for step in law]


@pytest.mark.processes
def test_the_call_of_the_readme_works_as_written(made: Any) -> None:
    loader = get_llama3_dataloader(
        input_shards=f"{made.root}/json/shard-{{00000..00003}}.tar", batch_size=8, model_id=made.model
    )
    with loader:
        assert len(set(flat(epoch(loader)))) == 200


@pytest.mark.processes
def test_packed_rows_have_one_width_and_their_padding_no_label(made: Any) -> None:
    eos = made.tokenizer.eos_token_id
    with load(made.root / "packed", 1) as loader:
        rows = list(loader)
    assert {tuple(batch["input_ids"].shape) for batch in rows} == {(1, SEQ_LEN)}
    found = Counter(int(n) for batch in rows for n in batch["input_ids"][batch["attention_mask"] == 1])
    assert found == Counter(n for ids in made.encoded for n in (*ids, eos))
    short = [batch for batch in rows if batch["attention_mask"].min() == 0]
    assert 0 < len(short) <= NUM_SHARDS
    for batch in rows:
        expected = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
        assert torch.equal(batch["labels"], expected)
    assert sum(int((batch["labels"] == eos).sum()) for batch in rows) == NUM_LINES


def test_rows_of_a_packed_batch_are_cut_at_the_sums_of_the_documents(made: Any) -> None:
    with load(made.root / "packed", 1, shuffle=False) as loader:
        rows = flat(epoch(loader))
    stream = [number for row in rows for number in row]
    eos = made.tokenizer.eos_token_id
    assert stream == [number for ids in made.encoded for number in (*ids, eos)]
    assert {len(row) for row in rows[:5]} == {SEQ_LEN}


def test_folder_index_pattern_glob_and_list_give_the_same_batches(made: Any, copied: Path) -> None:
    tars = sorted(copied.glob("*.tar"))
    named = [copied, f"{copied}/shard-{{00000..00003}}.tar", f"{copied}/*.tar", tars, [str(t) for t in tars]]
    orders = [epoch(load(shards)) for shards in named]
    assert preprocess(["verify", str(copied)]) == 0
    for path in copied.glob("shard-*.json"):
        path.unlink()  # index.json alone must do
    orders += [epoch(load(shards)) for shards in [*named, copied / "index.json"]]
    assert len(orders) == 11
    assert all(order == orders[0] for order in orders)


def test_a_pattern_may_name_some_shards_of_a_data_set(made: Any, copied: Path) -> None:
    whole = flat(epoch(load(copied, 1, shuffle=False)))
    one = flat(epoch(load(copied / "shard-00001.tar", 1, shuffle=False)))
    rest = flat(epoch(load([copied / f"shard-0000{n}.tar" for n in (0, 2, 3)], 1, shuffle=False)))
    assert len(one) > 10
    assert sorted(one + rest) == sorted(whole)
    (copied / "shard-00003.json").unlink()
    assert flat(epoch(load(f"{copied}/shard-0000{{1..1}}.tar", 1, shuffle=False))) == one


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(name: str, num_bytes: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - num_bytes)


TAR_SIZE = r"shard-00001\.tar has \d+ of \d+ bytes; run: "
NO_TAR = r"shard-00003\.tar is missing; run: shardprep --shard_id 3"
NO_MANIFEST = r"3 of 4 shards; missing: 2; run: shardprep "
BROKEN: dict[str, tuple[Any, str, type[Exception], str]] = {
    "no manifest": (removed("shard-00002.json"), "", MissingShard, NO_MANIFEST),
    "no manifest, a pattern": (
        removed("shard-00002.json"), "shard-*.tar", MissingShard, "shard 00002 is not done"
    ),
    "no such shard": (
        lambda _: None, "shard-{00000..00009}.tar", NotFound, r"shard-00004\.tar does not exist"
    ),
    **{f"a tar without {n} bytes": (cut("shard-00001.tar", n), "", BrokenShard, TAR_SIZE) for n in (1, 1024)},
    "no tar": (removed("shard-00003.tar"), "", MissingShard, NO_TAR),
    "a short idx": (cut("shard-00000.idx", 28), "", BrokenShard, r"shard-00000\.idx has \d+ of \d+ samples"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "shards", "error", "said"), BROKEN.values(), ids=BROKEN)
def test_what_is_missing_or_cut_is_refused_by_its_name(
    copied: Path, change: Callable[[Path], None], shards: str, error: type[Exception], said: str
) -> None:
    """By rank 1: rank 0 is refused at once, see test_size_check.py."""
    change(copied)
    with pytest.raises(error, match=said), load(copied / shards, rank=1, world_size=2) as loader:
        epoch(loader)


@pytest.mark.parametrize(("form", "field"), [("packed", 8), ("npy", 8), ("json", 0), ("json", 7)])
def test_a_damaged_idx_is_refused_instead_of_giving_wrong_ids(
    made: Any, tmp_path: Path, form: str, field: int
) -> None:
    """Byte 8 of a record is in its size, byte 0 and 7 are the ends of its offset."""
    folder = shutil.copytree(made.root / form, tmp_path / "copy")
    path = folder / "shard-00002.idx"
    raw = bytearray(path.read_bytes())
    raw[64 + field] ^= 0x7F
    path.write_bytes(raw)
    with pytest.raises(BrokenShard, match=r"shard-00002\.idx is damaged: the crc32"):
        epoch(load(folder, 1))


def test_the_data_sets_own_tokenizer_wins_and_an_equal_model_id_passes(made: Any, tmp_path: Path) -> None:
    elsewhere = shutil.copytree(made.model, tmp_path / "same")
    for model_id in (None, made.model, str(elsewhere), elsewhere):
        loader = load(made.root / "json", model_id=model_id)
        assert Path(loader.tokenizer.name_or_path) == made.root / "json" / "tokenizer"


def test_the_name_that_the_data_set_was_made_with_is_never_resolved(copied: Path, made: Any) -> None:
    for path in copied.glob("shard-*.json"):
        path.write_text(path.read_text().replace(made.model, "meta-llama/not-downloaded"))
        seal(path)
    assert len(load(copied, model_id="meta-llama/not-downloaded")) == 25


def test_a_model_id_with_another_tokenizer_is_refused_naming_both(made: Any) -> None:
    other = str(made.root / "other")
    with pytest.raises(OtherTokenizer, match=f"{re.escape(other)}.*{re.escape(made.model)}"):
        load(made.root / "json", model_id=other)


def test_data_sets_of_different_tokenizers_are_not_mixed_but_those_of_one_are(made: Any) -> None:
    with pytest.raises(OtherTokenizer, match="cannot be mixed"):
        load([made.root / "json", made.root / "elsewhere"])
    both = flat(epoch(load([made.root / "json", made.root / "npy"], 1)))
    assert Counter(both) == Counter(made.encoded * 2)


def test_a_data_set_without_its_tokenizer_folder_needs_the_model_id(copied: Path, made: Any) -> None:
    shutil.rmtree(copied / "tokenizer")
    with pytest.raises(NotFound, match=r"tokenizer is missing; .* pass model_id="):
        load(copied)
    assert len(load(copied, model_id=made.model)) == 25


def test_a_folder_named_with_its_own_shards_is_refused(copied: Path) -> None:
    with pytest.raises(UsageError, match="name it once"):
        load([copied, copied / "shard-00000.tar"])


def test_too_few_samples_for_the_ranks_say_how_many_there_are_and_are_needed(made: Any) -> None:
    with pytest.raises(
        UsageError, match="has 203 samples, but one batch for every rank takes 256; lower batch"
    ):
        load(made.root / "json", 64, rank=0, world_size=4)
    assert len(load(made.root / "json", 50, rank=3, world_size=4)) == 1


@pytest.mark.processes
def test_a_smaller_batch_with_the_same_global_batch_cuts_it_without_changing_it(made: Any) -> None:
    whole = epoch(load(made.root / "json", 8))
    with load(made.root / "json", 2, global_batch_size=8, num_workers=2) as loader:
        micro = epoch(loader)
    assert len(micro) == 4 * len(whole)
    assert [list(chain(*micro[k : k + 4])) for k in range(0, len(micro), 4)] == whole
    with pytest.raises(
        UsageError,
        match=r"no multiple of batch_size 3 x 1 ranks; with these ranks batch_size can be \[1, 2, 4, 8\]",
    ):
        load(made.root / "json", 3, global_batch_size=8)


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_started_in_any_way_give_the_same_epochs_and_end_with_the_loader(
    made: Any, method: str, request: pytest.FixtureRequest
) -> None:
    """The rank is resolved in the parent: spawned workers know nothing of it."""
    who = {"rank": 1, "world_size": 2}
    with load(made.root / "json", 4, **who) as loader:
        expected = [epoch(loader) for _ in range(3)]
    assert len({str(each) for each in expected}) == 3
    before = set(multiprocessing.active_children())
    default = multiprocessing.get_start_method()
    request.addfinalizer(lambda: multiprocessing.set_start_method(default, force=True))
    multiprocessing.set_start_method(method, force=True)
    with load(made.root / "json", 4, **who, num_workers=2) as loader:
        first = epoch(loader)
        workers = set(multiprocessing.active_children()) - before
        again = [epoch(loader), epoch(loader)]
        assert set(multiprocessing.active_children()) - before == workers
        assert len(workers) == 2
    assert [first, *again] == expected
    wait_until_gone(before)


@pytest.mark.processes
@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": False}], ids=str
)
def test_after_a_break_the_next_iteration_is_the_next_epoch_from_its_beginning(
    made: Any, options: Any
) -> None:
    with load(made.root / "json") as loader:
        expected = [epoch(loader) for _ in range(4)]
    before = set(multiprocessing.active_children())
    with load(made.root / "json", **options) as loader:
        for number, batch in enumerate(loader):
            assert samples(batch) == expected[0][number]
            if number == 4:
                break
        assert epoch(loader) == expected[1]
        old = iter(loader)
        assert samples(next(old)) == expected[2][0]
        assert epoch(loader) == expected[3]
        current = iter(loader)
        next(current)
        with pytest.raises(UsageError, match="use the newest one"):
            next(old)
        assert len(list(current)) == len(loader) - 1  # unharmed by the older one's end
        loader.set_epoch(1)
        assert epoch(loader) == expected[1]
        assert epoch(loader) == expected[2]
        loader.set_epoch(2)  # the same one again
        assert epoch(loader) == expected[2]
        loader.close()
        wait_until_gone(before)
        loader.set_epoch(3)
        assert epoch(loader) == expected[3]  # after close() it starts anew
    wait_until_gone(before)


def num_handles() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.processes
def test_ten_epochs_open_no_more_files_than_one(made: Any) -> None:
    with load(made.root / "json", num_workers=2) as loader:
        epoch(loader)
        handles = num_handles()
        for _ in range(9):
            next(iter(loader))
            epoch(loader)
        assert num_handles() <= handles + 2
    handles = num_handles()
    for _ in range(5):
        next(iter(load(made.root / "json")))
    assert num_handles() <= handles


@pytest.mark.processes
def test_slurm_variables_alone_share_the_data_out(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)
    found = []
    for rank in range(2):
        for name, value in (("JOB_ID", 7), ("STEP_ID", 0), ("NTASKS", 2), ("PROCID", rank)):
            monkeypatch.setenv(f"SLURM_{name}", str(value))
        assert pytorch_worker_info()[:2] == (0, 1)  # webdataset would give everything to every rank
        with load(made.root / "json", 4, num_workers=2) as loader:
            assert (loader.process_rank.rank, loader.process_rank.world_size) == (rank, 2)
            found.append(flat(epoch(loader)))
    assert len(found[0]) == len(found[1]) == 100
    assert len(set(found[0] + found[1])) == 200


def test_the_ranks_together_read_little_more_than_the_shards_hold(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, read_bytes = os.preadv, []

    def counting(*args: Any) -> int:
        read_bytes.append(real(*args))
        return read_bytes[-1]

    monkeypatch.setattr(os, "preadv", counting)
    for rank in range(4):
        epoch(load(made.root / "json", 2, rank=rank, world_size=4))
    tar_bytes = sum(path.stat().st_size for path in (made.root / "json").glob("*.tar"))
    assert 0 < sum(read_bytes) < 1.1 * tar_bytes


def test_documents_are_cut_at_max_length_and_packed_rows_never(made: Any) -> None:
    found = flat(epoch(load(made.root / "json", 7, max_length=5)))
    assert sorted(found) == sorted(ids[:5] for ids in made.encoded)
    with pytest.raises(UsageError, match=r"packed rows of 16 tokens: .*prepare them with another --seq_len"):
        load(made.root / "packed", max_length=5)
    with pytest.raises(UsageError, match="max_length is 0"):
        load(made.root / "json", max_length=0)


def test_transformers_own_collator_gets_what_a_tokenized_data_set_gives_it(made: Any) -> None:
    original = DataCollatorForLanguageModeling(made.tokenizer, mlm=False)
    for form in ("json", "packed"):
        with load(made.root / form, 8) as ours, load(made.root / form, 8, collate_fn=original) as theirs:
            found, expected = list(ours), list(theirs)
        assert len(found) == len(expected) > 10
        short = made.tokenizer.pad_token_id
        for one, other in zip(found, expected, strict=True):
            width = other["input_ids"].shape[1]  # the last row of a shard may make theirs narrower
            assert all(torch.equal(one[name][:, :width], other[name]) for name in other)
            assert bool((one["input_ids"][:, width:] == short).all())


def test_pinned_batches_are_the_batches_in_pinned_memory(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing can be pinned, so the call that pins is recorded."""
    expected = [samples(batch) for batch in load(made.root / "json", pin_memory=True)]  # no GPU: ignored
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    recorded = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: recorded.append(1) or self.clone())
    with load(made.root / "json") as loader:
        assert loader.pin_memory
        found = list(loader)
    assert [samples(batch) for batch in found] == expected
    assert {type(batch) for batch in found} == {Batch}
    assert len(recorded) == 3 * len(expected)


def test_widths_are_padded_to_the_multiple_asked_for(made: Any) -> None:
    assert {batch["input_ids"].shape[1] % 8 for batch in load(made.root / "json", pad_to_multiple_of=8)} == {
        0
    }


def test_the_command_prints_a_batch_decoded(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert show([str(made.root / "json"), "--batch_size", "3"]) == 0
    out = capsys.readouterr().out
    first = samples(next(iter(load(made.root / "json", 3))))[0]
    assert "203 samples, 67 batches per epoch" in out
    assert re.search(r"input_ids: int64\[3, \d+\]", out)
    assert repr(made.tokenizer.decode(first)) in out
    assert show([str(made.root / "nowhere")]) == 66
    assert "does not exist" in capsys.readouterr().err


def test_a_run_packs_and_unpacks_to_itself() -> None:
    ids = np.arange(2 * 3 * 4, dtype=np.int32).reshape(2, 3, 4)
    counts, starts = np.array([[1, 0, 2], [0, 0, 1]], np.int32), np.array([3, 0, 2, 1], np.int32)
    lengths = np.full((2, 3), 4, np.int32)
    parts = Parts(counts=counts, flat=starts)
    full = Chunk(lengths=lengths, ids=ids, row_tokens=4, starts=parts, num_cut=7)
    again = Chunk.unpack(full.pack(), 4)
    assert np.array_equal(np.asarray(again.ids), ids)
    assert again.num_cut == 7
    assert [step_edges([again], step, slice(0, 2)).begins.tolist() for step in range(3)] == [
        [0, 3, 4],
        [0, 4],
        [0, 2, 4, 5],
    ]
    assert step_edges([again], 2, slice(1, 2)).begins.tolist() == [0, 1]
    lengths = np.array([[1, 2], [0, 3]], np.int32)
    again = Chunk.unpack(Chunk(lengths=lengths, ids=np.arange(6, dtype=np.int32)).pack(), 0)
    assert [again.ids_of(step).tolist() for step in (0, 1)] == [[0], [1, 2, 3, 4, 5]]


@pytest.mark.processes
def test_the_package_imports_without_torch() -> None:
    code = "import sys, loader, loader.order, loader.ranks; print('torch' in sys.modules)"
    assert run_child([sys.executable, "-c", code]).stdout == "False\n"
