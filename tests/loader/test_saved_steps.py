"""Checkpoints that frameworks save inside of a step: the loader's state is of the optimizer's steps done."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from loader import get_llama3_dataloader
from loader.trainer import LoaderMixin
from tests.external_tars import write_numbered_data
from tests.small_model import SmallModel

pytestmark = pytest.mark.slow  # each test trains

GLOBAL_BATCH, ACCUMULATED = 8, 2
NUM_SAMPLES = 43  # 5 steps of an epoch
END = 8
# point, step, batch of the step: in the first step, inside of an epoch, in its last step and the next first
KILLS = [
    ("forward", 0, 0),
    ("forward", 5, 0),
    ("backward", 4, 1),
    ("before the optimizer", 2, 1),
    ("after the optimizer", 4, 1),
    ("counted", 2, 1),
    ("counted", 4, 1),
]


class Killed(Exception):
    pass


class Run:
    """A training that is watched, and killed at one point of one batch."""

    def __init__(self, data: Path, kill: tuple[str, int, int] | None = None) -> None:
        self.kill = kill  # point, step, batch of the step
        self.model = SmallModel()
        self.loader = get_llama3_dataloader(
            data, GLOBAL_BATCH // ACCUMULATED, data, global_batch_size=GLOBAL_BATCH, num_workers=0
        )
        self.updates: list[list[list[int]]] = []  # the batches of each, by the first ids of their samples
        self.held: list[list[int]] = []
        self.save: Callable[[], object] = lambda: None

        def look(_: object, __: object, fields: dict[str, Any]) -> None:
            self.held.append(fields["input_ids"][:, 0].tolist())
            self.at("forward")

        self.model.register_forward_pre_hook(look, with_kwargs=True)
        # the last parameter whose gradient comes
        self.model.embedding.weight.register_post_accumulate_grad_hook(lambda _: self.at("backward"))

    def watch(self, optimizer: Any) -> None:
        def stepped(*_: object) -> None:
            self.updates.append(self.held)
            self.held = []

        optimizer.register_step_post_hook(stepped)

    def at(self, point: str) -> None:
        done = len(self.updates) - (point in ("after the optimizer", "counted"))
        batch = len(self.held) - 1 if point in ("forward", "backward") else ACCUMULATED - 1
        if (point, done, batch) == self.kill:
            self.kill = None
            self.save()
            raise Killed


def with_trainer(run: Run, folder: Path, *, resume: bool) -> None:
    class OwnTrainer(LoaderMixin, Trainer):
        pass

    class Points(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            run.at("before the optimizer")

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            run.at("after the optimizer")

        def on_step_end(self, *_: Any, **__: Any) -> None:
            run.at("counted")

    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=GLOBAL_BATCH // ACCUMULATED,
        gradient_accumulation_steps=ACCUMULATED,
        max_steps=END,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=4,  # so that it shows where the checkpoint's learning rate is of another step
        max_grad_norm=0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    trainer: Any = OwnTrainer(model=run.model, args=args, train_loader=run.loader, callbacks=[Points()])
    # As enable_jit_checkpoint does.
    run.save = lambda: trainer._save_checkpoint(trainer.model, trial=None)
    trainer.create_optimizer()
    run.watch(trainer.optimizer)
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == END


def with_lightning(run: Run, folder: Path, *, resume: bool) -> None:
    import lightning

    from loader.lightning import LoaderCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model

        def train_dataloader(self) -> Any:
            return run.loader

        def training_step(self, batch: Any, _: int) -> Any:
            num_labels = run.loader.labels_per_rank(self.device)
            loss = self.model(**batch, num_items_in_batch=num_labels).loss
            return loss * self.trainer.accumulate_grad_batches

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            run.watch(optimizer)
            return optimizer

        def on_before_optimizer_step(self, _: Any) -> None:
            run.at("before the optimizer")

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            run.at("after the optimizer")

        def on_train_batch_end(self, *_: Any) -> None:
            if not run.held:
                run.at("counted")

    trainer = lightning.Trainer(
        max_steps=END,
        accumulate_grad_batches=ACCUMULATED,
        use_distributed_sampler=False,
        callbacks=[LoaderCallback()],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    run.save = lambda: trainer.save_checkpoint(folder / "kept.ckpt")
    trainer.fit(Module(), ckpt_path=folder / "kept.ckpt" if resume else None)
    assert trainer.global_step == END


def with_accelerate(run: Run, folder: Path, *, resume: bool) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = run.loader.num_accumulated
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.5)
    run.watch(optimizer)
    model, optimizer, loader = accelerator.prepare(run.model, optimizer, run.loader)
    loader.follow(optimizer)
    run.save = lambda: accelerator.save_state(str(folder / "kept"))
    if resume:
        accelerator.load_state(str(folder / "kept"))
        accelerator.step = 0
    while loader.num_steps_delivered < END:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch, num_items_in_batch=loader.labels_per_rank()).loss
                accelerator.backward(loss * accelerator.gradient_accumulation_steps)
                if accelerator.sync_gradients:
                    run.at("before the optimizer")
                optimizer.step()
                if accelerator.sync_gradients:
                    run.at("after the optimizer")
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                run.at("counted")
            if loader.num_steps_delivered == END and loader.ends_step:
                break


FRAMEWORKS = {"transformers": with_trainer, "lightning": with_lightning, "accelerate": with_accelerate}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered_data(tmp_path_factory.mktemp("data"), NUM_SAMPLES, 3)


def by_hand(data: Path, num_warm_up: int) -> tuple[list[list[list[int]]], list[torch.Tensor]]:
    """The batches of each update, and the weights of gradient descent on the mean over a step's labels."""
    model = SmallModel()
    updates: list[list[list[int]]] = []
    loader = get_llama3_dataloader(data, GLOBAL_BATCH, data, num_workers=0)
    while len(updates) < END:
        for batch in loader:
            losses = model(**batch, num_items_in_batch=1).loss
            loss = losses / (batch["labels"][:, 1:] != -100).sum()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                rate = 0.5 * min(len(updates) / num_warm_up, 1) if num_warm_up else 0.5
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.sub_(gradient, alpha=rate)
            half = GLOBAL_BATCH // ACCUMULATED
            updates.append([part.tolist() for part in batch["input_ids"][:, 0].split(half)])
            if len(updates) == END:
                break
    return updates, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "framework", ["transformers", "accelerate", pytest.param("lightning", marks=pytest.mark.frameworks)]
)
def test_a_run_that_is_saved_and_killed_inside_of_a_step_trains_every_batch_once(
    data: Path, tmp_path: Path, framework: str
) -> None:
    if not find_spec(framework):
        pytest.skip(f"{framework} is not installed")
    expected, weights = by_hand(data, 4 if framework == "transformers" else 0)
    train = FRAMEWORKS[framework]
    for number, kill in enumerate(KILLS):
        first, second = Run(data, kill), Run(data)
        with pytest.raises(Killed):
            train(first, tmp_path / str(number), resume=False)
        train(second, tmp_path / str(number), resume=True)
        assert first.updates + second.updates == expected, kill
        for parameter, weight in zip(second.model.parameters(), weights, strict=True):
            torch.testing.assert_close(parameter.detach(), weight, msg=str(kill))
