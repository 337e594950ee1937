"""What every manifest of a data set repeats: its tokenizer, its kind of samples, and how ids are stored."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from shardprep.files import Digest

if TYPE_CHECKING:
    import numpy as np
from shardprep.format.json_files import Text
from shardprep.format.names import MAX_FRACTION, MAX_SEQ_LEN, MAX_SHARDS

Record = Literal["documents", "packed", "chat"]
TokenFormat = Literal["json", "npy"]
# Keys of tokenizer.json that decide ids; the decoder, truncation and padding do not.
_KEYS_OF_IDS = ("added_tokens", "normalizer", "pre_tokenizer", "model", "post_processor")


def token_bytes(vocab_size: int) -> int:
    """Return the bytes per binary token id: 2 if all ids and ``blank_id`` fit into uint16, else 4."""
    return 2 if vocab_size < 1 << 16 else 4


# Replaces each id of a blanked document. No vocabulary and no padded embedding has this id, so a reader that
# does not handle blanked documents fails instead of training on them.
BLANK = 2**31 - 1


def blank_id(vocab_size: int) -> int:
    """Return what stands for BLANK in binary ids: BLANK, or for 2-byte ids 65535, their largest value."""
    return BLANK if token_bytes(vocab_size) == 4 else 2**16 - 1


def fingerprint_of(data: dict[str, Any]) -> str:
    """Return the sha256, in hex, of what decides ids in a parsed ``tokenizer.json``, in any key order."""
    kept = {name: data.get(name) for name in _KEYS_OF_IDS}
    model = kept["model"] or {}
    merges = model.get("merges")
    vocab = model.get("vocab")
    if merges:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
        model = {**model, "merges": pairs}
        kept["model"] = model
    if isinstance(vocab, dict):  # sorted here: json would sort pairs, which takes three times as long
        kept["model"] = {**model, "vocab": {token: vocab[token] for token in sorted(vocab)}}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """The tokenizer of a data set."""

    model_id: Text
    fingerprint: Digest  # see fingerprint_of
    vocab_size: Annotated[int, Meta(ge=1, le=2**32 - 1)]  # added tokens included
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    def __post_init__(self) -> None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if not 0 <= (getattr(self, name) or 0) < self.vocab_size:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 to {self.vocab_size - 1}")


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """The properties of a data set that every manifest repeats."""

    plan_id: Digest
    num_shards: Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
    record: Record
    token_format: TokenFormat
    seq_len: Annotated[int, Meta(ge=0, le=MAX_SEQ_LEN)]  # tokens per packed row; 0 unless packed
    append_eos: bool
    tokenizer: TokenizerSpec
    validation_fraction: Annotated[float, Meta(ge=0, le=MAX_FRACTION)] = 0.0  # see documents.py

    def __post_init__(self) -> None:
        if self.has_rows != (self.seq_len > 0):
            expected = f"1 to {MAX_SEQ_LEN}" if self.has_rows else "0"
            raise ValueError(f"seq_len is {self.seq_len}, expected {expected} for {self.record}")
        if self.has_rows and self.token_format != "npy":
            raise ValueError(f"token_format is {self.token_format}, expected npy for {self.record}")

    @property
    def has_rows(self) -> bool:
        """Return whether a sample is a row of ``seq_len`` tokens instead of a document."""
        return self.record != "documents"

    @cached_property
    def kind(self) -> str:
        """Return how ids are stored, a key of IDX_DTYPES."""
        return self.record if self.has_rows else self.token_format

    @property
    def token_bytes(self) -> int:
        return token_bytes(self.tokenizer.vocab_size)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of binary ids: uint16 or uint32, little-endian."""
        import numpy as np

        return np.dtype(f"<u{self.token_bytes}")
