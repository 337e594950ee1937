"""Token ids -> text, by the tokenizer of a data set.

A byte-level tokenizer (Llama 3, GPT-2, Qwen) gives back exactly what it encoded, so a table of the bytes of
each token is enough: 5 ns a byte. Of others the text is what ``tokenizers`` decodes, and may differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from preprocess.make.engines import Ids, Numbers, ids_around, load_tokenizer, split_tokenizer
from shardprep.files import read_regular
from shardprep.format.names import DIGEST_BYTES, MAX_TOKENIZER_BYTES, TOKENIZER_DIR, TOKENIZER_FILE
from shardprep.format.plan import Plan


class TokenTexts:
    """The texts of a data set's ids. Raises ReadWriteError where its tokenizer cannot be read."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        path = folder / TOKENIZER_DIR / TOKENIZER_FILE
        self._tokenizer = load_tokenizer(path)
        head, _ = split_tokenizer(read_regular(path, max_bytes=MAX_TOKENIZER_BYTES))
        self._pieces = _bytes_of_tokens(self._tokenizer, head)
        special = {token["id"] for token in head.get("added_tokens") or [] if token["special"]}
        # Between words a control token stands like white space.
        words = [b"\n" if number in special else piece for number, piece in enumerate(self._pieces)]
        self._flat = np.frombuffer(b"".join(words), np.uint8)
        self._lengths = np.array([len(word) for word in words], np.int64)
        self._begins = np.cumsum(self._lengths) - self._lengths
        # What stands around each text; None where the text of a digest cannot be told from the ids.
        self._around: tuple[list[int], list[int]] | None = None
        with contextlib.suppress(ValueError):
            adds = plan.options.add_special_tokens
            before, after = ids_around(head.get("post_processor") if adds else None)
            after = after if plan.end_id is None else [*after, plan.end_id]
            if self._pieces and not plan.options.is_chat:  # a conversation's digest is of its messages
                self._around = before, after

    def texts(self, ids: Ids, offsets: Numbers) -> list[str]:
        """Return the text of each document; document i has ``ids[offsets[i]:offsets[i + 1]]``."""
        if not self._pieces:
            known = np.where(ids < self._tokenizer.get_vocab_size(with_added_tokens=True), ids, 0)
            lists = [known[begin:end].tolist() for begin, end in itertools.pairwise(offsets.tolist())]
            return list(self._tokenizer.decode_batch(lists, skip_special_tokens=True))
        ids = np.minimum(ids, len(self._pieces) - 1)  # of blanked documents there is no text
        lengths = self._lengths[ids]
        ends = np.cumsum(np.concatenate([[0], lengths]))
        raw = self._flat[np.repeat(self._begins[ids] - ends[:-1], lengths) + np.arange(ends[-1])].tobytes()
        bounds = itertools.pairwise(ends[offsets].tolist())
        return [raw[begin:end].decode("utf-8", "replace") for begin, end in bounds]

    def text(self, ids: list[int]) -> str:
        """Return the text of some ids, control tokens included."""
        if not self._pieces:
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))
        return b"".join(self._pieces[number] for number in ids).decode("utf-8", "replace")

    def digest(self, ids: list[int]) -> str | None:
        """Return the digest, in hex, of the text that a document was made of; None if it cannot be known."""
        if self._around is None:
            return None
        before, after = self._around
        begin, end = len(before), len(ids) - len(after)
        if ids[:begin] != before or ids[end:] != after:
            return None
        text = b"".join(self._pieces[number] for number in ids[begin:end])
        return hashlib.sha256(text).digest()[:DIGEST_BYTES].hex()


def _bytes_of_tokens(tokenizer: Any, head: dict[str, Any]) -> list[bytes]:
    """Return the bytes of each token, with none behind the last one; nothing if it is not byte-level."""
    step = head.get("pre_tokenizer") or {}
    has_prefix = any(each.get("add_prefix_space") for each in [step, *step.get("pretokenizers", [])])
    if (head.get("decoder") or {}).get("type") != "ByteLevel" or head.get("normalizer") or has_prefix:
        return []
    # GPT-2's letters for bytes: the printable ones of Latin-1 are themselves, the others follow from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    bytes_of_letters = {byte: byte for byte in printable} | {256 + n: byte for n, byte in enumerate(others)}
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if not all(chr(letter) in vocabulary for letter in bytes_of_letters):
        return []
    added = {token["id"]: token["content"].encode() for token in head.get("added_tokens") or []}
    pieces = [b""] * (max([*vocabulary.values(), *added]) + 2)
    for token, number in vocabulary.items():
        pieces[number] = token.translate(bytes_of_letters).encode("latin-1", "ignore")
    for number, content in added.items():
        pieces[number] = content
    return pieces
