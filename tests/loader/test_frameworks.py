"""Training frameworks in real process groups get the same global batches, also resumed on other world sizes.

accelerate relies on internals of a loader, which these tests check.
"""

from __future__ import annotations

import sys
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from tests import framework_pages as pages
from tests.attention_families import small_model
from tests.children import run_child
from tests.documented import examples_of
from tests.oracle.forms import SEQ_LEN, DataSets
from tests.ranks import Seen
from tests.world import open_loader

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.processes, pytest.mark.frameworks]


@pytest.fixture(scope="module")
def seen(numbered: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The runs of all tests, in one process, because the libraries take seconds to import."""
    out = tmp_path_factory.mktemp("runs")
    run_child([sys.executable, "-m", "tests.framework_pages", numbered, out])
    return Seen(out)


@pytest.mark.parametrize("page", pages.NEEDS)
def test_an_example_resumed_on_other_ranks_and_batch_sizes_trains_the_same_model(
    seen: Seen, numbered: Path, page: str
) -> None:
    """Documents have 0 to 4 labels, so a mean of means would give clearly different weights."""
    pytest.importorskip(pages.NEEDS[page])
    for run, (*_, first, last) in zip(pages.runs_of(page), pages.PAGE_RUNS.values(), strict=True):
        by_hand = pages.train_by_hand(numbered, last)
        batches, (weights, *_) = zip(*seen[run["name"]], strict=True)
        accumulated = pages.GLOBAL_BATCH // (run["world"] * run["batch_size"])
        steps = range(0, len(batches[0]), accumulated)
        found = [[*chain(*chain(*(each[step : step + accumulated] for each in batches)))] for step in steps]
        assert found == by_hand.seen[first:last], run["name"]
        for parameter, expected in zip(weights, by_hand.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected.detach(), rtol=1e-4, atol=1e-6, msg=run["name"])
    assert len(by_hand.seen) == pages.END


def test_the_loss_is_the_mean_over_all_labels_on_every_number_of_ranks(seen: Seen, numbered: Path) -> None:
    """With 107 samples, 4 ranks with batches of 16 leave some batches without labels."""
    model, losses = pages.SmallModel(), list[float]()
    with open_loader(numbered, 1, model_id=numbered, split="validation") as loader, torch.no_grad():
        for batch in loader:
            logits = model(**batch).logits[0, :-1].double().log_softmax(-1)
            losses += (-logits.gather(1, batch["input_ids"][0, 1:, None])).flatten().tolist()
    expected = sum(losses) / len(losses)
    assert 4 < expected < 7
    for run in pages.EVALUATIONS:
        for found in seen[run["name"]]:
            assert found == pytest.approx([expected] * len(found), rel=1e-6), run["name"]


def test_wrapped_models_are_checked_with_one_verdict_on_all_ranks(seen: Seen) -> None:
    of_wrapped = ["Refused", "Refused", "UsageError", "safe", "safe", "UsageError"]
    assert seen["wrapped models"] == [2 * of_wrapped] * 2


# torchtitan and TRL, in this process


def shard_loaders(data: Path, world: int, rows: int) -> list[Any]:
    """Build the dataloader of docs/training_frameworks.md for each rank, as torchtitan's trainer does."""
    base = pytest.importorskip("torchtitan.components.dataloader").BaseDataLoader
    (code,) = (text for text in examples_of("training_frameworks.md") if "BaseDataLoader" in text)
    names: dict[str, Any] = {"__name__": "training_frameworks"}
    exec(compile(code, "docs/training_frameworks.md", "exec", dont_inherit=True), names)
    config: Any = names["ShardLoader"].Config(dataset_path=str(data), global_batch_size=rows, num_workers=0)
    runtime = {"tokenizer": None, "seq_len": SEQ_LEN - 1, "snapshot_every_n_steps": None}
    built = [
        config.build(dp_world_size=world, dp_rank=rank, local_batch_size=rows // world, **runtime)
        for rank in range(world)
    ]
    assert all(isinstance(each, base) for each in built)
    return built


def test_torchtitans_checkpoints_resume_on_another_number_of_ranks(sets: DataSets, tmp_path: Path) -> None:
    def steps(loaders: list[Any], number: int) -> list[list[Any]]:
        """Return the next global batches as [input, positions, labels]."""
        iterators, found = [iter(each) for each in loaders], []
        for _ in range(number):
            parts = [next(iterator) for iterator in iterators]
            fields = [(inputs["input"], inputs["positions"], labels) for inputs, labels in parts]
            found.append([torch.cat(each).tolist() for each in zip(*fields, strict=True)])
        return found

    options: dict[str, Any] = {"seq_len": SEQ_LEN - 1, "targets": "shifted", "boundaries": "position_ids"}
    with open_loader(sets["concat"], 4, **options) as plain:
        names = ("input_ids", "position_ids", "labels")
        expected = [[batch[name].tolist() for name in names] for batch in islice(plain, 7)]
    first = shard_loaders(sets["concat"], 2, 4)
    assert steps(first, 3) == expected[:3]
    state_dict_saver.save({"dataloader": first[0]}, checkpoint_id=tmp_path / "step", no_dist=True)
    for world in (1, 2, 4):
        resumed = shard_loaders(sets["concat"], world, 4)
        for each in resumed:
            state_dict_loader.load({"dataloader": each}, checkpoint_id=tmp_path / "step", no_dist=True)
        assert steps(resumed, 4) == expected[3:]


def test_trl_trains_on_the_conversations_of_a_loader(sets: DataSets, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    (example,) = (code for code in examples_of("training_frameworks.md") if "SFTTrainer" in code)
    trained: list[Any] = []
    llama = small_model("llama", "sdpa")
    llama.resize_token_embeddings(400)
    llama.register_forward_pre_hook(lambda *args: trained.append(args[-1]), with_kwargs=True)
    more = {"use_cpu": True, "report_to": [], "bf16": False, "save_strategy": "no", "disable_tqdm": True}
    names: dict[str, Any] = {"DATA": str(sets["chat"]), "CHECKPOINT": str(tmp_path / "out"), "num_steps": 2}
    names |= {"model": llama, "more_arguments": more}
    exec(compile(example, "docs/training_frameworks.md", "exec"), names)
    in_steps = [fields for fields in trained if fields.get("labels") is not None]
    assert len(in_steps) == 2
    assert all((fields["labels"] == -100).any() for fields in in_steps)
    assert all(fields["position_ids"].shape == (8, SEQ_LEN) for fields in in_steps)
