"""Trainer, Lightning and accelerate with a loader: each step is trained exactly once."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import Trainer, TrainingArguments

from loader import SourceLosses, TokenLoader, UsageError, evaluation_loss, mask_documents
from loader.boundaries import sdpa_mask
from loader.trainer import LoaderMixin
from shardprep.errors import Refused
from tests.attention_families import small_model
from tests.external_tars import write_numbered_data
from tests.framework_pages import NEEDS, SmallModel, run_page, train_by_hand
from tests.world import open_loader, refuses

pytestmark = pytest.mark.slow  # each test trains


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered_data(tmp_path_factory.mktemp("data"), 43, 3)


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Reset accelerate's state, which all loops of a process share."""
    yield
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


class OwnTrainer(LoaderMixin, Trainer):
    pass


def arguments_of(folder: Path, batch_size: int = 8, **how: Any) -> TrainingArguments:
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
    return TrainingArguments(str(folder), per_device_train_batch_size=batch_size, **{**quiet, **how})


def trainer_of(
    loader: Any, folder: Path, *, accumulated: int = 1, kind: Any = OwnTrainer, **how: Any
) -> tuple[Any, list[list[int]]]:
    """Return a Trainer, and the list to which it adds the first ids of each batch."""
    how = {"save_strategy": "steps", "save_steps": 100, **how}
    args = arguments_of(folder, gradient_accumulation_steps=accumulated, **how)
    model = SmallModel()
    return kind(model=model, args=args, train_loader=loader), model.seen


def train(loader: Any, folder: Path, *, resume: bool = False, **how: Any) -> tuple[int, list[list[int]]]:
    """Train, and return the number of steps and the first ids of each batch."""
    trainer, seen = trainer_of(loader, folder, **how)
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.max_steps == trainer.state.global_step
    return trainer.state.global_step, seen


def load(data: Any, batch_size: int = 8, *, at: int = 0, **options: Any) -> TokenLoader:
    """Return a loader that begins after ``at`` steps."""
    loader = open_loader(data, batch_size, **{"model_id": data, **options})
    if at:
        loader.load_state_dict(loader.state_at(at))
    return loader


@pytest.mark.parametrize(
    ("at", "how", "num_steps"),
    [
        *((at, {"max_steps": 12}, 12) for at in (0, 4, 5, 7)),
        # With num_train_epochs, training ends when the loader has delivered them.
        *((at, {"num_train_epochs": 3}, 15 - at) for at in (0, 8)),
        (0, {"num_train_epochs": 1.3}, 7),
    ],
)
def test_a_training_that_begins_anywhere_in_a_run_trains_all_its_steps(
    data: Path, tmp_path: Path, at: int, how: dict[str, Any], num_steps: int
) -> None:
    expected = train_by_hand(data, at + num_steps).seen[at:]
    assert train(load(data, at=at), tmp_path, **how) == (num_steps, expected)
    with refuses(UsageError):  # more epochs are over than requested
        train(load(data, at=8), tmp_path / "over", num_train_epochs=1)


@pytest.mark.parametrize(
    ("stop", "how"), [(3, {"max_steps": 12}), (5, {"num_train_epochs": 2.4}), (8, {"num_train_epochs": 2.4})]
)
def test_a_resumed_run_trains_the_rest(data: Path, tmp_path: Path, stop: int, how: dict[str, Any]) -> None:
    train(load(data), tmp_path, max_steps=stop, save_steps=stop)
    path = tmp_path / f"checkpoint-{stop}" / "trainer_state.json"
    text = path.read_text()
    state = json.loads(text)
    (own,) = [name for name in state["stateful_callbacks"] if name.startswith("Loader")]
    del state["stateful_callbacks"][own]
    path.write_text(json.dumps(state))
    with refuses(UsageError):
        train(load(data), tmp_path, resume=True, **how)
    path.write_text(text)
    expected = train_by_hand(data, 12).seen[stop:]
    assert train(load(data), tmp_path, resume=True, save_steps=12, **how) == (12, expected)
    assert train(load(data), tmp_path, resume=True, save_steps=12, **how) == (12, []), "already finished"


def test_an_amended_training_trains_all_its_steps(data: Path, numbered: Path, tmp_path: Path) -> None:
    train(load({"web": data}, model_id=data, weights={"web": 1}), tmp_path, max_steps=3)
    before = 3
    for end in (30, 40):
        # The first amendment adds a source at step 64, and the second one replaces it.
        both: dict[str, Any] = {"weights": {"web": 0.5, "books": 0.5}, "model_id": data, "amend": True}
        loader = load({"web": data, "books": numbered}, **both)
        steps, seen = train(loader, tmp_path, resume=True, max_steps=end)
        assert (steps, len(seen)) == (end, end - before)
        before = 30
    # The batch size changes at step 64. The last tick of that epoch is unused, as a step now takes two.
    loader = load(data, global_batch_size=16, amend=True)
    loader.load_state_dict(load(data).state_at(3))
    loader.load_state_dict(loader.state_at(65))
    steps, seen = train(loader, tmp_path / "sizes", max_steps=6, accumulated=2)
    assert (steps, len(seen)) == (6, 12)


def test_trainer_refuses_changing_batch_sizes_and_states_inside_a_step(data: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"global_batch_size": [(0, 8), (4, 16)]}
    trainer, seen = trainer_of(load(data, **sizes), tmp_path, max_steps=5)
    with refuses(UsageError):
        trainer.train()
    assert seen == []
    assert train(load(data, **sizes), tmp_path, max_steps=4)[0] == 4
    assert train(load(data, **sizes), tmp_path, resume=True, max_steps=6, accumulated=2)[0] == 6
    loader, inside = (load(data, global_batch_size=16) for _ in range(2))
    next(iter(loader))
    inside.load_state_dict(loader.state_dict())
    with refuses(UsageError):
        train(inside, tmp_path, max_steps=2, accumulated=2)


def test_trainer_refuses_unsuitable_loaders_at_once(data: Path, tmp_path: Path) -> None:
    shifted = load(data, seq_len=16, targets="shifted")
    no_loaders: list[tuple[Any, int]] = [([], 1), (shifted, 1)]
    for loader, accumulated in ((load(data, 4), 1), (load(data), 2), *no_loaders):
        with refuses(UsageError):
            trainer_of(loader, tmp_path, accumulated=accumulated, max_steps=2)
    eval_loaders: list[Any] = [["a"], {"a": ["b"]}, shifted]
    for wrong in eval_loaders:
        with refuses(UsageError):
            args, loader = arguments_of(tmp_path), load(data)
            OwnTrainer(model=SmallModel(), args=args, train_loader=loader, eval_loader=wrong)
    with refuses(UsageError, expected="LoaderMixin, Trainer"):
        type("Wrong", (Trainer, LoaderMixin), {})


class OutOfMemory(OwnTrainer):
    fails_at = 3

    def training_step(self, *args: Any, **more: Any) -> Any:
        if self.state.global_step == self.fails_at:
            self.fails_at = -1
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(*args, **more)


def test_a_loop_that_is_restarted_loses_no_global_batch(data: Path, tmp_path: Path) -> None:
    """Trainer's auto_find_batch_size and accelerate's own are refused; a followed loader goes back."""
    memory = pytest.importorskip("accelerate.utils.memory")
    loader = load(data)
    with refuses(UsageError, found="auto_find_batch_size"):
        trainer_of(loader, tmp_path, max_steps=6, auto_find_batch_size=True)
    trainer, seen = trainer_of(loader, tmp_path, max_steps=6, kind=OutOfMemory)
    trainer.args.auto_find_batch_size = True
    with refuses(UsageError):
        trainer.train()
    trainer.args.auto_find_batch_size = False
    with pytest.raises(RuntimeError) as raised:
        trainer.train()
    assert "out of memory" in str(raised.value)
    expected = train_by_hand(data, 6).seen
    assert seen == expected[:3]
    trainer.train()
    assert seen[3:6] == expected[3:], "the batch that failed is the first of the next loop"
    sizes = []

    def loop(batch_size: int, made: Any = None) -> None:
        sizes.append(batch_size)
        for _ in made or load(data, batch_size):
            if batch_size == 8:
                raise RuntimeError("CUDA out of memory.")

    with_retries = memory.find_executable_batch_size
    with_retries(loop, starting_batch_size=8)()  # a loader in each attempt
    with refuses(UsageError, found="for a loader with 8"):
        with_retries(loop, starting_batch_size=8)(load(data))
    assert sizes[0] == sizes[2] == 8
    assert sizes[1] == sizes[3] < 8


def test_a_followed_loop_of_ones_own_that_fails_goes_on_with_the_batch_that_was_not_trained(
    data: Path,
) -> None:
    """Not at the end of an epoch, whose last step a gradient scaler may have skipped."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    loader = load(data, 4, global_batch_size=8)
    expected = [batch["input_ids"][:, 0].tolist() for batch in load(data, 4, global_batch_size=8)]
    loader.follow(optimizer)
    seen: list[list[int]] = []
    for fails_at in (5, 2, None):
        for number, batch in enumerate(loader):
            if number == fails_at:  # 5: in the second batch of a step
                break
            seen.append(batch["input_ids"][:, 0].tolist())
            if loader.ends_step:
                optimizer.step()
        if fails_at is not None:
            del seen[len(seen) // 2 * 2 :]
    assert seen == expected
    assert [len([*loader]), len([*loader])] == [len(expected)] * 2


def test_evaluate_and_predict_take_a_validation_loader(data: Path, tmp_path: Path) -> None:
    trainer, _ = trainer_of(load(data), tmp_path)
    held_out = load(data, split="validation")
    expected = evaluation_loss(trainer.model, held_out)
    assert trainer.evaluate(held_out)["eval_loss"] == pytest.approx(expected)
    assert trainer.predict(held_out).metrics["test_loss"] == pytest.approx(expected)
    for wrong in (trainer.train_loader, load(data)):
        for method in (trainer.evaluate, trainer.predict):
            with refuses(UsageError, expected="eval_loader="):
                method(wrong)


def test_arguments_of_trainers_own_loader_are_warned_of(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments_of(tmp_path, dataloader_num_workers=3)
    for options, named in (({}, "dataloader_num_workers=3"), ({"data_collator": list}, "collate_fn=")):
        caplog.clear()
        given: dict[str, Any] = {"model": SmallModel(), "args": args, "train_loader": load(data), **options}
        OwnTrainer(**given)
        assert [
            named in record.getMessage() for record in caplog.records if record.name == "loader.train.trainer"
        ] == [True]


def test_shifted_targets_need_a_loss_that_does_not_shift_again(data: Path, tmp_path: Path) -> None:
    shifted = load(data, seq_len=16, targets="shifted")

    class Overrides(OwnTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    class Computes(OwnTrainer):
        def compute_loss(self, *args: Any, **_: Any) -> Any:
            model, inputs = args
            logits = model(**{**inputs, "labels": inputs["input_ids"]}).logits
            return cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())

    with refuses(UsageError):
        trainer_of(shifted, tmp_path, max_steps=1, kind=Overrides)[0].train()
    trainer_of(shifted, tmp_path, max_steps=1, kind=Computes)[0].train()
    with refuses(UsageError):
        evaluation_loss(small_model("llama", "sdpa"), shifted)
    assert evaluation_loss(SmallModel(), shifted) > 0, "a custom model may not shift"


class MaskingTrainer(OwnTrainer):
    def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:  # type: ignore[override]
        inputs["attention_mask"] = sdpa_mask({"segment_ids": inputs.pop("segment_ids")})
        return super().compute_loss(model, inputs, **more)


# Model, whether mask_documents is called, trainer, boundaries, check_boundaries, and the result.
CHECKS: list[tuple[str, bool, Any, Any, bool, str]] = [
    ("llama", False, OwnTrainer, "transformers", True, "safe"),
    ("opt", True, OwnTrainer, "transformers", True, "safe"),
    ("llama", False, MaskingTrainer, "segment_ids", True, "safe"),
    ("opt", False, OwnTrainer, "transformers", True, "refused"),
    ("llama", False, OwnTrainer, "segment_ids", True, "refused"),
    ("llama", False, OwnTrainer, (), True, "unchecked"),
    ("opt", False, OwnTrainer, "transformers", False, "unchecked"),
]


@pytest.mark.parametrize(("family", "is_masked", "kind", "boundaries", "checks", "expected"), CHECKS)
def test_trainer_checks_boundaries_once_with_the_models_actual_inputs(
    data: Path, tmp_path: Path, family: str, is_masked: bool, kind: Any, boundaries: Any, checks: bool,
    expected: str,
) -> None:  # fmt: skip
    model, calls = small_model(family, "sdpa"), list[bool]()
    if is_masked:
        mask_documents(model)
    model.register_forward_pre_hook(lambda module, *_: calls.append(module.training))
    loader = load(data, 4, seq_len=16, boundaries=boundaries, global_batch_size=4)
    args = arguments_of(tmp_path, 4, max_steps=2, save_strategy="no")
    trainer = kind(model=model, args=args, train_loader=loader, check_boundaries=checks)
    with refuses(Refused) if expected == "refused" else contextlib.nullcontext():
        trainer.train()
    num_passes = calls.count(False)  # in evaluation mode, before the steps
    assert calls == [False] * num_passes + [True, True] * (expected != "refused")
    assert (num_passes > 0) == (expected != "unchecked")


def test_another_gradient_accumulation_is_warned_of(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    for global_batch_size, num_warnings in ((32, 0), (8, 1)):
        loader = load(data, global_batch_size=global_batch_size)
        caplog.clear()
        next(iter(loader))
        assert len(caplog.records) == num_warnings


def test_save_strategy_epoch_saves_at_the_loaders_epochs(data: Path, tmp_path: Path) -> None:
    train(load(data, at=3), tmp_path, max_steps=9, save_strategy="epoch")
    kept = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    assert kept == [2, 7, 9]


def test_several_loaders_are_evaluated_by_name(data: Path, tmp_path: Path) -> None:
    loaders = {name: load(data, size, split="validation") for name, size in (("a", 8), ("b", 5))}
    args, model = arguments_of(tmp_path), SmallModel()
    trainer: Any = OwnTrainer(model=model, args=args, train_loader=load(data), eval_loader=loaders)
    metrics = trainer.evaluate()
    for name, loader in loaders.items():
        assert metrics[f"eval_{name}_loss"] == pytest.approx(evaluation_loss(model, loader))


def test_the_mean_loss_of_each_source_is_logged(data: Path, numbered: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"origins": True, "seq_len": 16, "global_batch_size": 8, "model_id": data}
    mixture = {"web": data, "books": numbered}
    loader, again = (load(mixture, 4, weights={"web": 1, "books": 1}, **options) for _ in range(2))
    eval_loader, model = load(data, 4, split="validation", **options), SmallModel()
    how: Any = {"max_steps": 4, "logging_steps": 2, "learning_rate": 0.0, "gradient_accumulation_steps": 2}
    how |= {"logging_strategy": "steps", "eval_strategy": "steps", "eval_steps": 4, "save_strategy": "no"}
    args = arguments_of(tmp_path, 4, **how)
    trainer: Any = OwnTrainer(model=model, args=args, train_loader=loader, eval_loader=eval_loader)
    trainer.train()
    batches = iter(again)
    for step in (2, 4):  # the learning rate is 0, so the model does not change
        losses = SourceLosses.of_loader(again)
        for batch in islice(batches, 4):
            losses.add(model(**batch).logits, batch["labels"], batch["origins"])
        (line,) = [each for each in trainer.state.log_history if each["step"] == step and "loss" in each]
        assert {name: line[f"loss/{name}"] for name in mixture} == pytest.approx(losses.means(), rel=1e-4)
    (evaluated,) = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert evaluated["eval_loss/all"] == pytest.approx(evaluated["eval_loss"], rel=1e-4)


# Checkpoints that frameworks save inside a step: the loader's state counts completed optimizer steps

ACCUMULATED, END = 2, 8
# (point, step, batch of the step): in the first step, inside an epoch, at its end and after it.
KILLS = [
    ("forward", 0, 0), ("forward", 3, 0), ("forward", 5, 0), ("backward", 4, 1),
    ("before the optimizer", 2, 1), ("after the optimizer", 5, 1),
]  # fmt: skip


class Killed(Exception):
    pass


class Run:
    """Training by the example of a framework's page, which may be killed at one point of one batch."""

    def __init__(self, page: str, data: Path, kill: tuple[str, int, int] | None = None) -> None:
        self.page, self.kill, self.model = page, kill, SmallModel()
        self.names: dict[str, Any] = {"DATA": data, "model": self.model, "rank": 0}
        self.updates: list[list[list[int]]] = []  # per optimizer step: batches, as first ids of samples

    def train(self, checkpoint: Path) -> None:
        held = self.model.seen

        def stepped(*_: object) -> None:
            self.updates.append([*held])
            held.clear()
            self.at("after the optimizer", ACCUMULATED - 1)

        more: dict[str, Any] = {}
        if self.page == "trainer":  # a warm-up reveals a learning rate of another step
            more = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4}
        if self.page == "lightning":
            import lightning

            class Counted(lightning.Callback):
                def on_train_batch_end(_, *__: object) -> None:  # noqa: N805
                    self.at("counted", len(held))

            self.names["more_callbacks"] = [Counted()]
        self.model.register_forward_pre_hook(lambda *_: self.at("forward", len(held) - 1))
        # The last parameter to get its gradient.
        weight = self.model.embedding.weight
        weight.register_post_accumulate_grad_hook(lambda _: self.at("backward", len(held) - 1))
        before = register_optimizer_step_pre_hook(lambda *_: self.at("before the optimizer", ACCUMULATED - 1))
        after = register_optimizer_step_post_hook(stepped)
        try:
            run_page(self.page, self.names, checkpoint=str(checkpoint), num_steps=END, **more)
        finally:
            before.remove()
            after.remove()

    def at(self, *place: object) -> None:
        point, batch = place
        if (point, len(self.updates), batch) == self.kill:
            self.kill, names = None, self.names
            if self.page == "trainer":  # like enable_jit_checkpoint
                names["trainer"]._save_checkpoint(names["trainer"].model, trial=None)
            elif self.page == "accelerate":
                names["accelerator"].save_state(names["CHECKPOINT"])
            else:
                names["trainer"].save_checkpoint(names["CHECKPOINT"])
            raise Killed


@pytest.mark.parametrize(
    "page", ["trainer", "accelerate", pytest.param("lightning", marks=pytest.mark.frameworks)]
)
def test_a_run_killed_inside_a_step_trains_that_step_once(data: Path, tmp_path: Path, page: str) -> None:
    pytest.importorskip(NEEDS[page])
    by_hand = train_by_hand(data, END, 4 if page == "trainer" else 0)
    expected = [[batch[:4], batch[4:]] for batch in by_hand.seen]
    kills = [*KILLS, ("counted", 5, 0)] if page == "lightning" else KILLS
    for number, kill in enumerate(kills):
        first, second = Run(page, data, kill), Run(page, data)
        with pytest.raises(Killed):
            first.train(tmp_path / str(number))
        second.train(tmp_path / str(number))
        assert first.updates + second.updates == expected, kill
        for parameter, weight in zip(second.model.parameters(), by_hand.parameters(), strict=True):
            torch.testing.assert_close(parameter, weight, msg=str(kill))
