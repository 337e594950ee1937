"""Stop anywhere, resume anywhere: the state, what it counts and what it refuses."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import random
import shutil
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from loader import TokenLoader, get_llama3_dataloader
from loader.state import OtherRun
from preprocess.look.train_tokenizer import train_tokenizer
from shardprep.errors import OtherTokenizer, UsageError

if TYPE_CHECKING:
    from tests.conftest import Prep

GLOBAL_BATCH = 8


@pytest.fixture(scope="module")
def forms(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The sample text as documents and as packed rows, and loader options that make samples of them."""
    root = tmp_path_factory.mktemp("forms")
    records: dict[str, dict[str, Any]] = {"documents": {}, "packed": {"record": "packed", "seq_len": 32}}
    for name, options in records.items():
        prep.plan(sample_dir, root / name, num_shards=3, **options)
        prep.make(root / name)
    return {
        "documents": (root / "documents", {}),
        "packed": (root / "packed", {"boundaries": "segment_ids"}),
        "packed at load": (root / "documents", {"seq_len": 64}),
        "truncated": (root / "documents", {"max_length": 20}),
    }


def load(form: tuple[Path, dict[str, Any]], world: int = 1, rank: int = 0, **options: Any) -> TokenLoader:
    folder, own = form
    options = {"num_workers": 0, "global_batch_size": GLOBAL_BATCH, "seed": 3, **own, **options}
    batch_size = options.pop("batch_size", GLOBAL_BATCH // world)
    return get_llama3_dataloader(folder, batch_size, rank=rank, world_size=world, **options)


def shown(batch: Any) -> list[list[int]]:
    """A batch's samples without padding."""
    return [
        ids[: int(mask.sum())].tolist()
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def run(form: Any, epochs: int = 2, **options: Any) -> list[list[list[int]]]:
    """Global batches from the beginning."""
    with load(form, **options) as loader:
        return [shown(batch) for _ in range(epochs) for batch in loader]


FORMS = ["documents", "packed", "packed at load", "truncated"]


@pytest.mark.processes
@pytest.mark.parametrize("name", FORMS)
def test_a_state_from_any_step_resumes_on_any_world_and_number_of_workers(forms: Any, name: str) -> None:
    whole = run(forms[name])
    steps = len(whole) // 2
    rng = random.Random(name)
    for step in [0, 1, steps - 1, steps, *(rng.randrange(2 * steps) for _ in range(4))]:
        with load(forms[name]) as loader:
            state = json.loads(json.dumps(loader.state_at(step)))
        world, workers = rng.choice([1, 2, 4, 8]), rng.choice([0, 0, 1, 3])
        parts = []
        for rank in range(world):
            with load(forms[name], world, rank, num_workers=workers) as loader:
                loader.load_state_dict(state)
                rest = (batch for _ in range(2) for batch in loader)  # this epoch's, and the next epoch
                parts.append([shown(batch) for batch, _ in zip(rest, range(20), strict=False)])
        joined = [[ids for part in step_parts for ids in part] for step_parts in zip(*parts, strict=True)]
        assert joined[: 2 * steps - step] == whole[step : step + 20]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [True, False])
def test_the_state_counts_what_the_loop_got_and_not_what_was_read_ahead(
    forms: Any, workers: int, persistent: bool
) -> None:
    with load(forms["documents"], num_workers=workers, persistent_workers=persistent) as loader:
        steps = len(loader)
        assert loader.state_dict() == loader.state_at(0)
        for number, _ in zip(range(steps + 3), (batch for _ in range(2) for batch in loader), strict=False):
            assert loader.state_dict() == loader.state_at(number + 1)


@pytest.mark.processes
def test_one_loader_goes_back_and_forth_between_states(forms: Any) -> None:
    whole = run(forms["documents"], epochs=1)
    for options in ({}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": False}):
        with load(forms["documents"], **options) as loader:
            for step in (5, 0, len(whole) - 1, 2):
                loader.load_state_dict(loader.state_at(step))
                found = [shown(batch) for _, batch in zip(range(4), loader, strict=False)]
                assert found == whole[step : step + 4]


def test_a_loop_that_sets_the_epoch_it_resumes_in_still_resumes(forms: Any) -> None:
    with load(forms["documents"]) as loader:
        steps = len(loader)
        epochs = [[shown(batch) for batch in loader] for _ in range(3)]
        loader.load_state_dict(loader.state_at(steps + 7))
        found = []
        for number in (1, 2):
            loader.set_epoch(number)
            found.append([shown(batch) for batch in loader])
        assert found == [epochs[1][7:], epochs[2]]


@pytest.mark.processes
def test_inside_of_a_step_a_state_resumes_with_its_own_layout_only(forms: Any) -> None:
    options = {"batch_size": 2, "world": 1}
    whole = run(forms["documents"], **options)
    with load(forms["documents"], **options) as loader:
        batches = iter(loader)
        for _ in range(4 * 5 + 3):
            next(batches)
        state = loader.state_dict()
        assert (state["step"], state["num_micro"]) == (5, 3)
    with load(forms["documents"], **options, num_workers=2) as loader:
        loader.load_state_dict(state)
        assert shown(loader.peek()) == whole[23]
        assert loader.first_batch == 23
        assert [shown(batch) for batch in loader] == whole[23 : len(whole) // 2]
    with load(forms["documents"], world=2, batch_size=2) as loader, pytest.raises(UsageError):
        loader.load_state_dict(state)


def test_a_moved_data_set_resumes_and_another_one_or_another_tokenizer_is_refused(
    forms: Any, prep: Any, sample_dir: Path, tmp_path: Path
) -> None:
    folder, _ = forms["documents"]
    with load(forms["documents"]) as loader:
        state = loader.state_at(3)
    moved = shutil.copytree(folder, tmp_path / "moved")
    with load((moved, {})) as loader:
        loader.load_state_dict(state)
    prep.plan(sample_dir, tmp_path / "other", num_shards=3, append_eos=True)
    prep.make(tmp_path / "other")
    with load((tmp_path / "other", {})) as loader, pytest.raises(OtherRun) as error:
        loader.load_state_dict(state)
    assert "data" in str(error.value.found)
    with load(forms["documents"]) as loader:
        state["fingerprint"]["tokenizer"] = "0" * 64
        with pytest.raises(OtherTokenizer):
            loader.load_state_dict(state)


@pytest.mark.processes
def test_a_refused_state_changes_nothing_for_the_loop_that_is_running(forms: Any) -> None:
    with load(forms["documents"], seed=4) as loader:
        other = loader.state_at(3)
    whole = run(forms["documents"], epochs=1)
    for options in ({}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": False}):
        with load(forms["documents"], **options) as loader:
            batches = iter(loader)
            found = [shown(next(batches)) for _ in range(3)]
            with pytest.raises(OtherRun):
                loader.load_state_dict(other)
            assert loader.state_dict() == loader.state_at(3)
            assert found + [shown(batch) for batch in batches] == whole


def test_a_state_is_a_few_numbers_that_torch_saves_and_never_a_path(forms: Any, tmp_path: Path) -> None:
    with load(forms["documents"]) as loader:
        state = loader.state_at(11)
        torch.save(state, tmp_path / "state.pt")
        assert torch.load(tmp_path / "state.pt", weights_only=True) == state
        assert len(json.dumps(state)) < 800
        assert str(forms["documents"][0]) not in json.dumps(state)


def test_loading_a_state_reads_nothing_and_the_first_batch_no_more_than_at_the_start(
    forms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was delivered before is never read again to get to a step."""
    counts = {"opened": 0, "bytes": 0}
    real_open, real_read = os.open, os.preadv

    def counted_open(*args: Any, **settings: Any) -> int:
        counts["opened"] += 1
        return real_open(*args, **settings)

    def counted_read(*args: Any) -> int:
        count = real_read(*args)
        counts["bytes"] += count
        return count

    monkeypatch.setattr(os, "open", counted_open)
    monkeypatch.setattr(os, "preadv", counted_read)
    with load(forms["documents"]) as loader:
        next(iter(loader))
        at_the_start = counts["bytes"]
        assert at_the_start > 0
        for step in range(0, len(loader), 7):
            state, before = loader.state_at(step), dict(counts)
            loader.load_state_dict(state)
            assert counts == before
            next(iter(loader))
            assert counts["bytes"] - before["bytes"] <= 1.2 * at_the_start, step


@pytest.mark.processes
def test_a_peek_is_the_batch_that_comes_next_and_changes_nothing(forms: Any) -> None:
    for name, options in (("documents", {}), ("packed", {"num_workers": 2}), ("packed at load", {})):
        whole = run(forms[name], epochs=1)
        with load(forms[name], **options) as loader:
            before = loader.state_dict()
            assert shown(loader.peek()) == shown(loader.peek()) == whole[0]
            assert (loader.state_dict(), loader.metrics.num_batches) == (before, 0)
            loader.load_state_dict(loader.state_at(5))
            assert shown(loader.peek()) == whole[5]
            assert [shown(batch) for batch in loader] == whole[5:]
            assert loader.state_at(len(whole)) == loader.state_dict()


@pytest.mark.processes
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": False}])
def test_a_loop_that_stopped_goes_on_with_the_next_batch(forms: Any, options: dict[str, Any]) -> None:
    """Also inside of a step, and through the end of an epoch; what was only begun is not counted."""
    whole = run(forms["documents"], batch_size=2)
    with load(forms["documents"], batch_size=2, **options) as loader:
        found: list[Any] = []
        for pause in (10, 3, 1, 7, 500, 5):
            iter(loader)
            assert shown(loader.peek()) == whole[len(found)]
            found += [shown(batch) for batch in islice(loader, pause)]
            assert found == whole[: len(found)]
            assert loader.num_steps_delivered == len(found) // 4
            assert loader.state_dict()["num_micro"] == len(found) % 4
        assert len(found) > len(loader)


def test_a_loader_that_is_only_looked_into_loses_nothing(forms: Any) -> None:
    whole = run(forms["documents"], epochs=1)
    with load(forms["documents"]) as loader:
        assert [shown(next(iter(loader))) for _ in range(5)] == whole[:5]
        assert loader.num_steps_delivered == 5
        assert loader.state_at(5) == loader.state_dict()


def test_set_epoch_leaves_an_epoch_and_the_loop_still_counts_its_steps(forms: Any) -> None:
    epochs = run(forms["documents"], epochs=3)
    with load(forms["documents"]) as loader:
        steps = len(loader)
        for _ in range(3):
            next(iter(loader))
        loader.set_epoch(0)  # in which it stands
        assert shown(next(iter(loader))) == epochs[3]
        loader.set_epoch(2)
        assert shown(next(iter(loader))) == epochs[2 * steps]
        assert loader.num_steps_delivered == 5
        assert loader.state_at(6) == {**loader.state_dict(), "step": 2}
        with pytest.raises(UsageError):
            loader.state_at(3)  # of an epoch that was left
        state = loader.state_dict()
    with load(forms["documents"]) as loader:
        loader.load_state_dict(state)
        assert loader.num_steps_delivered == 5
        assert shown(next(iter(loader))) == epochs[2 * steps + 1]
        assert loader.num_steps_delivered == 6


def test_a_loop_whose_epoch_was_left_is_refused_its_next_batch_and_the_count_stays_right(forms: Any) -> None:
    with load(forms["documents"]) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        loader.set_epoch(4)
        with pytest.raises(UsageError):
            next(batches)
        assert loader.num_steps_delivered == 3
        next(iter(loader))
        assert (loader.num_steps_delivered, int(loader.epoch)) == (4, 4)


@pytest.mark.parametrize("epoch", [-1, "1", 1.5, 2**70])
def test_an_epoch_that_is_no_number_from_0_on_is_refused(forms: Any, epoch: Any) -> None:
    with load(forms["documents"]) as loader, pytest.raises(UsageError):
        loader.set_epoch(epoch)


def test_a_run_begun_in_a_later_epoch_without_a_state_is_warned_of(
    forms: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with load(forms["documents"]) as loader:
        loader.set_epoch(0)
        assert "load_state_dict" not in caplog.text
        loader.set_epoch(2)
        assert "needs load_state_dict before" in caplog.text


def test_the_state_of_a_fresh_loader_has_all_keys_that_one_from_inside_of_a_step_has(forms: Any) -> None:
    """torch.distributed.checkpoint fills in the keys that it is given, and reads no others."""
    with load(forms["documents"], batch_size=2) as loader:
        fresh = loader.state_dict()
        next(iter(loader))
        inside = loader.state_dict()
        assert inside["num_micro"] == 1
        assert fresh.keys() == inside.keys()
        assert fresh["layout"].keys() == inside["layout"].keys()


@pytest.mark.filterwarnings("ignore")
def test_torchs_distributed_checkpoint_resumes_inside_of_a_step(forms: Any, tmp_path: Path) -> None:
    whole = run(forms["documents"], epochs=1, batch_size=2)
    with load(forms["documents"], batch_size=2) as loader:
        batches = iter(loader)
        for _ in range(4 * 5 + 3):
            next(batches)
        state_dict_saver.save({"loader": loader.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with load(forms["documents"], batch_size=2) as loader:
        state = {"loader": loader.state_dict()}
        state_dict_loader.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
        loader.load_state_dict(state["loader"])
        assert [shown(batch) for batch in loader] == whole[23:]


@pytest.mark.processes
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_copy_of_a_loader_goes_on_where_the_original_stood_and_leaves_it_alone(
    forms: Any, copied: Any, workers: int
) -> None:
    """Of rank 0's, too, which looks at the sizes of all tars in a thread."""
    whole = run(forms["documents"], epochs=1)
    with load(forms["documents"], num_workers=workers) as loader:
        loader.load_state_dict(loader.state_at(4))
        batches = iter(loader)
        found = [shown(next(batches)) for _ in range(2)]
        with copied(loader) as other:
            assert other.state_dict() == loader.state_at(6)
            other.load_state_dict(other.state_dict())
            assert [shown(batch) for batch in other] == whole[6:]
        assert found + [shown(batch) for batch in batches] == whole[4:]


def test_a_loader_says_what_it_is_and_where_it_stands(forms: Any) -> None:
    with load(forms["documents"], world=2, rank=1, batch_size=2) as loader:
        steps = loader.run.steps_in(0)
        loader.load_state_dict(loader.state_at(steps + 3))
        assert loader.first_batch == 6
        assert len(loader) == 2 * steps
        assert repr(loader) == (
            "TokenLoader(rank 1 of 2, batch_size 2, global_batch_size 8, epoch 1, step 3 of "
            f"{steps}, 0 workers)"
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": "4"}, "batch_size is '4', expected a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size is 0, expected at least 1"),
        ({"global_batch_size": 8.0}, r"global_batch_size is 8\.0, expected a whole number"),
        ({"num_workers": -1}, "num_workers is -1, expected at least 0"),
        ({"num_workers": "2"}, "num_workers is '2', expected a whole number"),
        ({"num_workers": 0, "prefetch_factor": 4}, "prefetch_factor=4 .* num_workers is 0; leave it out"),
        ({"num_workers": 2, "prefetch_factor": 0}, "prefetch_factor is 0, expected at least 1"),
    ],
)
def test_numbers_that_are_none_or_do_nothing_are_refused(forms: Any, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(forms["documents"], **options)


def test_workers_that_would_have_nothing_to_read_are_warned_of(
    forms: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with load(forms["documents"], num_workers=3) as loader:
        assert loader.num_workers == 3
    assert "num_workers" not in caplog.text
    with load(forms["documents"], batch_size=1, global_batch_size=1, num_workers=4) as loader:
        assert loader.num_workers == 1
    assert "num_workers is 4, but a rank's part of a global batch is 1" in caplog.text


TRAIN = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from loader import get_llama3_dataloader

def train(folder, begin, end, world, saved=None):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ranks = [
        get_llama3_dataloader(folder, 8 // world, rank=rank, world_size=world, num_workers=0, seq_len=64)
        for rank in range(world)
    ]
    size = len(ranks[0].tokenizer)
    config = LlamaConfig(vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for loader in ranks:
            loader.load_state_dict(saved["loader"])
    losses, step = [], begin
    while step < end:
        for batches in zip(*ranks):
            total = 0.0
            for batch in batches:
                loss = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss / world
                loss.backward()
                total += loss.item()
            optimizer.step(); optimizer.zero_grad()
            step += 1
            losses.append(total)
            if step == end:
                break
    loader_state = ranks[0].state_dict()
    return losses, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader_state}
"""


@pytest.mark.slow
def test_a_tiny_llama_killed_and_resumed_learns_as_if_it_had_not_been(
    shared_dir: Path, corpora_dir: Path, tmp_path: Path, prep: Any
) -> None:
    """Losses and weights bit-equal on the same world, losses within 1e-4 on another."""
    raw = tmp_path / "raw"
    raw.mkdir()
    for name in ("ko_reviews.txt", "en_paragraphs.txt"):
        text = (corpora_dir / name).read_text(encoding="utf-8").splitlines(keepends=True)[:150]
        (raw / name).write_text("".join(text), encoding="utf-8")
    model_dir = tmp_path / "tokenizer"  # of the text itself: a vocabulary of 128,256 would take minutes
    train_tokenizer(input_dir=raw, vocab_size=500, output_dir=model_dir)
    prep.plan(raw, tmp_path / "data", num_shards=3, model_id=str(model_dir))
    prep.make(tmp_path / "data")
    scope: dict[str, Any] = {}
    exec(TRAIN, scope)
    train = scope["train"]
    unbroken, end = train(tmp_path / "data", 0, 30, 1)
    first, saved = train(tmp_path / "data", 0, 13, 1)
    torch.save(saved, tmp_path / "checkpoint.pt")
    resumed, resumed_end = train(tmp_path / "data", 13, 30, 1, torch.load(tmp_path / "checkpoint.pt"))
    assert first + resumed == unbroken
    assert unbroken[-1] < unbroken[0]
    for name, weight in end["model"].items():
        assert torch.equal(weight, resumed_end["model"][name]), name
    losses, elsewhere = train(tmp_path / "data", 13, 30, 4, torch.load(tmp_path / "checkpoint.pt"))
    assert losses == pytest.approx(resumed, rel=1e-4)
    assert {**elsewhere["loader"], "layout": None} == {**resumed_end["loader"], "layout": None}


def test_a_bar_of_a_resumed_epoch_ends_at_its_total(forms: Any) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    with load(forms["documents"]) as loader:
        loader.load_state_dict(loader.state_at(loader.run.steps_in(0) // 3))
        with tqdm(loader, initial=loader.first_batch, file=io.StringIO()) as bar:
            assert 0 < bar.n < bar.total == len(loader)
            num_batches = sum(1 for _ in bar)
        assert bar.n == bar.total
        assert 0 < num_batches < len(loader)
