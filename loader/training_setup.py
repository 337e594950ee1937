"""Sets up threads, precision and padding for training in one call (docs/training_speed.md)."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from loader.batches import PadToken, choose_pad_token, log_pad_token
from loader.token_loader import TokenLoader
from shardprep.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The settings of ``set_up_training``."""

    bf16: bool
    num_threads: int  # of torch in this process
    pad: PadToken
    model_options: Mapping[str, Any]  # for from_pretrained, or a model's configuration

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the forward pass: bfloat16 where it was asked for."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.autocast(device, torch.bfloat16, enabled=self.bf16)


def set_up_training(
    loader: TokenLoader | Any, *, bf16: bool = False, tf32: bool = True, num_threads: int | None = None
) -> TrainingSetup:
    """Set threads, precision and padding for this process and those it starts.

    Rank 0 logs them at INFO. Raises UsageError.

    Args:
        loader: a TokenLoader, or a tokenizer of transformers, which then pads to the right.
        bf16: ``autocast`` computes in bfloat16; weights stay float32.
        tf32: float32 matrix products in TF32 where there is CUDA.
        num_threads: of torch in this process. Default: OMP_NUM_THREADS unless it is torchrun's guess, else
            this process's share of the CPUs, less one a worker. Sets OMP_NUM_THREADS, MKL_NUM_THREADS and
            TOKENIZERS_PARALLELISM where you have not.
    """
    if bf16 and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise UsageError(f"{torch.cuda.get_device_name()} has no bfloat16; leave bf16 out, tf32 stays")
    is_loader = isinstance(loader, TokenLoader)
    tokenizer: Any = loader.tokenizer if is_loader else loader
    pad = choose_pad_token(tokenizer)
    tokenizer.padding_side, tokenizer.pad_token = "right", pad.token
    if not is_loader:  # the collator of a loader has said it
        log_pad_token(pad, tokenizer.eos_token_id)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if num_threads is None:
        given = os.environ.get("OMP_NUM_THREADS", "")
        is_guess = given == "1" and "TORCHELASTIC_RUN_ID" in os.environ  # torchrun sets it for several ranks
        # torchrun's ranks see all CPUs of the node; srun's their own.
        num_ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
        num_workers = loader.num_workers if is_loader else 0
        num_threads = max(len(os.sched_getaffinity(0)) // num_ranks - num_workers, 1)
        if given.isdigit() and int(given) and not is_guess:
            num_threads = int(given)
    if num_threads < 1:
        raise UsageError.of_value("num_threads", num_threads, "1 or more")
    torch.set_num_threads(num_threads)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(num_threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a fork beside its threads may hang
    if not is_loader or loader.process_rank.rank == 0:
        precision = f"{'bfloat16' if bf16 else 'float32'}, TF32 on CUDA: {'yes' if tf32 else 'no'}"
        logger.info("set up for training: %s; attention: sdpa; %d threads", precision, num_threads)
    return TrainingSetup(
        bf16=bf16, num_threads=num_threads, pad=pad, model_options={"attn_implementation": "sdpa"}
    )
