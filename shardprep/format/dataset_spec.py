"""What all shards of a data set have in common: the plan, how samples are stored, and the tokenizer.

A tokenizer is known by its fingerprint, a hash of what decides the ids that it gives.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from shardprep.files import Digest, is_name_inside
from shardprep.format.checked_json import Fields, is_text
from shardprep.format.names import (
    MAX_PLAN_BYTES,
    MAX_SEQ_LEN,
    MAX_SHARDS,
    MOST_FRACTION,
    PLAN_NAME,
    Record,
    TokenFormat,
)
from shardprep.format.parts import PartsFile

if TYPE_CHECKING:
    import numpy as np

# The decoder, truncation and padding change no id of an encoded document.
_DERIVED = ("kind", "has_rows", "token_bytes")
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

    model_id: str
    fingerprint: Digest  # see tokenizer_fingerprint
    vocab_size: Annotated[int, 1, 2**32 - 1]  # added tokens included
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    @staticmethod
    def from_json(fields: Fields) -> TokenizerSpec:
        """Raises BrokenShard."""
        spec = fields.all_of(TokenizerSpec)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if (getattr(spec, name) or 0) >= spec.vocab_size:
                raise fields.wrong(name, getattr(spec, name), f"a whole number, 0 to {spec.vocab_size - 1}")
        return spec


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """Every manifest carries it whole."""

    plan_id: Digest
    num_shards: Annotated[int, 1, MAX_SHARDS]
    record: Record
    token_format: TokenFormat
    seq_len: Annotated[int, 0, MAX_SEQ_LEN]  # tokens per packed row; 0 unless packed
    append_eos: bool
    tokenizer: TokenizerSpec
    validation_fraction: Annotated[float, MOST_FRACTION] = 0.0  # see digests.py; absent where it is 0
    # These follow from the others, and are in no file.
    kind: str = field(init=False)  # how a sample's ids are stored: one of IDX_KINDS
    has_rows: bool = field(init=False)  # whether a sample is a row of seq_len tokens, and no document
    token_bytes: int = field(init=False)  # of a binary id

    def __post_init__(self) -> None:
        has_rows = self.record != "documents"
        object.__setattr__(self, "has_rows", has_rows)
        object.__setattr__(self, "kind", self.record if has_rows else self.token_format)
        object.__setattr__(self, "token_bytes", token_bytes(self.tokenizer.vocab_size))

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Of binary ids: uint16 or uint32, little-endian."""
        import numpy as np  # a command that reads a plan needs no numpy, which takes 0.1 s

        return np.dtype(f"<u{self.token_bytes}")

    def to_json(self) -> dict[str, Any]:
        """What a manifest and the index say of it."""
        found = dataclasses.asdict(self)
        left_out = (*_DERIVED, *(() if self.validation_fraction else ("validation_fraction",)))
        return {name: found[name] for name in found if name not in left_out}

    @staticmethod
    def from_json(fields: Fields) -> DatasetSpec:
        """Raises BrokenShard."""
        tokenizer = TokenizerSpec.from_json(fields.fields("tokenizer"))
        spec = fields.all_of(DatasetSpec, tokenizer=tokenizer)
        if spec.has_rows != (spec.seq_len > 0):
            raise fields.wrong("seq_len", spec.seq_len, f"1 to {MAX_SEQ_LEN}" if spec.has_rows else "0")
        if spec.has_rows and spec.token_format != "npy":
            raise fields.wrong("token_format", spec.token_format, "npy")
        return spec


def read_input_names(folder: Path) -> list[str]:
    """The inputs of a data set's plan, relative to its input folder; an idx names them by their position.

    Raises FileNotFoundError, NotADirectoryError, BrokenShard, UnknownVersion, ReadWriteError.
    """

    def names_of(fields: Fields, name: str, _: int) -> list[str]:
        return [
            item.right("path", _is_input, "a path below the input folder") for item in fields.objects(name)
        ]

    def _is_input(value: object) -> bool:
        return is_text(value) and is_name_inside(str(value))

    file = PartsFile(folder / PLAN_NAME)
    fields = file.read_head("shardprep-plan", max_bytes=MAX_PLAN_BYTES)
    if fields.has("parts"):
        return list(file.rows(fields.fields("parts"), "inputs", names_of))
    return names_of(fields, "inputs", 0)
