"""Train by the examples of the frameworks' pages in docs/, in one process or in real process groups.

    python -m tests.framework_pages NUMBERED OUT

The libraries are imported once, and the ranks of each run are forked (tests/ranks.py).
"""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput

from loader import check_boundaries, evaluation_loss, mask_documents
from loader.trainer import LoaderMixin
from shardprep.errors import Refused, UsageError
from tests.attention_families import small_model
from tests.documented import examples_of
from tests.ranks import Run, start_ranks
from tests.world import open_loader

NEEDS = {  # a page or a section of docs/training_frameworks.md -> what it needs
    "own_loop": "torch", "trainer": "transformers", "accelerate": "accelerate", "lightning": "lightning",
    "fsdp2": "torch.distributed.fsdp", "deepspeed": "deepspeed",
}  # fmt: skip
SECTIONS = {
    "trainer": "Trainer",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "fsdp2": "FSDP2",
    "deepspeed": "DeepSpeed",
}
GLOBAL_BATCH = 8
STEPS = 107 // GLOBAL_BATCH  # per epoch of 107 samples
STOP, LATER, END = 7, STEPS + 2, STEPS + 9  # the first is in epoch 0, the others in epoch 1
# Run of a page: (ranks, samples per batch, first step, last step). The last three share one checkpoint.
PAGE_RUNS = {"whole": (1, 1, 0, END), "stopped": (2, 2, 0, STOP), "resumed": (1, 8, STOP, LATER),
             "again": (2, 4, LATER, END)}  # fmt: skip
kept: list[Any] = []  # objects that must not be freed: DDP's destructor may deadlock on the GIL with gloo


class SmallModel(nn.Module):
    """A model with the interface of transformers. Its loss is the sum of losses over num_items_in_batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss_type = "ForCausalLM"  # Trainer counts labels by it
        self.embedding, self.head = nn.Embedding(200, 8), nn.Linear(8, 200)
        self.seen: list[list[int]] = []  # first ids of each training batch
        self.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, _: object, __: object, fields: dict[str, Any]) -> None:
        if self.training:
            self.seen.append(fields["input_ids"][:, 0].tolist())

    def forward(
        self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any
    ) -> CausalLMOutput:
        logits = self.head(self.embedding(input_ids))
        losses = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        num_labels = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutput(loss=losses / num_labels, logits=logits)


def train_by_hand(data: Path, num_steps: int, num_warm_up: int = 0) -> SmallModel:
    """Train a model on each global batch as one batch, with the mean loss over its labels."""
    model, loader = SmallModel(), open_loader(data, GLOBAL_BATCH, model_id=data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(islice(chain.from_iterable(repeat(loader)), num_steps)):
        optimizer.param_groups[0]["lr"] = 0.1 * min(step / num_warm_up, 1) if num_warm_up else 0.1
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def code_of(page: str, number: int = 0) -> str:
    """Return an example of a page, changed to one document per row, which is simple to train by hand."""
    section = SECTIONS.get(page)
    examples = (
        examples_of("training_frameworks.md", f"## {section}")
        if section
        else examples_of(f"training_{page}.md")
    )
    code = examples[number]
    return re.sub(r'\s*seq_len=2048,\s*boundaries="transformers",?', "", code)


def run_page(
    page: str,
    names: dict[str, Any],
    *,
    checkpoint: str,
    num_steps: int,
    batch_size: int = 4,
    num_ranks: int = 1,
    num_workers: int = 0,
    **more: Any,
) -> None:
    """Train by a page's example, which resumes from an existing checkpoint.

    ``names`` has DATA, model and rank, and gets the names that the example defines. ``more`` are arguments of
    the framework's trainer.
    """
    code = re.sub(r"num_workers=2,\s*", "", code_of(page))
    given = f"global_batch_size=8, model_id=DATA, num_workers={num_workers}"
    for written in ("4", "8 // num_ranks", "8 // self.trainer.world_size"):
        code = code.replace(f"batch_size={written}", f"batch_size={batch_size}")
    assert f"batch_size={batch_size}" in code
    assert code.count("global_batch_size=8") == 1
    code = code.replace("global_batch_size=8", given)
    code = code.replace("callbacks=[LoaderCallback()]", "callbacks=[LoaderCallback(), *more_callbacks]")
    accumulated = GLOBAL_BATCH // (num_ranks * batch_size)
    arguments: dict[str, dict[str, Any]] = {
        "accelerate": {"cpu": True},
        "trainer": {
            "use_cpu": True, "report_to": [], "disable_tqdm": True,
            "logging_strategy": "no", "save_strategy": "steps", "save_steps": num_steps,
            "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0,
        },
        "lightning": lightning_arguments(num_ranks, checkpoint) | {"accumulate_grad_batches": accumulated},
    }  # fmt: skip
    if "RANK" in os.environ:
        arguments["trainer"]["ddp_backend"] = "gloo"
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    # By default DeepSpeed clips gradients, which train_by_hand does not.
    config |= {"gradient_accumulation_steps": accumulated, "gradient_clipping": 0}
    names |= {"CHECKPOINT": checkpoint, "num_steps": num_steps, "num_ranks": num_ranks, "device": "cpu"}
    names |= {"optimizer": torch.optim.SGD(names["model"].parameters(), lr=0.1), "config": config}
    names |= {"more_arguments": {**arguments.get(page, {}), **more}}
    names.setdefault("more_callbacks", [])
    exec(compile(code, page, "exec"), names)


def lightning_arguments(num_ranks: int, folder: str) -> dict[str, Any]:
    return {
        "accelerator": "cpu", "devices": num_ranks, "strategy": "ddp" if num_ranks > 1 else "auto",
        "default_root_dir": f"{folder} of lightning", "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False,
    }  # fmt: skip


# Functions of ranks


def train_by_page(rank: int, run: Run, out: Path) -> Any:
    """Train, and return the first ids of each batch and the final weights."""
    if run["page"] in ("own_loop", "fsdp2", "deepspeed"):
        torch.distributed.init_process_group("gloo")
    model = SmallModel()
    names: dict[str, Any] = {"DATA": run["data"], "model": model, "rank": rank}
    if run["page"] == "own_loop":  # DDP keeps ranks in step, so that none finds the other's new checkpoint
        names["model"] = DistributedDataParallel(model)
    run_page(
        run["page"], names, checkpoint=f"{out}/{run['checkpoint']}", num_steps=run["last"],
        batch_size=run["batch_size"], num_ranks=run["world"], num_workers=int(run["world"] == 2),
    )  # fmt: skip
    if run["page"] == "trainer":
        epoch = names["trainer"].state.epoch
        assert abs(epoch - run["last"] / STEPS) < 1e-9, f"epoch is {epoch} after step {run['last']}"
    kept.append(names)
    whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
    return model.seen, [weights.detach() for weights in whole]


def evaluate(_: int, run: Run, out: Path) -> Any:
    """Return the validation loss of Trainer, of evaluation_loss, and of the example for Lightning."""
    model, data = SmallModel(), run["data"]
    quiet: Any = {"use_cpu": True, "ddp_backend": "gloo", "report_to": [], "disable_tqdm": True}
    args = TrainingArguments(f"{out}/e", per_device_train_batch_size=2, **quiet)
    train_loader = open_loader(data, 2, model_id=data)
    eval_loader = open_loader(data, run["batch_size"], model_id=data, split="validation")
    kind: Any = type("OwnTrainer", (LoaderMixin, Trainer), {})
    trainer = kind(model=model, args=args, train_loader=train_loader, eval_loader=eval_loader)
    found = [trainer.evaluate()["eval_loss"], evaluation_loss(model, eval_loader)]
    if find_spec("lightning"):
        names: Any = {"model": model}
        exec(compile(code_of("lightning", 1), "docs/training_frameworks.md", "exec"), names)
        how = lightning_arguments(run["world"], f"{out}/e")
        validating = names["lightning"].Trainer(**how, use_distributed_sampler=False)
        (logged,) = validating.validate(names["ValidatedLlama"](), eval_loader, verbose=False)
        found.append(logged["eval_loss"])
    kept.append(trainer)
    return found


def check_wrapped_models(rank: int, run: Run, _: Path) -> Any:
    """Return the verdicts of check_boundaries, also if only one rank has several documents to check."""
    options = {"model_id": run["data"], "seq_len": 16, "boundaries": "transformers"}
    packed: Any = open_loader(run["data"], 4, **options).peek()
    one = {**packed, "position_ids": torch.arange(16).expand(4, 16)}
    one |= {"cu_seq_lens_q": torch.arange(0, 65, 16, dtype=torch.int32)}
    mesh = init_device_mesh("cpu", (2,))
    found = []
    wraps: list[Any] = [DistributedDataParallel, lambda model: fully_shard(model, mesh=mesh)]
    for wrap in wraps:
        for is_masked in (False, True):
            model = small_model("opt", "sdpa")
            if is_masked:
                mask_documents(model)
            model = wrap(model)
            kept.append(model)
            for batch in (packed, packed if rank else one, one):
                try:
                    check_boundaries(model, batch)
                    found.append("safe")
                except (UsageError, Refused) as error:
                    found.append(type(error).__name__)
            model(**packed).loss.backward()
    return found


def runs_of(page: str) -> list[Run]:
    """Return the runs of a page, on one rank with accumulation and on several ranks."""
    runs: list[Run] = []
    for name, (world, batch_size, _, last) in PAGE_RUNS.items():
        run = {"page": page, "name": f"{page} {name}", "world": world, "batch_size": batch_size, "last": last}
        runs.append({**run, "checkpoint": f"{page} {name}" if name == "whole" else page})
    return runs


EVALUATIONS: list[Run] = [  # one model on several world sizes and batch sizes
    {"name": f"loss {world}x{size}", "world": world, "batch_size": size}
    for world, size in ((1, 8), (1, 1), (2, 3), (4, 16))
]


if __name__ == "__main__":
    data, out = sys.argv[1:]
    launched = {"is_launched": True, "data": data}
    pages = chain.from_iterable(runs_of(page) for page, needs in NEEDS.items() if find_spec(needs))
    runs = [{"how": train_by_page, **launched, **run} for run in pages]
    runs += [{"how": evaluate, **launched, **run} for run in EVALUATIONS]
    runs.append({"how": check_wrapped_models, "name": "wrapped models", "world": 2, "data": data})
    start_ranks(runs, Path(out))
