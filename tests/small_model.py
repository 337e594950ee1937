"""A model that trains in no time, and computes its loss as those of transformers do."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import CausalLMOutput


class SmallModel(torch.nn.Module):
    """Takes what a model of transformers takes, and gives the sum of losses over num_items_in_batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss_type = "ForCausalLM"  # Trainer counts labels by it
        self.embedding = torch.nn.Embedding(200, 8)
        self.head = torch.nn.Linear(8, 200)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **_: Any
    ) -> CausalLMOutput:
        logits = self.head(self.embedding(input_ids))
        losses = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        num_labels = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutput(loss=losses / num_labels, logits=logits)
