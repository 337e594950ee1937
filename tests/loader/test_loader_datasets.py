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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, DataCollatorForLanguageModeling

from loader import TokenLoader, get_llama3_dataloader
from loader.__main__ import main as show
from loader.batches import Batch
from preprocess.__main__ import main as preprocess
from shardprep.errors import BrokenShard, MissingShard, NotFound, OtherTokenizer, ShardprepError, UsageError
from tests.children import run_child
from tests.conftest import seal
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
def test_the_call_of_the_readme_works_as_written(made: Any) -> None:
    loader = get_llama3_dataloader(
        input_shards=f"{made.root}/json/shard-{{00000..00003}}.tar", batch_size=8, model_id=made.model
    )
    with loader:
        assert len(set(flat(epoch(loader)))) == 200


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


BROKEN: dict[str, tuple[Any, str, type[ShardprepError], str]] = {
    "no manifest": (removed("shard-00002.json"), "", MissingShard, "3 of 4 shards"),
    "no manifest, a pattern": (removed("shard-00002.json"), "shard-*.tar", MissingShard, "shard-00002.json"),
    "no such shard": (lambda _: None, "shard-{00000..00009}.tar", NotFound, "shard-00004.tar"),
    "a tar without 1 bytes": (cut("shard-00001.tar", 1), "", BrokenShard, "shard-00001.tar"),
    "a tar without 1024 bytes": (cut("shard-00001.tar", 1024), "", BrokenShard, "shard-00001.tar"),
    "no tar": (removed("shard-00003.tar"), "", MissingShard, "shard-00003.tar"),
    "a short idx": (cut("shard-00000.idx", 28), "", BrokenShard, "shard-00000.idx"),
}


@pytest.mark.parametrize(("change", "shards", "error", "said"), BROKEN.values(), ids=BROKEN)
def test_what_is_missing_or_cut_is_refused_by_its_name(
    copied: Path, change: Callable[[Path], None], shards: str, error: type[ShardprepError], said: str
) -> None:
    change(copied)
    with pytest.raises(error, match=re.escape(said)), load(copied / shards) as loader:
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
    with pytest.raises(BrokenShard, match=r"shard-00002\.idx"):
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
    with pytest.raises(OtherTokenizer, match="elsewhere"):
        load([made.root / "json", made.root / "elsewhere"])
    both = flat(epoch(load([made.root / "json", made.root / "npy"], 1)))
    assert Counter(both) == Counter(made.encoded * 2)


def test_a_data_set_without_its_tokenizer_folder_needs_the_model_id(copied: Path, made: Any) -> None:
    shutil.rmtree(copied / "tokenizer")
    with pytest.raises(NotFound, match=r"tokenizer is missing; .* pass model_id="):
        load(copied)
    assert len(load(copied, model_id=made.model)) == 25


def test_a_folder_named_with_its_own_shards_is_refused(copied: Path) -> None:
    with pytest.raises(UsageError, match="copy"):
        load([copied, copied / "shard-00000.tar"])


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_started_in_any_way_give_the_same_epochs_and_end_with_the_loader(
    made: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The rank is resolved in the parent: spawned workers know nothing of it."""
    who = {"rank": 1, "world_size": 2}
    with load(made.root / "json", 4, **who) as loader:
        expected = [epoch(loader) for _ in range(3)]
    assert len({str(each) for each in expected}) == 3
    before = set(multiprocessing.active_children())
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    torch.multiprocessing.set_start_method(method)
    with load(made.root / "json", 4, **who, num_workers=2) as loader:
        first = epoch(loader)
        workers = set(multiprocessing.active_children()) - before
        again = [epoch(loader), epoch(loader)]
        assert set(multiprocessing.active_children()) - before == workers
        assert len(workers) == 2
    assert [first, *again] == expected
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
            loader.set_epoch(0)
            epoch(loader)
        assert num_handles() <= handles + 2
    handles = num_handles()
    for _ in range(5):
        next(iter(load(made.root / "json")))
    assert num_handles() <= handles


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


def test_the_command_prints_a_batch_decoded(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert show([str(made.root / "json"), "--batch_size", "3"]) == 0
    out = capsys.readouterr().out
    first = samples(next(iter(load(made.root / "json", 3))))[0]
    assert "203 samples, 67 batches per epoch" in out
    assert re.search(r"input_ids: int64\[3, \d+\]", out)
    assert repr(made.tokenizer.decode(first)) in out
    assert show([str(made.root / "nowhere")]) == 66
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.processes
def test_the_package_imports_without_torch() -> None:
    code = "import sys, loader, loader.order, loader.ranks; print('torch' in sys.modules)"
    assert run_child([sys.executable, "-c", code]).stdout == "False\n"
