"""How many steps transformers' Trainer trains on a loader, in every history of it; and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from loader import UsageError, evaluation_loss, get_llama3_dataloader
from loader.trainer import LoaderMixin
from tests.external_tars import write_numbered_data
from tests.small_model import SmallModel

pytestmark = pytest.mark.slow  # each test trains

PER_EPOCH = 5  # steps of 43 samples


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered_data(tmp_path_factory.mktemp("data"), 43, 3)


@pytest.fixture(scope="module")
def more_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered_data(tmp_path_factory.mktemp("more"), 97, 2)


class OwnTrainer(LoaderMixin, Trainer):
    pass


def trainer_of(
    loader: Any, folder: Path, *, accumulated: int = 1, kind: Any = OwnTrainer, **how: Any
) -> tuple[Any, list[list[int]]]:
    """A Trainer, and the list that the first ids of each batch that it trains come to."""
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=accumulated,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="steps",
        save_steps=1,
        logging_strategy="no",
        **how,
    )
    model, seen = SmallModel(), []
    model.register_forward_pre_hook(
        lambda _, __, fields: seen.append(fields["input_ids"][:, 0].tolist()), with_kwargs=True
    )
    return kind(model=model, args=args, train_loader=loader), seen


def train(loader: Any, folder: Path, *, resume: bool = False, **how: Any) -> tuple[int, list[list[int]]]:
    """Trainer's steps in the end, and what was trained."""
    trainer, seen = trainer_of(loader, folder, **how)
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.max_steps == trainer.state.global_step
    return trainer.state.global_step, seen


def load(data: Any, **options: Any) -> Any:
    return get_llama3_dataloader(data, 8, num_workers=0, **{"model_id": data, **options})


def batches_of(loader: Any, num: int) -> list[list[int]]:
    found: list[list[int]] = []
    while len(found) < num:
        found += [batch["input_ids"][:, 0].tolist() for batch in loader]
    return found[:num]


@pytest.mark.parametrize("at", [0, 4, 5, 7])
def test_a_training_that_begins_inside_of_a_run_trains_all_its_steps(
    data: Path, tmp_path: Path, at: int
) -> None:
    loader = load(data)
    loader.load_state_dict(loader.state_at(at))
    expected = batches_of(load(data), at + 12)[at:]
    assert train(loader, tmp_path, max_steps=12) == (12, expected)


def test_a_training_of_epochs_ends_where_the_loader_has_had_them(data: Path, tmp_path: Path) -> None:
    expected = batches_of(load(data), 3 * PER_EPOCH)
    assert train(load(data), tmp_path / "whole", num_train_epochs=3) == (15, expected)
    assert train(load(data), tmp_path / "part", num_train_epochs=1.3)[0] == 7
    loader = load(data)
    loader.load_state_dict(loader.state_at(8))
    assert train(loader, tmp_path / "rest", num_train_epochs=3) == (7, expected[8:])
    with pytest.raises(UsageError, match="max_steps"):
        trainer_of(loader, tmp_path / "over", num_train_epochs=2)[0].train()


@pytest.mark.parametrize("how", [{"max_steps": 12}, {"num_train_epochs": 2.4}])
def test_a_resumed_training_trains_the_rest(data: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    expected = batches_of(load(data), 12)
    for stop in (3, 5, 8):
        folder = tmp_path / str(stop)
        train(load(data), folder, max_steps=stop)
        assert train(load(data), folder, resume=True, **how) == (12, expected[stop:])
        assert train(load(data), folder, resume=True, **how) == (12, []), "it was finished"


def test_a_training_to_which_a_source_is_added_trains_all_its_steps(
    data: Path, more_data: Path, tmp_path: Path
) -> None:
    one = {"web": data}
    both = {"web": data, "books": more_data}
    train(load(one, model_id=data, weights={"web": 1}), tmp_path, max_steps=3)
    for how in ({"max_steps": 30}, {"max_steps": 40}):
        # The run is amended at step 64, and the second training replaces that.
        loader = load(both, model_id=data, weights={"web": 0.5, "books": 0.5}, amend=True)
        steps, seen = train(loader, tmp_path, resume=True, **how)
        assert steps == how["max_steps"]
        assert len(seen) == how["max_steps"] - (3 if steps == 30 else 30)


def test_a_training_whose_batch_size_is_amended_trains_all_its_steps(data: Path, tmp_path: Path) -> None:
    loader = load(data, global_batch_size=16, amend=True)
    loader.load_state_dict(load(data).state_at(3))
    # It takes hold where a round of 64 steps ends; the last step of that epoch has no room for two.
    loader.load_state_dict(loader.state_at(65))
    steps, seen = train(loader, tmp_path, max_steps=6, accumulated=2)
    assert (steps, len(seen)) == (6, 12)


def test_a_batch_size_that_changes_inside_of_the_training_is_refused_before_the_first_step(
    data: Path, tmp_path: Path
) -> None:
    def loader() -> Any:
        return load(data, global_batch_size=[(0, 8), (4, 16)])

    trainer, seen = trainer_of(loader(), tmp_path, max_steps=5)
    with pytest.raises(UsageError, match="step 4"):
        trainer.train()
    assert seen == []
    assert train(loader(), tmp_path, max_steps=4)[0] == 4
    assert train(loader(), tmp_path, resume=True, max_steps=6, accumulated=2)[0] == 6


def test_a_state_inside_of_a_step_is_refused_before_the_first_step(data: Path, tmp_path: Path) -> None:
    loader = load(data, global_batch_size=16)
    next(iter(loader))
    inside = load(data, global_batch_size=16)
    inside.load_state_dict(loader.state_dict())
    with pytest.raises(UsageError, match="inside of a step"):
        trainer_of(inside, tmp_path, max_steps=2, accumulated=2)[0].train()


def test_epochs_of_the_loader_are_those_of_trainers_strategies(data: Path, tmp_path: Path) -> None:
    loader = load(data)
    loader.load_state_dict(loader.state_at(3))
    trainer, _ = trainer_of(loader, tmp_path, max_steps=9)
    trainer.args.save_strategy = trainer.args.save_strategy.__class__("epoch")
    trainer.train()
    kept = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    assert kept == [2, 7, 9]


def test_several_loaders_are_evaluated_by_name(data: Path, more_data: Path, tmp_path: Path) -> None:
    loaders = {
        name: load(folder, split="validation", model_id=data)
        for name, folder in (("a", data), ("b", more_data))
    }
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=8, use_cpu=True, report_to=[])
    trainer: Any = OwnTrainer(model=SmallModel(), args=args, train_loader=load(data), eval_loader=loaders)
    metrics = trainer.evaluate()
    for name, loader in loaders.items():
        assert metrics[f"eval_{name}_loss"] == pytest.approx(evaluation_loss(trainer.model, loader))


def test_what_is_no_loader_is_refused(data: Path) -> None:
    wrong: Any
    for wrong in (["a"], {"a": ["b"]}):
        with pytest.raises(UsageError):
            OwnTrainer(model=SmallModel(), train_loader=load(data), eval_loader=wrong)


def test_a_mixin_behind_trainer_is_refused_with_the_right_order() -> None:
    with pytest.raises(UsageError) as error:
        type("Wrong", (Trainer, LoaderMixin), {})
    assert "LoaderMixin, Trainer" in str(error.value.expected)


def test_shifted_targets_are_refused_where_trainer_computes_the_loss(data: Path, tmp_path: Path) -> None:
    shifted, same = (load(data, seq_len=16, targets=targets) for targets in ("shifted", "same"))

    class Overrides(OwnTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    class Computes(OwnTrainer):
        def compute_loss(self, *args: Any, **_: Any) -> Any:
            model, inputs = args
            logits = model(**{**inputs, "labels": inputs["input_ids"]}).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())

    with pytest.raises(UsageError, match="targets"):
        trainer_of(shifted, tmp_path, max_steps=1)
    with pytest.raises(UsageError, match="targets"):
        OwnTrainer(model=SmallModel(), train_loader=same, eval_loader=shifted)
    with pytest.raises(UsageError, match="targets"):
        trainer_of(shifted, tmp_path, max_steps=1, kind=Overrides)[0].train()
    trainer_of(shifted, tmp_path, max_steps=1, kind=Computes)[0].train()


def test_shifted_targets_are_refused_where_a_model_of_transformers_is_evaluated(data: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=200, **sizes))
    shifted = load(data, seq_len=16, targets="shifted")
    with pytest.raises(UsageError, match="targets"):
        evaluation_loss(model, shifted)
    assert evaluation_loss(SmallModel(), shifted) > 0, "a model of one's own may not shift"
