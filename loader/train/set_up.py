"""Threads, precision and padding of a training process."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from loader.batch.batches import PadToken, choose_pad_token, log_pad_token
from loader.token_loader import TokenLoader
from shardprep.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The settings that ``set_up_training`` made."""

    bf16: bool
    num_threads: int  # of torch in this process
    pad: PadToken
    model_options: Mapping[str, Any]  # for from_pretrained, or a model's configuration

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context manager for the forward pass: bfloat16 if ``bf16``, else no change."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.autocast(device, torch.bfloat16, enabled=self.bf16)


def set_up_training(
    loader: TokenLoader | Any, *, bf16: bool = False, tf32: bool = True, num_threads: int | None = None
) -> TrainingSetup:
    """Set threads, precision and padding for this process and its child processes.

    Sets OMP_NUM_THREADS, MKL_NUM_THREADS and TOKENIZERS_PARALLELISM unless they are set. Rank 0 logs the
    settings at INFO. Raises UsageError for ``bf16`` on a GPU without bfloat16.

        setup = set_up_training(loader, bf16=True)
        model = AutoModelForCausalLM.from_pretrained("MODEL", **setup.model_options)
        with setup.autocast():
            loss = model(**batch).loss

    Args:
        loader: a TokenLoader or a transformers tokenizer. The tokenizer then pads to the right.
        bf16: let ``autocast`` compute in bfloat16; weights stay float32.
        tf32: compute float32 matrix products in TF32 on CUDA.
        num_threads: torch's threads in this process. Default: OMP_NUM_THREADS, unless torchrun set it to 1;
            else this process's share of the CPUs, minus one for each worker.
    """
    if bf16 and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise UsageError(f"{torch.cuda.get_device_name()} has no bfloat16; leave out bf16, keep tf32")
    is_loader = isinstance(loader, TokenLoader)
    tokenizer: Any = loader.tokenizer if is_loader else loader
    pad = choose_pad_token(tokenizer)
    tokenizer.padding_side = "right"
    tokenizer.pad_token = pad.token
    if not is_loader:  # a loader has already logged it
        log_pad_token(pad, tokenizer.eos_token_id)
    precision = "high" if tf32 else "highest"
    torch.set_float32_matmul_precision(precision)
    if num_threads is None:
        given = os.environ.get("OMP_NUM_THREADS", "")
        is_guess = given == "1" and "TORCHELASTIC_RUN_ID" in os.environ  # torchrun sets it for several ranks
        # Ranks of torchrun see all CPUs of the node; ranks of srun see only their own.
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
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a fork while its threads run may hang
    options = {"attn_implementation": "sdpa"}
    setup = TrainingSetup(bf16=bf16, num_threads=num_threads, pad=pad, model_options=options)
    if not is_loader or loader.process_rank.rank == 0:
        logger.info(f"set up for training: {setup}, tf32={tf32}")
    return setup
