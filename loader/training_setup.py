"""What a training script sets before its first step, in one call; see docs/training_speed.md."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from loader.batches import PadToken, choose_pad_token
from loader.token_loader import TokenLoader
from loader.workers import whole_number
from shardprep.errors import UsageError

logger = logging.getLogger(__name__)

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """What was set; ``lines`` says it for a log."""

    device_type: str  # cuda or cpu
    bf16: bool
    num_threads: int  # of torch in this process
    pad: PadToken
    model_options: Mapping[str, Any]  # for from_pretrained, or a model's configuration
    lines: tuple[str, ...]

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """For the forward pass: bfloat16 where it was asked for."""
        if not self.bf16:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, torch.bfloat16)


def set_up_training(
    loader: TokenLoader | Any,
    *,
    bf16: bool = False,
    tf32: bool = True,
    num_threads: int | None = None,
    environ: MutableMapping[str, str] | None = None,
) -> TrainingSetup:
    """Set what follows, for this process and those it starts, and say it once, at INFO on rank 0.

    Args:
        loader: a TokenLoader, or a tokenizer of transformers.
        bf16: ``autocast`` computes in bfloat16; refused on a GPU that has none. Weights stay float32.
        tf32: float32 matrix products in TF32 where there is CUDA: "high" in torch's words.
        num_threads: of torch in this process. Default: OMP_NUM_THREADS, unless that is a launcher's guess;
            else the CPUs that this process may use, shared among the ranks of torchrun on this node, one of
            them left for each worker that reads.
        environ: the process's own if not given.

    The tokenizer pads to the right with a token of its own, the same as the loader's; where only EOS is left
    for it, that is a warning. ``model_options`` has ``attn_implementation="sdpa"``, whose fused kernels are
    switched on. Raises UsageError.
    """
    environ = os.environ if environ is None else environ
    if bf16 and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise UsageError(f"{torch.cuda.get_device_name()} has no bfloat16; leave bf16 out, tf32 stays")
    is_loader = isinstance(loader, TokenLoader)
    tokenizer: Any = loader.tokenizer if is_loader else loader
    threads = _set_threads(num_threads, loader.num_workers if is_loader else 0, environ)
    pad = choose_pad_token(tokenizer)
    tokenizer.padding_side, tokenizer.pad_token = "right", pad.token
    if pad.token_id == tokenizer.eos_token_id and not is_loader:  # of a loader, its collator has said it
        logger.warning(
            "the tokenizer has no pad token but EOS (%s): a loss or collator that leaves padding out by its "
            "id never teaches the model to end; give it a pad token of its own",
            pad.token,
        )
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    for switch in (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_mem_efficient_sdp):
        switch(True)
    setup = TrainingSetup(
        device_type="cuda" if torch.cuda.is_available() else "cpu",
        bf16=bf16,
        num_threads=threads,
        pad=pad,
        model_options={"attn_implementation": "sdpa"},
        lines=(
            f"precision: {'bfloat16' if bf16 else 'float32'}; TF32 on CUDA: {'yes' if tf32 else 'no'}",
            f"attention: sdpa; threads: {threads} per process",
            f"padding: right, with {pad.token} (id {pad.token_id}), {pad.reason}",
        ),
    )
    if not is_loader or loader.process_rank.rank == 0:
        logger.info("set up for training\n  %s", "\n  ".join(setup.lines))
    return setup


def _set_threads(asked: int | None, num_workers: int, environ: MutableMapping[str, str]) -> int:
    """As many as asked, as the user set, or the CPUs of this rank but one for each worker."""
    text, local = environ.get("OMP_NUM_THREADS", ""), environ.get("LOCAL_WORLD_SIZE", "1")
    is_guess = text == "1" and "TORCHELASTIC_RUN_ID" in environ  # of torchrun, for several ranks
    if asked is None and text.isdigit() and int(text) and not is_guess:
        asked = int(text)
    if asked is None:  # torchrun's ranks see all CPUs of the node; srun's their own
        cpus = len(os.sched_getaffinity(0)) // max(int(local) if local.isdigit() else 1, 1)
        asked = max(cpus - num_workers, 1)
    count = whole_number("num_threads", asked, least=1)
    torch.set_num_threads(count)
    for name in _THREAD_VARIABLES:
        environ.setdefault(name, str(count))
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a fork beside its threads may hang, and it warns
    return count
