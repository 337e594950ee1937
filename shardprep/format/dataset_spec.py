"""What all shards of a data set have in common: the plan, how samples are stored, and the tokenizer.

A tokenizer is known by its fingerprint, a hash of what decides the ids that it gives.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from shardprep.files import Digest
from shardprep.format.json_files import Text
from shardprep.format.names import MAX_SEQ_LEN, MAX_SHARDS, MOST_FRACTION, Record, TokenFormat

if TYPE_CHECKING:
    import numpy as np

# The decoder, truncation and padding change no id of an encoded document.
_DECISIVE = ("added_tokens", "normalizer", "pre_tokenizer", "model", "post_processor")


def token_bytes(vocab_size: int) -> int:
    """Return the bytes of a binary token id: 2 where all ids and ``blank_id`` fit into uint16, else 4."""
    return 2 if vocab_size < 1 << 16 else 4


# In place of each id of a blanked document: no vocabulary has it, and no embedding, however it is padded. So
# a reader that does not know of blanked documents fails, and never trains on them.
BLANK = 2**31 - 1


def blank_id(vocab_size: int) -> int:
    """Return BLANK as binary ids say it; those of two bytes have their largest value for it."""
    return BLANK if token_bytes(vocab_size) == 4 else 2**16 - 1


def tokenizer_fingerprint(tokenizer_json: str) -> str:
    """sha256, in hex, of what decides ids in a ``tokenizer.json``, however its keys and merges stand."""
    return fingerprint_of(json.loads(tokenizer_json))


def fingerprint_of(data: dict[str, Any]) -> str:
    """The same of a ``tokenizer.json`` that is parsed already, as which it is left."""
    kept = {name: data.get(name) for name in _DECISIVE}
    model = kept["model"] or {}
    merges, vocab = model.get("merges"), model.get("vocab")
    if merges:
        pairs = [m.split(" ") if isinstance(m, str) else m for m in merges]
        kept["model"] = model = {**model, "merges": pairs}
    if isinstance(vocab, dict):  # json would sort pairs, which takes three times as long
        kept["model"] = {**model, "vocab": {token: vocab[token] for token in sorted(vocab)}}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """What shards remember of the tokenizer that made them."""

    model_id: Text
    fingerprint: Digest  # see tokenizer_fingerprint
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
    """Every manifest carries it whole."""

    plan_id: Digest
    num_shards: Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
    record: Record
    token_format: TokenFormat
    seq_len: Annotated[int, Meta(ge=0, le=MAX_SEQ_LEN)]  # tokens per packed row; 0 unless packed
    append_eos: bool
    tokenizer: TokenizerSpec
    validation_fraction: Annotated[float, Meta(ge=0, le=MOST_FRACTION)] = 0.0  # see documents.py

    def __post_init__(self) -> None:
        if self.has_rows != (self.seq_len > 0):
            expected = f"1 to {MAX_SEQ_LEN}" if self.has_rows else "0"
            raise ValueError(f"seq_len is {self.seq_len}, expected {expected} for {self.record}")
        if self.has_rows and self.token_format != "npy":
            raise ValueError(f"token_format is {self.token_format}, expected npy for {self.record}")

    @property
    def has_rows(self) -> bool:
        """Whether a sample is a row of ``seq_len`` tokens, and no document."""
        return self.record != "documents"

    @property
    def kind(self) -> str:
        """How a sample's ids are stored: one of IDX_KINDS."""
        return self.record if self.has_rows else self.token_format

    @property
    def token_bytes(self) -> int:
        """Bytes of a binary id."""
        return token_bytes(self.tokenizer.vocab_size)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Of binary ids: uint16 or uint32, little-endian."""
        import numpy as np

        return np.dtype(f"<u{self.token_bytes}")

    def to_json(self) -> dict[str, Any]:
        """Return what a manifest and the index say of it."""
        return dataclasses.asdict(self)
