"""Encode documents as flat token ids, with the fastest engine that gives the ids of the reference.

The reference is ``tokenizers``. ``gigatoken`` reads the same tokenizer.json, loads sooner, and is about
7 times faster on Korean and 40 times on English (one core, Llama 3). It is used only if its ids are equal:
planning compares ``gate_texts`` and a sample of the corpus, and each worker compares the probe. The reference
always encodes a text with a code point that newer Unicode versions may classify differently.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import resource
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from preprocess.read.documents import DocumentBatch
from preprocess.read.formats import BETWEEN, Numbers, Texts
from shardprep.errors import BadInput, ShardprepError
from shardprep.files import read_regular
from shardprep.foreign_tokenizer import FREE_BYTES, ForeignTokenizer, check_bounded_cost, split_tokenizer
from shardprep.format.names import MAX_TOKENIZER_BYTES
from shardprep.format.plan import MaskRule
from shardprep.hub import is_library_fault, words_of_fault

Ids = npt.NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Ids of consecutive documents: document i is ``ids[offsets[i]:offsets[i + 1]]``."""

    ids: Ids  # uint32[tokens]
    offsets: Numbers  # int64[documents + 1]

    @staticmethod
    def of(ids: Sequence[Ids]) -> TokenBatch:
        """Build a batch from the ids of each document."""
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([len(item) for item in ids], out=offsets[1:])
        return TokenBatch(ids=np.concatenate(ids) if ids else np.empty(0, np.uint32), offsets=offsets)

    @staticmethod
    def of_buffers(ids: Ids | bytes, offsets: Numbers | bytes) -> TokenBatch:
        """Build a batch from its arrays, which are bytes if another process made them."""
        if isinstance(ids, bytes):
            ids = np.frombuffer(bytearray(ids), np.uint32)
        if isinstance(offsets, bytes):
            offsets = np.frombuffer(bytearray(offsets), np.int64)
        return TokenBatch(ids=ids, offsets=offsets)

    @staticmethod
    def joined(batches: Sequence[TokenBatch]) -> TokenBatch:
        """Join consecutive batches, at least one."""
        if len(batches) == 1:
            return batches[0]
        return TokenBatch.of([ids for batch in batches for ids in batch.documents()])

    def documents(self) -> list[Ids]:
        """Return the ids of each document."""
        return [self.ids[begin:end] for begin, end in itertools.pairwise(self.offsets.tolist())]

    def only(self, is_wanted: npt.NDArray[np.bool_]) -> TokenBatch:
        """Return a batch of the wanted documents; ``is_wanted`` is bool[documents]."""
        lengths = np.diff(self.offsets)
        offsets = np.concatenate([[0], np.cumsum(lengths[is_wanted])])
        return TokenBatch(ids=self.ids[np.repeat(is_wanted, lengths)], offsets=offsets)


NO_LOSS = np.uint32(1 << 31)  # this bit is set in ids of a conversation that the assistant did not write
Spans = Sequence[tuple[int, int]]  # characters [begin, end) of a text
FEW_BYTES = 1 << 18  # the reference encodes this much text in 0.05 s; comparing the engines takes 1 s
Encode = Callable[[Texts, bool], TokenBatch]  # the flag says whether to add BOS and other special tokens
EncodeChat = Callable[[Texts, Sequence[Spans], MaskRule], TokenBatch]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A tokenizer that encodes as ``tokenizer.encode(text, add_special_tokens=adds_special_tokens)`` does."""

    name: str  # gigatoken or tokenizers
    encode_with: Encode
    encode_chat: EncodeChat | None = None  # without special tokens, and with NO_LOSS in ids outside the spans
    adds_special_tokens: bool = True

    @property
    def version(self) -> str:
        module = importlib.import_module(self.name)
        # For gigatoken it is in the name of the .dist-info folder. importlib.metadata would open 30 files.
        site = Path(str(module.__file__)).parent.parent
        names = (folder.name.removesuffix(".dist-info") for folder in site.glob(f"{self.name}-*.dist-info"))
        return str(getattr(module, "__version__", "") or next(names, "").partition("-")[2])

    def bare(self) -> Engine:
        """Return this engine without special tokens around a text."""
        return replace(self, adds_special_tokens=False)

    def encode(self, texts: Texts) -> TokenBatch:
        return self.encode_with(texts, self.adds_special_tokens)

    def encode_documents(
        self, documents: DocumentBatch, *, end_id: int | None = None, mask_rule: MaskRule = ""
    ) -> TokenBatch:
        """Encode a batch, and end each document with ``end_id``.

        For conversations, ``mask_rule`` decides which tokens the assistant wrote; other ids get NO_LOSS.
        """
        if "spans" in documents.columns:
            assert self.encode_chat is not None  # for conversations load_engine returns the reference
            return self.encode_chat(documents.texts, documents.columns["spans"], mask_rule)
        tokens = self.encode(documents.texts)
        if end_id is None:
            return tokens
        return TokenBatch(
            ids=np.insert(tokens.ids, tokens.offsets[1:], end_id),
            offsets=tokens.offsets + np.arange(len(tokens.offsets)),
        )


def load_tokenizer(path: Path, content: bytes | None = None) -> ForeignTokenizer:
    """Load a tokenizer.json, or its ``content`` if that is given.

    Raises ReadWriteError, BadInput if it takes too much, or BrokenShard if it is not a regular file.
    """
    if content is None:  # read it here: Rust cannot open every path, such as one in another encoding
        content = read_regular(path, max_bytes=MAX_TOKENIZER_BYTES)
    return ForeignTokenizer(content, str(path))


def reference_engine(tokenizer: ForeignTokenizer, *, allow_special_tokens: bool, name: str) -> Engine:
    """Return the reference engine of a tokenizer, whose settings this changes.

    A control token's string in a text stays text unless ``allow_special_tokens``. Errors show ``name``.
    """
    tokenizer.set_up(_set_up, allow_special_tokens)

    def encode_each(function: Callable[..., Any], texts: list[bytes], *args: Any) -> TokenBatch:
        strings = [text.decode() for text in texts]
        num_bytes = sum(map(len, texts))
        return TokenBatch.of_buffers(*tokenizer.call(function, name, strings, *args, num_bytes=num_bytes))

    def groups(texts: Texts) -> Iterable[slice]:
        return _groups(texts) if tokenizer.is_limited else [slice(None)]

    def encode(texts: Texts, add_special_tokens: bool) -> TokenBatch:
        parts = [encode_each(_encode, texts.each[group], add_special_tokens) for group in groups(texts)]
        return TokenBatch.joined(parts)

    def encode_chat(texts: Texts, spans: Sequence[Spans], mask_rule: MaskRule) -> TokenBatch:
        slices = groups(texts)
        parts = [encode_each(_encode_chat, texts.each[it], spans[it], mask_rule) for it in slices]
        return TokenBatch.joined(parts)

    return Engine(name="tokenizers", encode_with=encode, encode_chat=encode_chat)


def _groups(texts: Texts) -> Iterator[slice]:
    """Yield slices of texts, each of about FREE_BYTES, so that a call of a limited tokenizer is short."""
    begin = num_bytes = 0
    for number, text in enumerate(texts.each):
        num_bytes += len(text)
        if num_bytes >= FREE_BYTES:
            yield slice(begin, number + 1)
            begin, num_bytes = number + 1, 0
    if begin < len(texts) or not texts:
        yield slice(begin, len(texts))


# These are called with a ``tokenizers.Tokenizer``, perhaps in another process.


def _set_up(tokenizer: Any, allow_special_tokens: bool) -> None:
    tokenizer.encode_special_tokens = not allow_special_tokens
    tokenizer.no_truncation()
    tokenizer.no_padding()


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of ids, with the names of special tokens."""
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text


def _encode(tokenizer: Any, name: str, texts: list[str], add_special_tokens: bool) -> tuple[Ids, Numbers]:
    call = functools.partial(tokenizer.encode_batch_fast, add_special_tokens=add_special_tokens)
    encodings = _encodings(call, texts, name)
    batch = TokenBatch.of([np.array(encoding.ids, np.uint32) for encoding in encodings])
    return batch.ids, batch.offsets


def _encode_chat(
    tokenizer: Any, name: str, texts: list[str], spans: Sequence[Spans], mask_rule: MaskRule
) -> tuple[Ids, Numbers]:
    call = functools.partial(tokenizer.encode_batch, add_special_tokens=False)
    encodings = _encodings(call, texts, name)
    ids = [np.array(encoding.ids, np.uint32) for encoding in encodings]
    for text_ids, encoding, spans_of_text in zip(ids, encodings, spans, strict=True):
        text_ids[~_are_written(encoding, spans_of_text, mask_rule)] |= NO_LOSS
    batch = TokenBatch.of(ids)
    return batch.ids, batch.offsets


def _encodings(encode: Callable[[list[str]], list[Any]], texts: list[str], name: str) -> list[Any]:
    """Call ``encode``. Raises BadInput that names the first text on which it fails."""
    try:
        return encode(texts)
    except BaseException as error:
        if not is_library_fault(error):
            raise
        if len(texts) > 1:  # find the text that fails
            return [encoding for text in texts for encoding in _encodings(encode, [text], name)]
        what = f"the text that begins {texts[0][:40]!r} ({words_of_fault(error)})"
        remedy = "plan with a corrected copy of its folder: its tokenizer.json may lack an unknown token"
        raise BadInput(f"the tokenizer of {name} cannot encode {what}; {remedy}") from None


def _are_written(encoding: Any, spans: Spans, mask_rule: MaskRule) -> npt.NDArray[np.bool_]:
    """Return which tokens the assistant wrote: bool[tokens]. ``spans`` are its text, ascending, not empty.

    ``characters``: a token counts if it has a character of a span.

    ``overlap``: the same as in transformers since 5.24, which leaves a span at the first token that begins at
    or after the span's end. So a token is compared with the first span that ends after all token begins so
    far. This matters if offsets or spans are not in order, as with a ByteLevel that trims offsets.

    ``char_to_token``: the tokens from a span's first to its last character, as in transformers before 5.24,
    faults included. If the last character has several tokens, only the first one counts. A dropped first
    character ends the search. If the last character is dropped or in token 0, the span has no end.
    """
    if mask_rule == "char_to_token":
        is_between = np.zeros(len(encoding), np.bool_)
        for begin, end in spans:
            first = encoding.char_to_token(begin)
            last = encoding.char_to_token(end - 1) if end else None
            if first is None:
                break
            is_between[first : last + 1 if last else None] = True
        return is_between
    begins, ends = np.array(spans, np.int64).reshape(-1, 2).T
    # Offsets [begin, end) of each token, in characters: 80 ns per token.
    flat = itertools.chain.from_iterable(encoding.offsets)
    token_begins, token_ends = np.fromiter(flat, np.int64, 2 * len(encoding)).reshape(-1, 2).T
    if mask_rule == "overlap":
        token_begins, ends = np.maximum.accumulate(token_begins), np.maximum.accumulate(ends)
    number = np.searchsorted(ends, token_begins, side="right")  # the first span that ends after the begin
    # Tokens after the last span are compared with a span at infinity.
    is_written: npt.NDArray[np.bool_] = token_ends > np.append(begins, np.iinfo(np.int64).max)[number]
    return is_written


def without_unused_merges(tokenizer: dict[str, Any]) -> bytes | None:
    """Return a tokenizer.json without the merges that are never used, or None if all are used.

    A file converted from ranks, like Llama 3's, has a merge for each way to split a token in two: 280,147 for
    128,000 tokens. BPE joins the bytes of a token in one order, whatever surrounds them, so only the last
    merge of this order is ever used. Without the others gigatoken loads in two thirds of the time.
    """
    model = tokenizer["model"]
    merges = model.get("merges") or []
    has_parts = any(map(model.get, ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")))
    if model["type"] != "BPE" or has_parts or len(merges) <= len(model["vocab"]):
        return None
    rank_of = dict(zip(map(tuple, merges), range(len(merges)), strict=True))
    if len(rank_of) < len(merges):  # libraries may differ in which of two equal merges counts
        return None
    never = len(merges)
    num_cuts = Counter(map("".join, merges))
    used = [rank for rank, pair in enumerate(merges) if num_cuts["".join(pair)] == 1]
    for token in [token for token, number in num_cuts.items() if number > 1]:
        # Join the parts as BPE does: the pair of the lowest rank first, the leftmost of equal ranks.
        parts = list(token)
        ranks = [rank_of.get(pair, never) for pair in itertools.pairwise(parts)]
        while (least := min(ranks)) < never:
            if len(ranks) == 1:
                used.append(least)
                break
            place = ranks.index(least)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
            del ranks[place]
            if place:
                ranks[place - 1] = rank_of.get((parts[place - 1], parts[place]), never)
            if place < len(ranks):
                ranks[place] = rank_of.get((parts[place], parts[place + 1]), never)
    if len(used) == len(merges):
        return None
    head = {name: value for name, value in tokenizer.items() if name != "model"}
    kept = orjson.dumps({**model, "merges": [merges[rank] for rank in sorted(used)]})
    return orjson.dumps(head)[:-1] + b',"model": ' + kept + b"}"  # ``split_tokenizer`` looks for this form


class FastTokenizer:
    """gigatoken with one tokenizer.json. Several threads may use it.

    A batch is encoded as one text. An added token separates the documents: it shows where they begin, and its
    ids are replaced by BOS and EOS. Control tokens that must stay text are not added tokens here.

    gigatoken caches every word that it has seen, in 3 to 7 bytes per byte of new text. So it is loaded again
    when the process has grown by _MAX_GROWTH_BYTES.
    """

    _MAX_GROWTH_BYTES = 160 << 20
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
        self._max_resident_bytes, self._num_bytes = _resident_bytes() + self._MAX_GROWTH_BYTES, 0

    def _ids(self, text: bytes) -> Ids:
        from gigatoken.gigatoken_rs import BytesSource, PadTruncate

        with self._lock:
            self._num_bytes += len(text)
            if self._num_bytes > self._MIN_TEXT_BYTES and _resident_bytes() > self._max_resident_bytes:
                self._load()
            backend = self._backend
        # encode() would keep the interpreter's lock, and would import "awkward" for a list of texts (0.1 s).
        # With parallel=True several threads are served at once.
        rows, _ = backend.encode_batch_padded(BytesSource(text), PadTruncate(0), parallel=True)
        return rows[0]

    def encode(self, reference: Callable[[], Engine], texts: Texts, add_special_tokens: bool) -> TokenBatch:
        """Encode texts, with the reference where gigatoken might give other ids."""
        unsure = texts_with_new_code_points(texts)
        if not unsure:
            if (tokens := self._encode_joined(texts, add_special_tokens)) is not None:
                return tokens
            unsure = [n for n, text in enumerate(texts) if any(each in text for each in self._separators)]
            unsure = unsure or list(range(len(texts)))  # it is not clear which text it is
        slow = reference().encode_with(texts.only(unsure), add_special_tokens)
        documents = dict(zip(unsure, slow.documents(), strict=True))
        sure = [n for n in range(len(texts)) if n not in documents]
        fast = self.encode(reference, texts.only(sure), add_special_tokens)
        documents.update(zip(sure, fast.documents(), strict=True))
        return TokenBatch.of([documents[n] for n in range(len(texts))])

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
    if processor is None or (kind := processor["type"]) == "ByteLevel":
        return [], []
    if kind == "Sequence":
        found = [around for part in processor["processors"] if any(around := ids_around(part))]
        if len(found) > 1:
            raise ValueError(f"{len(found)} post-processors add tokens")
        return found[0] if found else ([], [])
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


# Code points that Unicode versions after 14 may classify as letters or digits, so engines of different ages
# may disagree. Below U+10000: those that this Python does not assign, and _ASSIGNED_SINCE_14 (Unicode 15 to
# 18), except _NEVER_ASSIGNED (with U+0378, because the probe has it). Above: all except _SURE_ABOVE.
_ASSIGNED_SINCE_14 = (
    "558 58b-58c 5c8-5c9 88f 897 b53-b54 c5c cdc cf3 ece 1acf-1af0 1b4e-1b4f 1b7f 1c89-1c8a 208f 209d-209f "
    "20c1-20c4 2427-2429 2b96 2e60-2e63 2ffc-2fff 31e4-31e5 31ef a7cb-a7cf a7d2 a7d4 a7da-a7dd a7e2 a7f1 "
    "ab6c-ab6d fbc3-fbd2 fd90-fd91 fdc8-fdce"
)
_NEVER_ASSIGNED = (0x378, *range(0xFDD0, 0xFDF0), 0xFFFE, 0xFFFF)
_SURE_ABOVE = (
    (0x1D400, 0x1D7FF), (0x1F000, 0x1FAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B738), (0x2B740, 0x2B81D),
    (0x2B820, 0x2CEA1), (0x2F800, 0x2FA1D), (0x30000, 0x3134A), (0xE0000, 0xE0FFF), (0xF0000, 0x10FFFF),
)  # fmt: skip


@functools.cache
def is_new_code_point() -> npt.NDArray[np.bool_]:
    """Return whether engines may classify a code point differently: bool[0x110000]. Takes 10 ms, once."""
    is_new = np.ones(0x110000, np.bool_)
    is_new[:0x10000] = [unicodedata.category(point) == "Cn" for point in map(chr, range(0x10000))]
    for given in _ASSIGNED_SINCE_14.split():
        first, _, last = given.partition("-")
        is_new[int(first, 16) : int(last or first, 16) + 1] = True
    is_new[list(_NEVER_ASSIGNED)] = False
    for begin, end in _SURE_ABOVE:
        is_new[begin : end + 1] = False
    return is_new


def texts_with_new_code_points(texts: Texts) -> list[int]:
    """Return the indices of texts that have a code point of ``is_new_code_point``: 1 ns per character."""
    is_beyond_ascii = np.frombuffer(texts.joined, np.int8) < 0
    num_beyond = np.count_nonzero(is_beyond_ascii)
    if not num_beyond:
        return []
    if num_beyond < len(is_beyond_ascii) // 8:
        characters = np.frombuffer(texts.joined, np.uint8)[is_beyond_ascii].tobytes().decode()
    else:
        characters = texts.characters or texts.joined.decode()
    units = np.frombuffer(characters.encode("utf-16-le"), "<u2")
    # Most Korean characters are syllables, from U+AC00 on: a comparison takes a tenth of a look-up.
    others = units[(units >= 0x80) & (units - np.uint16(0xAC00) >= 11172)]
    if not _is_unsure_unit().take(others).any():
        return []

    def has_new(text: str) -> bool:
        points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        return bool(is_new_code_point().take(points, mode="clip").any())

    return [n for n, text in enumerate(texts) if has_new(text.decode())] if has_new(characters) else []


@functools.cache
def _is_unsure_unit() -> npt.NDArray[np.bool_]:
    """Return whether a UTF-16 unit may be such a code point or half of one: bool[0x10000]."""
    is_unsure = is_new_code_point()[:0x10000].copy()
    is_unsure[0xD800:0xE000] = True
    return is_unsure


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


# Texts on which engines may differ: spacing, digits, contractions, case folding, scripts, combining
# marks, jamo, joiners, unassigned and private code points, line ends, long runs.
PROBE = (
    "",
    " ",
    "  leading and trailing  ",
    "It's WE'LL they'RE 'S ſ K don't",
    "1 12 123 1234 12345 1,234.56 ½ ٣٤٥ 一二三 Ⅷ",
    "전체관람가는 아닌것 같아요ㅋㅋㅋ ㅠㅠ  안녕하세요.\u3000한글\u1112\u1161\u11ab",
    "e\u0301 é ﬁ Å \u212b \u1e9b\u0323 ẞ ß İ ı",
    "👩\u200d👩\u200d👧 🇰🇷 ☕\ufe0f 𝒳 \U0001f9ff \U0002a6df",
    "line\nline\r\nline\rline\n\n\n  \n\tend \t ",
    "tab\tnbsp\u00a0zwsp\u200bbom\ufeff ls\u2028ps\u2029nel\u0085vt\x0bff\x0c",
    "\x00\x01\x1c\x7f \ue000 \uffff \u0378 \U0010ffff \U000e0001",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # …\n",
    "https://example.org/?q=%EA%B0%80&b=1#x_y-z ...... ------ ====\u2026\u2014",
    "العربية עברית हिन्दी ไทย 日本語テキスト 中文，测试。 ",
    "a" * 300 + " " * 300 + "가" * 300 + "!" * 300 + "9" * 300,
    "\ud7b0\ua960 ᄀᆞ ㆍ \u115f\u1160 ﾡ",
)


def probe_texts(tokenizer: dict[str, Any]) -> list[str]:
    """Return PROBE, and texts that have the first and last added tokens of a tokenizer.json in them."""
    contents = [token["content"] for token in tokenizer.get("added_tokens") or []]
    chosen = list(dict.fromkeys(contents[:8] + contents[-8:]))
    return [*PROBE, *(f"a {text} b{text}{text}\n{text}" for text in chosen)]


def gate_texts(tokenizer_json: bytes) -> list[str]:
    """Return the texts on which planning compares the engines. The reference needs 1 s (Llama 3's tokenizer).

    They have all code points, all pairs of character classes, added tokens, long runs and known differences.
    """
    points = np.flatnonzero(~is_new_code_point())
    points = points[((points < 0xD800) | (points > 0xDFFF)) & (points < 0xF0100)]  # private use comes after
    is_ideograph = (points >= 0x3400) & (points < 0xA000) | (points >= 0xAC00) & (points < 0xD800)
    is_ideograph |= points >= 0x20000
    alone = [f"{c}\n \n" for c in map(chr, points[is_ideograph].tolist())]
    alone += [f"{c}\n \n1{c}1" for c in map(chr, points[~is_ideograph].tolist())]
    classes = "aZé가一ʰसा٣1½Ⅷ \t\xa0\u3000\u2028\n\r\x85'’!…😀\u200d\0\u0301ſK\ue000sSt"
    pairs = (f"x{a}{b}y {a}{b}{b}'{a}{b}1{a}" for a, b in itertools.product(classes, repeat=2))
    tokens = [token["content"] for token in split_tokenizer(tokenizer_json)[0].get("added_tokens") or []]
    known = "\u088f\ua7ce\ua7d2\ua7f1\U00010940\U00011de0\U00016ff4\U000323b0"
    return [
        *map("".join, (alone[begin : begin + 500] for begin in range(0, len(alone), 500))),
        *pairs,
        *(f"a {text} b{text}{text}\n{text} " for text in tokens),
        *(character * 5000 for character in "a 가!9\n\t"),
        *(f"a{c}b 1{c}1 {c}{c}\n \n" for c in known),
    ]


def ids_sha256(batches: Iterable[TokenBatch]) -> str:
    """Return the sha256, in hex, of ids and document lengths."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(batch.ids.astype("<u4").tobytes())
        digest.update(np.diff(batch.offsets).astype("<i8").tobytes())
    return digest.hexdigest()
