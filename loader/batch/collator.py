"""``CausalLMCollator``: a DataCollatorForLanguageModeling that makes the loader's batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import BatchEncoding, DataCollatorForLanguageModeling

from loader.batch.batches import Padder, PadToken, choose_pad_token, log_pad_token
from loader.read.chunks import IGNORED
from shardprep.errors import UsageError

_FIELDS = {"input_ids", "attention_mask", "special_tokens_mask", "labels"}


@dataclass
class CausalLMCollator(DataCollatorForLanguageModeling):
    """DataCollatorForLanguageModeling with ``mlm=False``, padding to the right, and labels of a real EOS.

    ``CausalLMCollator(tokenizer)([[1, 2, 3], [4]])`` returns fields of int64[2, 3]. As the loader's
    ``collate_fn`` it is not called: the loader makes the same batches from arrays.
    """

    mlm: bool = False
    pad_to_length: int | None = None  # width of all batches, instead of the longest sample's
    pad: PadToken = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]  # of transformers
        if self.mlm:
            raise UsageError("mlm=True does not fit a causal model; pass your own collate_fn for it")
        self.pad = choose_pad_token(self.tokenizer)
        log_pad_token(self.pad, self.tokenizer.eos_token_id)

    @property
    def padder(self) -> Padder:
        """Return what makes the tensors."""
        multiple = self.pad_to_multiple_of
        return Padder(pad=self.pad, pad_to_multiple_of=multiple, pad_to_length=self.pad_to_length)

    def torch_call(self, examples: list[Any]) -> BatchEncoding:  # type: ignore[override]
        """Collate samples: lists of ids, or dicts with ``input_ids`` and optionally ``labels``."""
        given = [each if isinstance(each, Mapping) else {"input_ids": each} for each in examples]
        unknown = set[str]().union(*given) - _FIELDS
        if unknown:
            raise UsageError(f"samples have {sorted(unknown)}, expected input_ids; pass your own collate_fn")
        # rows: int64[tokens] of each sample
        rows = [np.asarray(fields["input_ids"], np.int64) for fields in given]
        num_tokens = np.array([len(row) for row in rows])
        batch = self.padder.of_documents(np.concatenate(rows), num_tokens)
        for row, fields in enumerate(given):
            for name in {"attention_mask", "labels"} & fields.keys():
                values = torch.as_tensor(fields[name])
                batch[name][row, : len(values)] = values
        batch["labels"].masked_fill_(batch["attention_mask"] == 0, IGNORED)
        return BatchEncoding(batch)

    def numpy_call(self, examples: list[Any]) -> BatchEncoding:  # type: ignore[override]
        """Collate like ``torch_call``, but return numpy arrays."""
        return BatchEncoding({name: tensor.numpy() for name, tensor in self.torch_call(examples).items()})
