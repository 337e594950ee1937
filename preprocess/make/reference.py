"""The reference engine, ``tokenizers``, and which tokens of a conversation the assistant wrote."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from preprocess.make.engine import Engine, Spans
from preprocess.make.token_ids import NO_LOSS, Ids, TokenBatch
from preprocess.read.formats import Numbers, Texts
from shardprep.errors import BadInput
from shardprep.files import read_regular
from shardprep.foreign_tokenizer import FREE_BYTES, ForeignTokenizer
from shardprep.format.names import MAX_TOKENIZER_BYTES
from shardprep.format.plan_options import MaskRule
from shardprep.hub import is_library_fault, words_of_fault

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


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

    def encode_each(function: Callable[..., Any], texts: list[bytes], *args: object) -> TokenBatch:
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

    return Engine(
        name="tokenizers",
        encode_with=encode,
        encode_chat=encode_chat,
        can_fork=not tokenizer.is_limited,
    )


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


def _set_up(tokenizer: Tokenizer, allow_special_tokens: bool) -> None:
    tokenizer.encode_special_tokens = not allow_special_tokens
    tokenizer.no_truncation()
    tokenizer.no_padding()


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the text of ids, with the names of special tokens."""
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text


def _encode(
    tokenizer: Tokenizer, name: str, texts: list[str], add_special_tokens: bool
) -> tuple[Ids, Numbers]:
    call = functools.partial(tokenizer.encode_batch_fast, add_special_tokens=add_special_tokens)
    encodings = _encodings(call, texts, name)
    batch = TokenBatch.of([np.array(encoding.ids, np.uint32) for encoding in encodings])
    return batch.ids, batch.offsets


def _encode_chat(
    tokenizer: Tokenizer, name: str, texts: list[str], spans: Sequence[Spans], mask_rule: MaskRule
) -> tuple[Ids, Numbers]:
    call = functools.partial(tokenizer.encode_batch, add_special_tokens=False)
    encodings = _encodings(call, texts, name)
    ids = [np.array(encoding.ids, np.uint32) for encoding in encodings]
    for text_ids, encoding, spans_of_text in zip(ids, encodings, spans, strict=True):
        text_ids[~_are_written(encoding, spans_of_text, mask_rule)] |= NO_LOSS
    batch = TokenBatch.of(ids)
    return batch.ids, batch.offsets


def _encodings(encode: Callable[[list[str]], list[Encoding]], texts: list[str], name: str) -> list[Encoding]:
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


def _are_written(encoding: Encoding, spans: Spans, mask_rule: MaskRule) -> npt.NDArray[np.bool_]:
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
