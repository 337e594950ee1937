"""Run the examples of docs/training_NAME.md, of frameworks, with all that they leave to their reader."""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from tests.documented import examples_of

NEEDS = {  # docs/training_NAME.md -> what it needs
    "own_loop": "torch", "trainer": "transformers", "accelerate": "accelerate", "lightning": "lightning",
    "fsdp2": "torch.distributed.fsdp", "deepspeed": "deepspeed",
}  # fmt: skip
GLOBAL_BATCH = 8


def code_of(page: str, number: int = 0) -> str:
    """One of a page's examples; with a document a row, of which gradients by hand are easily written down."""
    code = examples_of(f"training_{page}.md")[number]
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
    """Train by a page's example, which goes on from a checkpoint that is there.

    ``names`` has DATA, model and rank; what the example defines comes to it while it runs. ``more`` are
    arguments of the framework's trainer.
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
        "lightning": {
            "accelerator": "cpu", "devices": num_ranks, "strategy": "ddp" if num_ranks > 1 else "auto",
            "accumulate_grad_batches": accumulated, "default_root_dir": f"{checkpoint} of lightning",
            "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        },
    }  # fmt: skip
    if "RANK" in os.environ:
        arguments["trainer"]["ddp_backend"] = "gloo"
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    # DeepSpeed's default clips gradients, which the hand does not.
    config |= {"gradient_accumulation_steps": accumulated, "gradient_clipping": 0}
    names |= {"CHECKPOINT": checkpoint, "num_steps": num_steps, "num_ranks": num_ranks, "device": "cpu"}
    names |= {"optimizer": torch.optim.SGD(names["model"].parameters(), lr=0.1), "config": config}
    names |= {"more_arguments": {**arguments.get(page, {}), **more}}
    names.setdefault("more_callbacks", [])
    exec(compile(code, page, "exec"), names)
