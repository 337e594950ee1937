"""Token ids -> text, by the tokenizer of a data set, many documents at once.

A byte-level tokenizer (Llama 3, GPT-2, Qwen) gives back exactly the text that it encoded: a table of the
bytes of each token is enough, 5 ns a byte. Of all others the text is what ``tokenizers`` decodes, and may
differ, in its spaces, say.
"""

from __future__ import annotations

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
        self._before, self._after, self._is_exact = [], [], False
        if self._pieces:
            special = {token["id"] for token in head.get("added_tokens") or [] if token["special"]}
            # A control token ends a word.
            words = [b"\n" if number in special else piece for number, piece in enumerate(self._pieces)]
            self._flat = np.frombuffer(b"".join(words), np.uint8)
            self._lengths = np.array([len(word) for word in words], np.int64)
            self._begins = np.cumsum(self._lengths) - self._lengths
            try:
                around = (
                    ids_around(head.get("post_processor")) if plan.options.add_special_tokens else ([], [])
                )
                self._before, self._after = around
                self._is_exact = not plan.options.is_chat  # a conversation's digest is of its messages
            except ValueError:
                pass
        if plan.end_id is not None:
            self._after = [*self._after, plan.end_id]

    def texts(self, ids: Ids, offsets: Numbers) -> list[str]:
        """Return the text of each document, with a line end for each control token."""
        if not self._pieces:
            bounds = itertools.pairwise(offsets.tolist())
            vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
            lists = [ids[begin:end][ids[begin:end] < vocab_size].tolist() for begin, end in bounds]
            return list(self._tokenizer.decode_batch(lists, skip_special_tokens=True))
        ids = np.minimum(ids, len(self._pieces) - 1)  # behind the vocabulary stands nothing
        lengths = self._lengths[ids]
        ends = np.concatenate([[0], np.cumsum(lengths)])
        raw = self._flat[np.repeat(self._begins[ids] - ends[:-1], lengths) + np.arange(ends[-1])].tobytes()
        return [
            raw[begin:end].decode("utf-8", "replace")
            for begin, end in itertools.pairwise(ends[offsets].tolist())
        ]

    def text(self, ids: Ids) -> str:
        """Return the text of some ids, control tokens included."""
        if not self._pieces:
            return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))
        return b"".join(map(self._pieces.__getitem__, ids.tolist())).decode("utf-8", "replace")

    def digest(self, ids: Ids) -> str:
        """Return the digest of the text that these ids of a whole document are of, in hex; "" if unsure."""
        if not self._is_exact:
            return ""
        found = ids.tolist()
        if self._before and found[: len(self._before)] == self._before:
            found = found[len(self._before) :]
        if self._after and found[-len(self._after) :] == self._after:
            found = found[: -len(self._after)]
        text = b"".join(map(self._pieces.__getitem__, found))
        return hashlib.sha256(text).digest()[:DIGEST_BYTES].hex()


def _bytes_of_tokens(tokenizer: Any, head: dict[str, Any]) -> list[bytes]:
    """Return the bytes of each token, and nothing behind the last; an empty list if it is not byte-level."""
    steps = [head.get("pre_tokenizer") or {}]
    steps += steps[0].get("pretokenizers", [])
    has_prefix_space = any(step.get("add_prefix_space") for step in steps)
    if (head.get("decoder") or {}).get("type") != "ByteLevel" or head.get("normalizer") or has_prefix_space:
        return []
    # GPT-2's letters: a printable byte of Latin-1 is itself, the others follow from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {byte: byte for byte in printable} | {256 + turn: byte for turn, byte in enumerate(others)}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not all(chr(letter) in vocabulary for letter in byte_of):
        return []
    pieces = [b""] * (max(vocabulary.values()) + 2)
    for token, number in vocabulary.items():
        pieces[number] = token.translate(byte_of).encode("latin-1", "ignore")
    for token in head.get("added_tokens") or []:
        pieces[token["id"]] = token["content"].encode()
    return pieces
