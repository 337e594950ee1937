"""Documents -> flat token ids, by the fastest engine that gives the ids of the reference.

The reference is ``tokenizers``. ``fastokens`` reads the same tokenizer.json and is about 9 times faster on
Korean and 50 times on English (one core, Llama 3). It is used only where its ids were seen to be equal: at
planning on a probe and a sample of the corpus, and by each worker on the probe.

Planning also decides here which tokenizers give the same ids for a long document that is encoded in pieces.
The EOS token, where one is asked for, is added right after encoding, so nothing behind knows of it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from preprocess.formats.long_documents import CUT, encodable_pieces
from preprocess.options import EngineName
from preprocess.plan.tokenizer_files import MAX_TOKENIZER_BYTES
from shardprep.errors import NotFound, OtherTokenizer, ReadWriteError, ShardprepError, UsageError
from shardprep.files import read_regular, size_of_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Ids of consecutive documents: document i is ``ids[offsets[i]:offsets[i + 1]]``."""

    ids: npt.NDArray[np.uint32]  # uint32[tokens]
    offsets: npt.NDArray[np.int64]  # int64[documents + 1]


NO_LOSS = np.uint32(1 << 31)  # set in an id of a conversation that the assistant did not write

FEW_BYTES = 1 << 18  # of text: the reference encodes it in 0.05 s, fastokens takes 0.5 s longer to load

Encode = Callable[[Sequence[str]], TokenBatch]
EncodeChat = Callable[[Sequence[str], Sequence[Sequence[tuple[int, int]]]], TokenBatch]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Something that encodes as ``tokenizer.encode(text, add_special_tokens=True)`` does."""

    name: str  # fastokens or tokenizers
    version: str
    encode: Encode
    encode_bare: Encode  # the same without BOS and whatever else the tokenizer adds around a text
    encode_chat: EncodeChat | None = None  # likewise, NO_LOSS in the ids outside of spans of characters

    def encode_documents(
        self,
        texts: Sequence[str],
        *,
        batch_size: int | None = None,
        end_id: int | None = None,
        spans: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> TokenBatch:
        """Encode documents, at most ``batch_size`` of them per call (None: all), each ended by ``end_id``.

        ``spans``: they are conversations, of which the assistant wrote these characters; see ``encode_chat``.
        """
        size = batch_size or max(1, len(texts))
        if spans is not None:
            assert self.encode_chat is not None  # load_engine took the one that has it
            parts = [slice(first, first + size) for first in range(0, len(texts), size)]
            return _joined([self.encode_chat(texts[part], spans[part]) for part in parts])
        tokens = _joined([self.encode(texts[n : n + size]) for n in range(0, len(texts), size)])
        if end_id is None:
            return tokens
        return TokenBatch(
            ids=np.insert(tokens.ids, tokens.offsets[1:], end_id),
            offsets=tokens.offsets + np.arange(len(tokens.offsets)),
        )

    def encode_long(
        self, pieces: Iterator[str], *, can_be_cut: bool, end_id: int | None = None
    ) -> Iterator[npt.NDArray[np.uint32]]:
        """Encode one document given in pieces, ended by ``end_id``: uint32[tokens] arrays, in order."""
        yield from self.encode_pieces(pieces, can_be_cut=can_be_cut)
        if end_id is not None:
            yield np.array([end_id], np.uint32)

    def encode_pieces(self, pieces: Iterator[str], *, can_be_cut: bool) -> Iterator[npt.NDArray[np.uint32]]:
        """Encode one document given in pieces: uint32[tokens] of it, in order.

        Where the tokenizer's ids depend on more than a piece, the document is joined and held whole.
        Raises UncuttableText where that is too much.
        """
        if not can_be_cut:
            for whole in encodable_pieces(pieces, can_be_cut=False):
                yield self.encode([whole]).ids
            return
        around, bare = self.encode(["a"]).ids, self.encode_bare(["a"]).ids
        places = range(len(around) - len(bare) + 1)
        num_before = next(n for n in places if np.array_equal(around[n : n + len(bare)], bare))
        if num_before:
            yield around[:num_before]
        for piece in encodable_pieces(pieces, can_be_cut=True):
            yield self.encode_bare([piece]).ids
        if num_before + len(bare) < len(around):
            yield around[num_before + len(bare) :]


def _joined(batches: Sequence[TokenBatch]) -> TokenBatch:
    """The documents of several batches as one batch."""
    if len(batches) == 1:
        return batches[0]
    lengths = [np.diff(batch.offsets) for batch in batches]
    return TokenBatch(
        ids=np.concatenate([np.empty(0, np.uint32), *(batch.ids for batch in batches)]),
        offsets=np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths])),
    )


def tokenizers_engine(tokenizer_json: Path, *, allow_special_tokens: bool) -> Engine:
    """The reference. Strings of control tokens stay text unless they are allowed. Raises ReadWriteError."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_json))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ReadWriteError(f"{tokenizer_json} cannot be loaded: {error}") from error
    return engine_of_tokenizer(tokenizer, allow_special_tokens=allow_special_tokens)


def engine_of_tokenizer(tokenizer: Tokenizer, *, allow_special_tokens: bool) -> Engine:
    """The same of a tokenizer that is loaded already; its settings are changed."""
    tokenizer.encode_special_tokens = not allow_special_tokens
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: Sequence[str], add_special_tokens: bool = True) -> TokenBatch:
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return _batch_of([np.array(encoding.ids, np.uint32) for encoding in encodings])

    def encode_chat(texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]) -> TokenBatch:
        encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ids = [np.array(encoding.ids, np.uint32) | NO_LOSS for encoding in encodings]
        for kept, encoding, of_text in zip(ids, encodings, spans, strict=True):
            for begin, end in of_text:
                first, last = encoding.char_to_token(begin), encoding.char_to_token(end - 1)
                if first is None:
                    break
                kept[first : last + 1 if last else len(kept)] &= ~NO_LOSS
        return _batch_of(ids)

    return dataclasses.replace(_engine("tokenizers", encode), encode_chat=encode_chat)


def _batch_of(ids: list[npt.NDArray[np.uint32]]) -> TokenBatch:
    """Documents given one by one."""
    offsets = np.zeros(len(ids) + 1, np.int64)
    np.cumsum([len(item) for item in ids], out=offsets[1:])
    return TokenBatch(ids=np.concatenate(ids) if ids else np.empty(0, np.uint32), offsets=offsets)


def fastokens_engine(tokenizer_json: Path, *, allow_special_tokens: bool) -> Engine:
    """The fast one. Raises ReadWriteError, and what fastokens raises for a tokenizer that it does not know.

    The file is read here: of fastokens's errors nobody could tell which are the file system's.
    """
    tokenizer = _fast_tokenizer(read_regular(tokenizer_json, max_bytes=MAX_TOKENIZER_BYTES))

    def encode(texts: Sequence[str], add_special_tokens: bool = True) -> TokenBatch:
        ids, offsets = tokenizer.encode_batch_flat(
            texts if isinstance(texts, list) else list(texts),
            add_special_tokens=add_special_tokens,
            split_special_tokens=not allow_special_tokens,
        )
        return TokenBatch(ids=np.frombuffer(ids, "<u4"), offsets=np.frombuffer(offsets, "<i8"))

    return _engine("fastokens", encode)


@functools.lru_cache(maxsize=1)
def _fast_tokenizer(tokenizer_json: bytes) -> Any:
    """Kept, so that a process which plans and then works loads it once: 1.2 s for Llama 3's."""
    import fastokens

    tokenizer = fastokens.Tokenizer.from_json_str(tokenizer_json.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _engine(name: str, encode: Callable[..., TokenBatch]) -> Engine:
    bare = functools.partial(encode, add_special_tokens=False)
    return Engine(name=name, version=version(name), encode=encode, encode_bare=bare)


def equal_fast_engine(
    tokenizer_json: Path, *, allow_special_tokens: bool, texts: Sequence[str], expected_sha256: str
) -> Engine | str:
    """fastokens, if it gives the expected ids for some texts; else why it cannot be used.

    Raises ReadWriteError where the file cannot be read, which says nothing of the engine.
    """
    try:
        engine = fastokens_engine(tokenizer_json, allow_special_tokens=allow_special_tokens)
        if ids_sha256([engine.encode(texts)]) == expected_sha256:
            return engine
    except ShardprepError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # Rust's, which is no Exception
            raise
        return f"it panicked: {error}"
    return "its ids differ from those of tokenizers"


# Text that tells engines apart: spacing, digits, contractions, case folding, scripts, combining
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
    """PROBE, and the first and last added tokens of a tokenizer.json standing in text."""
    contents = [token["content"] for token in tokenizer.get("added_tokens") or []]
    chosen = list(dict.fromkeys(contents[:8] + contents[-8:]))
    return [*PROBE, *(f"a {text} b{text}{text}\n{text}" for text in chosen)]


def ids_sha256(batches: Iterable[TokenBatch]) -> str:
    """sha256, in hex, of ids and document lengths."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(batch.ids.astype("<u4").tobytes())
        digest.update(np.diff(batch.offsets).astype("<i8").tobytes())
    return digest.hexdigest()


def load_engine(
    tokenizer_json: Path,
    *,
    wanted: EngineName,
    allow_special_tokens: bool,
    probe: list[str],
    probe_sha256: str,
    fast_is_equal: bool,
    num_bytes: int,
    warn: Callable[[str], None],
) -> Engine:
    """The engine of a worker, once it has given the reference's ids for the plan's probe.

    ``num_bytes`` of text are to be encoded: for FEW_BYTES the reference is soonest done.

    Raises OtherTokenizer where even the reference gives other ids, UsageError where an engine
    that was asked for by name cannot be had.
    """
    if size_of_file(tokenizer_json) is None:
        raise NotFound(f"{tokenizer_json} is missing; run the plan command again, it writes it anew")
    fast_pays = fast_is_equal and num_bytes >= FEW_BYTES
    if wanted == "fastokens" or (wanted == "auto" and fast_pays):
        fast = equal_fast_engine(
            tokenizer_json,
            allow_special_tokens=allow_special_tokens,
            texts=probe,
            expected_sha256=probe_sha256,
        )
        if isinstance(fast, Engine):
            return fast
        if wanted == "fastokens":
            raise UsageError(f"--engine fastokens fails for {tokenizer_json}: {fast}; use --engine auto")
        warn(f"fastokens cannot be used for this tokenizer ({fast}); going on with tokenizers, slower")
    engine = tokenizers_engine(tokenizer_json, allow_special_tokens=allow_special_tokens)
    found = ids_sha256([engine.encode(probe)])
    if found != probe_sha256:
        raise OtherTokenizer(
            f"tokenizers {engine.version} encodes the plan's probe to other ids than at planning "
            f"({found[:12]}, expected {probe_sha256[:12]}); install the version that planned, or plan anew"
        )
    return engine


LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REGEXES = (
    LLAMA3_REGEX,
    LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}"),  # Qwen 2: a digit a token
)


def can_be_cut(tokenizer: dict[str, Any]) -> bool:
    """Whether a tokenizer.json gives the same ids for text cut where long_documents.CUT says.

    So it is for byte-level BPE behind a known pattern, without a normalizer and without added tokens
    that reach for the white space around them or could be cut themselves. For all others a long document
    is held whole.
    """
    model = tokenizer.get("model") or {}
    parts = tokenizer.get("pre_tokenizer") or {}
    parts = parts.get("pretokenizers", [parts])
    byte_level = parts[-1] if parts else {}
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        return False
    if len(parts) == 1:
        known = bool(byte_level.get("use_regex"))
    else:
        split = parts[0]
        pattern = (split.get("pattern") or {}).get("Regex")
        known = len(parts) == 2 and pattern in _REGEXES and not byte_level.get("use_regex")
        known = known and split.get("behavior") == "Isolated" and not split.get("invert")
    plain_bpe = model.get("type") == "BPE" and not any(
        model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    )
    reaching = any(
        token.get("lstrip")
        or token.get("rstrip")
        or any(map(str.isspace, token["content"]))
        or CUT.search(token["content"])
        for token in tokenizer.get("added_tokens") or ()
    )
    return known and plain_bpe and not tokenizer.get("normalizer") and not reaching
