"""A user's script as a type checker sees it: `make lint` checks it, nothing runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loader import get_llama3_dataloader

if TYPE_CHECKING:
    from typing_extensions import assert_type


def train(model: torch.nn.Module, device: torch.device) -> float:
    loader = get_llama3_dataloader("DATA", batch_size=8, seq_len=4096, boundaries="transformers")
    loss = torch.zeros(())
    for batch in loader:
        moved = {name: value.to(device) for name, value in batch.items()}
        loss = model(**moved, **batch.to(device)).loss
        assert_type(batch["labels"], torch.Tensor)
    return loss.item() + loader.metrics.wait_s
