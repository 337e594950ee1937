"""The documents of a shard, read back from its tar: their ids, by what names people know them, their texts.

A document that goes on in other rows comes whole. Held at a time are about 130,000 tokens, or one document.

A byte-level tokenizer (Llama 3, GPT-2, Qwen) gives back exactly what it encoded, as the plan's probe shows:
a table of the bytes of each token is enough, 5 ns a byte. Others decode, and their texts may differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from preprocess.make.engines import Ids, Numbers, ids_around, load_tokenizer, split_tokenizer
from shardprep.errors import BrokenShard
from shardprep.files import read_regular
from shardprep.format.documents import kept_ids, pieces_of, read_digests
from shardprep.format.index import ShardSamples
from shardprep.format.input_formats import name_of_input
from shardprep.format.manifest import Manifest
from shardprep.format.names import (
    DIGEST_BYTES,
    MAX_TOKENIZER_BYTES,
    TOKENIZER_DIR,
    TOKENIZER_FILE,
    digests_path,
    remake_command,
)
from shardprep.format.plan import Plan

_BLOCK_TOKENS = 1 << 17  # few enough that what is worked out of them stays in a core's cache


class Block(NamedTuple):
    """Consecutive documents of a shard."""

    first: int  # how many were read before
    ids: Ids  # uint32[tokens]
    offsets: Numbers  # int64[documents + 1]


class ShardDocuments:
    """The documents that begin in a shard."""

    def __init__(self, folder: Path, plan: Plan, manifest: Manifest, samples: ShardSamples) -> None:
        self._folder, self._plan, self._manifest, self._samples = folder, plan, manifest, samples
        self._paths = [item.path for item in plan.inputs]
        self._idx = samples.records
        pieces = pieces_of(samples)
        # With --pack best_fit a document goes on in rows further on; read them behind the one it begins in.
        firsts = np.searchsorted(pieces.record, np.arange(len(self._idx)))  # pieces that begin a record
        in_order = np.argsort(pieces.document[firsts], kind="stable")
        samples.records = self._idx[in_order]
        order = np.argsort(np.argsort(in_order)[pieces.record], kind="stable")
        begins = np.flatnonzero(np.diff(pieces.document[order], prepend=-1))
        ends = np.cumsum(pieces.num_tokens[order])
        self._bounds = np.append(ends[begins] - pieces.num_tokens[order][begins], ends[-1:])
        self._numbers = pieces.document[order][begins]  # in the order of the idx
        self._records = pieces.record[order][begins]
        self._positions = order[begins] - firsts[self._records]
        # A record says where the document of its first token lies.
        self._placed_by = dict(zip(pieces.document[firsts].tolist(), range(len(self._idx)), strict=True))

    def blocks(self) -> Iterator[Block]:
        """Yield all documents, some at a time. Raises BrokenShard, ReadWriteError."""
        bounds, held = self._bounds, np.empty(0, np.uint32)
        first, last = 0, len(bounds) - 1
        for piece in self._samples.pieces():
            held = np.concatenate([held, piece])
            until = int(np.searchsorted(bounds, bounds[first] + len(held), side="right")) - 1
            while first < until:
                cut = int(np.searchsorted(bounds, bounds[first] + _BLOCK_TOKENS, side="right")) - 1
                cut = min(max(cut, first + 1), until)
                offsets = bounds[first : cut + 1] - bounds[first]
                yield Block(first, held[: offsets[-1]], offsets)
                held, first = held[offsets[-1] :], cut
        if first < last:  # documents without a token
            yield Block(first, held, bounds[first:] - bounds[first])

    def names(self, turn: int) -> dict[str, Any]:
        """Return by what a document is known; None stands for what the shard does not keep.

        ``turn``: how many were read before it. The idx has the place of a document that begins a record.
        """
        shard_id, number, record = self._samples.shard_id, int(self._numbers[turn]), int(self._records[turn])
        position = f":{self._positions[turn]}" if self._plan.spec.has_rows else ""
        place = name = None
        if number in self._placed_by:
            found = self._idx[self._placed_by[number]]
            source, offset = int(found["source"]), int(found["source_offset"])
            place = {"file": name_of_input(self._paths, source), "byte": offset}
            name = self._kept_ids.get((source, offset))
        return {
            "shard": shard_id,
            "record": record,
            "document": f"{shard_id}:{record}{position}",
            "place": place,
            "id": name,
            "sha256": None if self._digests is None else self._digests[number].tobytes().hex(),
        }

    @cached_property
    def _kept_ids(self) -> dict[tuple[int, int], str]:
        if not self._plan.options.id_field:
            return {}
        kept = kept_ids(self._folder, self._samples.shard_id)
        return {(source, offset): name for source, offset, name in kept}

    @cached_property
    def _digests(self) -> npt.NDArray[np.void] | None:
        """The digests of the documents, in the order of the idx; None where the plan keeps none."""
        shard_id, stamp = self._samples.shard_id, self._manifest.digests
        if stamp is None:
            return None
        digests = read_digests(self._folder, shard_id, stamp)
        if len(digests) != len(self._numbers):
            path, remedy = digests_path(self._folder, shard_id), remake_command(shard_id, self._folder)
            expected = f"{len(self._numbers)} digests"
            raise BrokenShard(path=path, found=f"{len(digests)} digests", expected=expected, remedy=remedy)
        return digests


class TokenTexts:
    """The texts of a data set's ids. Raises ReadWriteError where its tokenizer cannot be read."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        path = folder / TOKENIZER_DIR / TOKENIZER_FILE
        self._tokenizer = load_tokenizer(path)
        head, _ = split_tokenizer(read_regular(path, max_bytes=MAX_TOKENIZER_BYTES))
        added = head.get("added_tokens") or []
        self._pieces = _bytes_of_tokens(self._tokenizer, added)
        # Between words a control token stands like white space.
        special = {token["id"] for token in added if token["special"]}
        words = [b"\n" if number in special else piece for number, piece in enumerate(self._pieces)]
        self._flat = np.frombuffer(b"".join(words), np.uint8)
        self._lengths = np.array([len(word) for word in words], np.int64)
        self._begins = np.cumsum(self._lengths) - self._lengths
        # What stands around each text; None where ids do not tell the text that a digest is of.
        self._around: tuple[list[int], list[int]] | None = None
        encodings = [self._tokenizer.encode(text, add_special_tokens=False).ids for text in plan.probe]
        self._is_exact = all(map(str.__eq__, map(self._joined, encodings), plan.probe))
        with contextlib.suppress(ValueError):
            adds = plan.options.add_special_tokens
            before, after = ids_around(head.get("post_processor") if adds else None)
            if self._is_exact and not plan.options.is_chat:  # a conversation's digest is of its messages
                self._around = before, after if plan.end_id is None else [*after, plan.end_id]

    def _joined(self, ids: Iterable[int]) -> str:
        return b"".join(map(self._pieces.__getitem__, ids)).decode("utf-8", "replace")

    def texts(self, ids: Ids, offsets: Numbers) -> list[str]:
        """Return the text of each document; document i has ``ids[offsets[i]:offsets[i + 1]]``."""
        ids = np.minimum(ids, len(self._pieces) - 1)  # of blanked documents there is no text
        if not self._is_exact:
            lists = [ids[begin:end].tolist() for begin, end in itertools.pairwise(offsets.tolist())]
            return list(self._tokenizer.decode_batch(lists, skip_special_tokens=True))
        lengths = self._lengths[ids]
        ends = np.cumsum(np.concatenate([[0], lengths]))
        raw = self._flat[np.repeat(self._begins[ids] - ends[:-1], lengths) + np.arange(ends[-1])].tobytes()
        bounds = itertools.pairwise(ends[offsets].tolist())
        return [raw[begin:end].decode("utf-8", "replace") for begin, end in bounds]

    def text(self, ids: list[int]) -> str:
        """Return the text of some ids, control tokens included."""
        return self._joined(ids) if self._is_exact else str(self._tokenizer.decode(ids))

    def digest(self, ids: list[int]) -> str | None:
        """Return the digest, in hex, of the text that a document was made of; None if it cannot be known."""
        if self._around is None:
            return None
        before, after = self._around
        begin, end = len(before), len(ids) - len(after)
        if ids[:begin] != before or ids[end:] != after:
            return None
        return hashlib.sha256(self._joined(ids[begin:end]).encode()).digest()[:DIGEST_BYTES].hex()


def _bytes_of_tokens(tokenizer: Any, added: list[dict[str, Any]]) -> list[bytes]:
    """Return the bytes of each token, as byte-level tokenizers spell them, and none behind the last one."""
    # GPT-2's letters for bytes: the printable ones of Latin-1 are themselves, the others follow from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: byte for byte in printable} | {256 + turn: byte for turn, byte in enumerate(others)}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values()) + 2)
    for token, number in vocabulary.items():
        pieces[number] = token.translate(letters).encode("latin-1", "ignore")
    for token in added:
        pieces[token["id"]] = token["content"].encode()
    return pieces
