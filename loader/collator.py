"""transformers' DataCollatorForLanguageModeling with the loader's batches: what ``loader.collate_fn`` is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import BatchEncoding, DataCollatorForLanguageModeling

from loader.batches import PaddedBatches, PadToken, choose_pad_token, log_pad_token
from loader.chunks import IGNORED
from shardprep.errors import UsageError

_FIELDS = {"input_ids", "attention_mask", "special_tokens_mask", "labels"}


@dataclass
class CausalLMCollator(DataCollatorForLanguageModeling):
    """DataCollatorForLanguageModeling with ``mlm=False``, padding to the right, labels of real EOS kept.

    Given to the loader as ``collate_fn`` it is not called: batches are made from arrays then, too.
    """

    mlm: bool = False
    pad_to_length: int | None = None  # one width for all batches, instead of the longest sample's
    pad: PadToken = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]  # of transformers
        if self.mlm:
            raise UsageError("mlm=True is not for a causal model; pass your own collate_fn for it")
        self.pad = choose_pad_token(self.tokenizer)
        log_pad_token(self.pad, self.tokenizer.eos_token_id)

    @property
    def batches(self) -> PaddedBatches:
        """Return what makes the tensors."""
        multiple = self.pad_to_multiple_of
        return PaddedBatches(pad=self.pad, pad_to_multiple_of=multiple, pad_to_length=self.pad_to_length)

    def torch_call(self, examples: list[Any]) -> BatchEncoding:  # type: ignore[override]
        """Collate samples as transformers gives them: ids, or dicts with ``input_ids`` (and ``labels``)."""
        given = [each if isinstance(each, Mapping) else {"input_ids": each} for each in examples]
        if unknown := {name for fields in given for name in fields} - _FIELDS:
            raise UsageError(f"samples have {sorted(unknown)}, expected input_ids; pass your own collate_fn")
        ids = [np.asarray(fields["input_ids"], np.int64) for fields in given]
        batch = self.batches.of_documents(np.concatenate(ids), np.array([len(row) for row in ids]))
        for row, fields in enumerate(given):
            for name in {"attention_mask", "labels"} & fields.keys():
                values = torch.as_tensor(fields[name])
                batch[name][row, : len(values)] = values
        batch["labels"].masked_fill_(batch["attention_mask"] == 0, IGNORED)
        return BatchEncoding(batch)

    def numpy_call(self, examples: list[Any]) -> BatchEncoding:  # type: ignore[override]
        """Collate as ``torch_call`` does, into numpy arrays."""
        return BatchEncoding({name: tensor.numpy() for name, tensor in self.torch_call(examples).items()})
