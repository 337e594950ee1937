"""The fast engine, ``gigatoken``: used only if its ids equal those of the reference."""

from __future__ import annotations

import functools
import itertools
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from preprocess.make.code_points import texts_with_new_code_points
from preprocess.make.engine import Engine
from preprocess.make.probe import ids_sha256
from preprocess.make.reference import load_tokenizer, reference_engine
from preprocess.make.token_ids import Ids, TokenBatch
from preprocess.read.formats import BETWEEN, Texts
from shardprep.errors import ShardprepError
from shardprep.foreign_tokenizer import check_bounded_cost, split_tokenizer
from shardprep.hub import is_library_fault, words_of_fault


class FastTokenizer:
    """gigatoken with one tokenizer.json. Several threads may use it.

    A batch is encoded as one text. An added token separates the documents: it shows where they begin, and its
    ids are replaced by BOS and EOS. Control tokens that must stay text are not added tokens here.

    gigatoken caches every word that it has seen, in 3 to 7 bytes per byte of new text. So it is loaded again
    when the process has grown by ``max_growth_bytes``.
    """

    uses_threads = True  # a fork has none of gigatoken's
    max_growth_bytes = 160 << 20
    _MIN_TEXT_BYTES = 32 << 20  # between two loads: a process that grows for other reasons pays 0.01 s per MB

    def __init__(self, tokenizer_json: bytes, allow_special_tokens: bool) -> None:
        head, model = split_tokenizer(tokenizer_json)
        check_bounded_cost(head)
        self._before, self._after = ids_around(head.get("post_processor"))
        added = head.get("added_tokens") or []
        token = next((token for token in added if token["special"]), None)
        if token is None:
            raise ValueError("it has no control token")
        # No text has this id, unless control tokens are allowed and a text names this one.
        self._separator_id = token["id"]
        self._separators = (BETWEEN, token["content"].encode())
        kept = added if allow_special_tokens else [token for token in added if not token["special"]]
        separator = {**token, "content": BETWEEN.decode()}
        self._json = orjson.dumps({**head, "added_tokens": [*kept, separator]})[:-1] + b"," + model
        self._lock = threading.Lock()
        self._load()

    def _load(self) -> None:
        from gigatoken.gigatoken_rs import load_hf_json

        self._backend: Any = None  # frees the cache before new memory is taken
        self._backend = load_hf_json(self._json)
        self._max_resident_bytes, self._num_bytes = _resident_bytes() + self.max_growth_bytes, 0

    def _ids(self, text: bytes) -> Ids:
        from gigatoken.gigatoken_rs import BytesSource, PadTruncate

        with self._lock:
            self._num_bytes += len(text)
            if self._num_bytes > self._MIN_TEXT_BYTES and _resident_bytes() > self._max_resident_bytes:
                self._load()
            backend = self._backend
        # encode() would keep the interpreter's lock, and would import "awkward" for a list of texts (0.1 s).
        # With parallel=True several threads are served at once.
        rows, _ = backend.encode_batch_padded(BytesSource(text), PadTruncate(0), parallel=self.uses_threads)
        return rows[0]

    def encode(self, reference: Callable[[], Engine], texts: Texts, add_special_tokens: bool) -> TokenBatch:
        """Encode texts, with the reference where gigatoken might give other ids."""
        unsure = texts_with_new_code_points(texts)
        if not unsure:
            tokens = self._encode_joined(texts, add_special_tokens)
            if tokens is not None:
                return tokens
            unsure = [n for n, text in enumerate(texts) if self._has_separator(text)]
            if not unsure:  # it is not clear which text it is
                unsure = list(range(len(texts)))
        slow = reference().encode_with(texts.only(unsure), add_special_tokens)
        ids_of = dict(zip(unsure, slow.documents(), strict=True))  # by the number of the text
        sure = [n for n in range(len(texts)) if n not in ids_of]
        fast = self.encode(reference, texts.only(sure), add_special_tokens)
        ids_of.update(zip(sure, fast.documents(), strict=True))
        return TokenBatch.of([ids_of[n] for n in range(len(texts))])

    def _has_separator(self, text: bytes) -> bool:
        return any(separator in text for separator in self._separators)

    def _encode_joined(self, texts: Texts, add_special_tokens: bool) -> TokenBatch | None:
        """Encode texts as one. Return None if the separators in it are not those between the texts."""
        if not texts:
            return TokenBatch.of([])
        before, after = (self._before, self._after) if add_special_tokens else ([], [])
        between, num_bounds = [*after, *before], len(texts) - 1
        stride, joined = max(1, len(between)), texts.joined  # stride: separators between two texts
        if stride > 1:
            joined = (BETWEEN * stride).join(texts.each)
        # A text that ends with all of BETWEEN but its last quote would take the first quote of the next one.
        # Only if there are other NULs are the separators counted, which takes longer.
        num_nul = np.count_nonzero(np.frombuffer(joined, np.uint8) == 0)
        if num_nul != num_bounds * stride and joined.count(BETWEEN[:-1]) != num_bounds * stride:
            return None
        ids = self._ids(BETWEEN * len(before) + joined + BETWEEN * len(after))
        places = np.flatnonzero(ids == self._separator_id)
        if len(places) != len(before) + num_bounds * stride + len(after):
            return None
        starts = places[len(before) : len(places) - len(after)][::stride] + len(after)
        if between:
            ids[places] = np.concatenate([before, np.tile(between, num_bounds), after])
        else:
            ids, starts = np.delete(ids, places), starts - np.arange(num_bounds)
        return TokenBatch(ids=ids, offsets=np.concatenate([[0], starts, [len(ids)]]))


# Cached, so that a process that plans and then makes shards loads it once: 0.3 s for Llama 3's.
_fast_tokenizer = functools.lru_cache(maxsize=1)(FastTokenizer)


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - a Path would double the time
        return int(file.read().split()[1]) * resource.getpagesize()


def ids_around(processor: dict[str, Any] | None) -> tuple[list[int], list[int]]:
    """Return the ids that a post-processor puts around a text. Raises ValueError if it does more."""
    if processor is None:
        return [], []
    kind = processor["type"]
    if kind == "ByteLevel":
        return [], []
    if kind == "Sequence":
        adding = [each for each in map(ids_around, processor["processors"]) if any(each)]
        if len(adding) > 1:
            raise ValueError(f"{len(adding)} post-processors add tokens")
        return adding[0] if adding else ([], [])
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [processor["cls"][1]], [processor["sep"][1]]
    if kind != "TemplateProcessing":
        raise ValueError(f"post-processor {kind}")
    names = ["" if "Sequence" in item else item["SpecialToken"]["id"] for item in processor["single"]]
    if names.count("") != 1:
        raise ValueError(f"its template has {names.count('')} texts")
    ids = [processor["special_tokens"][name]["ids"] if name else [] for name in names]
    text = names.index("")
    return list(itertools.chain(*ids[:text])), list(itertools.chain(*ids[text:]))


def equal_fast_engine(
    content: bytes, path: Path, texts: Texts, expected_sha256: str, *, allow_special_tokens: bool
) -> Engine | str:
    """Return gigatoken if it gives the expected ids for ``texts``, else the reason why it cannot be used.

    gigatoken loads ``content``, a tokenizer.json. The reference loads ``path`` once a text needs it. Raises
    ReadWriteError if that file cannot be read, which says nothing about the engine.
    """

    @functools.cache
    def reference() -> Engine:
        tokenizer = load_tokenizer(path)
        return reference_engine(tokenizer, allow_special_tokens=allow_special_tokens, name=str(path))

    try:
        fast = _fast_tokenizer(content, allow_special_tokens)
        engine = Engine(name="gigatoken", encode_with=functools.partial(fast.encode, reference))
        if ids_sha256([engine.encode(texts)]) == expected_sha256:
            return engine
    except ShardprepError:
        raise
    except BaseException as error:
        if not is_library_fault(error):
            raise
        return words_of_fault(error)
    return "its ids differ from those of tokenizers"
