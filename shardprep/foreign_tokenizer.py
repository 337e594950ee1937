r"""Use a tokenizer.json that somebody else wrote, within limits of memory and time.

A tokenizer may have regular expressions, whose time can grow exponentially with a text, and replacements,
each of which can double it. So ``has_bounded_cost`` looks at all parts that change texts or ids. If it knows
that they take time and memory in proportion to the text, as in the tokenizers of Llama, GPT and Qwen, the
tokenizer is used in this process, at its full speed. Any other one is loaded and used in a process that the
kernel limits: a call may take 20 s of CPU time and 1 GiB of memory, and more for a text over 256 KiB.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from shardprep.errors import BadInput, ReadWriteError, ShardprepError
from shardprep.hub import is_library_fault, words_of_fault

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shardprep.limited_process import LimitedProcess

_MOST_CPU_S = 20  # of a call
_MOST_MEMORY_BYTES = 1 << 30  # of a call, beyond what importing tokenizers takes
_MOST_ANSWER_BYTES = 1 << 30
# A longer text may take longer: 256 bytes of memory, and a second per 100 kB.
_MEMORY_PER_BYTE = 256
_BYTES_PER_S = 100_000
FREE_BYTES = 256 << 10


class ForeignTokenizer:
    """A ``tokenizers.Tokenizer`` for which functions are called, here or in a process with limits.

    Raises BadInput that names ``name`` if a call takes too much or fails.
    """

    def __init__(self, content: bytes, name: str) -> None:
        """Load the content of a tokenizer.json. Raises ReadWriteError if it is none, and BadInput."""
        self._name = name
        self._content = content
        self._tokenizer: Tokenizer | None = None  # None: another process uses it
        self._settings: list[tuple[object, ...]] = []
        # Processes with limits that are not in use. A thread takes one, or starts one.
        self._idle: list[LimitedProcess] = []
        weakref.finalize(self, _end_all, self._idle)
        if not has_bounded_cost(content):
            self._idle.append(self._started())
            return
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_buffer(content)
        except BaseException as error:
            if not is_library_fault(error):
                raise
            raise ReadWriteError(f"{name} cannot be loaded: {error}; restore the folder as it was") from error

    def set_up(self, function: Callable[..., None], *args: object) -> None:
        """Call ``function(tokenizer, *args)``, which changes settings, before all other calls."""
        self.call(function, *args)
        self._settings.append((function, *args))

    @property
    def is_limited(self) -> bool:
        """Return whether another process uses it."""
        return self._tokenizer is None

    def call(self, function: Callable[..., Any], *args: object, num_bytes: int = 0) -> Any:
        """Return ``function(tokenizer, *args)``, in which arrays may be bytes. ``num_bytes``: of its text."""
        if self.is_limited:
            try:
                process = self._idle.pop()
            except IndexError:
                process = self._started()
            answer = self._ask(process, _call, (function, *args), num_bytes)
            self._idle.append(process)
            return answer
        try:
            return function(self._tokenizer, *args)
        except ShardprepError:
            raise
        except BaseException as error:
            if not is_library_fault(error):
                raise
            raise self._error(words_of_fault(error)) from None

    def _started(self) -> LimitedProcess:
        """Load the tokenizer in a new process with limits."""
        from shardprep.limited_process import LimitedProcess  # takes 10 ms, and most tokenizers need none

        process = LimitedProcess(
            name="uses a tokenizer",
            prepare=_prepare,
            memory_bytes=_MOST_MEMORY_BYTES,
            cpu_s=_MOST_CPU_S,
            answer_bytes=_MOST_ANSWER_BYTES,
            is_quiet=True,
        )
        self._ask(process, _load, self._content, len(self._content))
        for setting in self._settings:
            self._ask(process, _call, setting, 0)
        return process

    def _ask(
        self, process: LimitedProcess, function: Callable[..., Any], item: object, num_bytes: int
    ) -> Any:
        from shardprep.limited_process import CallFailed

        more_bytes = max(0, num_bytes - FREE_BYTES)
        more = {"more_cpu_s": more_bytes // _BYTES_PER_S, "more_memory_bytes": more_bytes * _MEMORY_PER_BYTE}
        try:
            (answer,) = process.call_each(function, (), [item], **more)
        except CallFailed as error:
            raise self._error(error.what) from None
        return answer

    def _error(self, what: str) -> BadInput:
        expected = "the tokenizer of a model that you trust, in a new plan"
        return BadInput(path=self._name, found=f"a tokenizer that {_as_predicate(what)}", expected=expected)


def _as_predicate(what: str) -> str:
    begins = ("took ", "gave ", "crashed ")
    return what if what.startswith(begins) else f"failed ({what})"


def _end_all(processes: list[LimitedProcess]) -> None:
    for process in processes:
        process.end()


# In the process with limits.
_loaded: list[Tokenizer] = []


def _prepare() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads would take address space
    import tokenizers  # noqa: F401


def _load(content: bytes) -> None:
    from tokenizers import Tokenizer

    _loaded[:] = [Tokenizer.from_buffer(content)]


def _call(asked: tuple[Any, ...]) -> object:
    function, *args = asked
    return function(_loaded[0], *args)


# The parts of a tokenizer.json. -------------------------------------------------------------------------

GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_REGEX = LLAMA3_REGEX.replace("{1,3}", "")
_CL100K_REGEX = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s+"
)
_TITLE = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_REGEX = (
    r"[^\r\n\p{L}\p{N}]?TITLE*LOWER+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?TITLE+LOWER*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
).replace("TITLE", _TITLE).replace("LOWER", _LOWER)  # fmt: skip
# Regular expressions that take a time in proportion to any text: each begins again after what it matched, and
# goes back over one run of characters at most.
KNOWN_REGEXES = {
    GPT2_REGEX,
    GPT2_REGEX.replace("'s|'t|'re|'ve|'m|'ll|'d", "'(?:[sdmt]|ll|ve|re)"),
    LLAMA3_REGEX,
    LLAMA3_REGEX.replace(r"\s*[\r\n]+", r"\s*[\r\n]"),
    _QWEN2_REGEX,
    _QWEN2_REGEX.replace(r"\s*[\r\n]+", r"\s*[\r\n]"),
    _CL100K_REGEX,
    _O200K_REGEX,
    _O200K_REGEX.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", ""),
}
# One character or class of characters, any number of times: nothing after it makes the search go back. Or a
# text without any sign of a regular expression.
_TIMES = r"(?:[+*?]|\{\d{1,3}(?:,\d{0,3})?\})?"
_SIMPLE_REGEX = (
    rf"(?:\\[a-zA-Z]|\\[pP]\{{\^?\w+\}}|\[(?:\\.|[^\[\]\\])+\]|[^\\^$.|?*+()\[\]{{}}]){_TIMES}"
    r"|[^\\^$.|?*+()\[\]{}]+"
)

_MOST_GROWTH = 64  # bytes that one byte of text may become
_MOST_ADDED_BYTES = 1 << 20  # of all added tokens
_MOST_AROUND = 64  # tokens around a text
# Growth by type, of parts without a regular expression of the file. NFKD makes 33 bytes of 3.
_GROWTH_OF_NORMALIZER = {
    "NFC": 3, "NFD": 4, "NFKC": 11, "NFKD": 11, "Lowercase": 3, "StripAccents": 1, "Strip": 1, "Nmt": 1,
    "BertNormalizer": 4, "ByteLevel": 2,
}  # fmt: skip
_GROWTH_OF_PRE_TOKENIZER = {
    "ByteLevel": 2, "Whitespace": 1, "WhitespaceSplit": 1, "BertPreTokenizer": 1, "Metaspace": 4, "Digits": 1,
    "Punctuation": 1, "CharDelimiterSplit": 1, "UnicodeScripts": 1,
}  # fmt: skip
_GROWTH_OF_DECODER = {
    "ByteLevel": 1, "Metaspace": 1, "WordPiece": 2, "BPEDecoder": 2, "ByteFallback": 1, "Fuse": 1, "Strip": 1,
}  # fmt: skip
_BEGINS_VALUE = re.compile(rb":[ \t\r\n]*[\[{]")  # that is an object or a list
# In the model, only these have such a value. A second "normalizer" after it would count.
_KEYS_OF_MODEL = (b'"model"', b'"vocab"', b'"merges"')
_MOST_BYTES_BEFORE = 64  # a colon, to see the key
_TYPE_OF_MODEL = re.compile(rb'type"\s*:\s*"(\w+)"')  # a quote in front would double the search's time
_CHEAP_MODELS = ([b"BPE"], [b"WordLevel"])  # of any words and tokens
_ESCAPED_LETTER = re.compile(rb"\\u00(?:[46][0-9a-fA-F]|[57][0-9aA])")  # nobody writes one so
_MOST_WORD_CHARS = 1000  # WordPiece takes quadratic time for long words
_MOST_PIECE_BYTES = 256  # Unigram looks for pieces of each length at each byte
# Decoding an id gives a token. One of 1,023 bytes or more covers all between two multiples of this number.
_TOKEN_BYTES = 512
_BLOCK_BYTES = 256 << 10  # stays in the cache of a core


class UnknownCost(ValueError):
    """A part of a tokenizer may take more than a time and a memory in proportion to the text."""

    def __init__(self) -> None:
        super().__init__("one of its parts may take exponential time or memory")


def has_bounded_cost(tokenizer_json: bytes) -> bool:
    """Return whether loading this tokenizer, encoding and decoding take a time in proportion to the text.

    If there is any doubt, the answer is no. Of a file that is no JSON it is yes: it is refused at once.
    """
    if tokenizer_json.lstrip()[:1] != b"{":
        return True
    try:
        head, model = split_tokenizer(tokenizer_json)
        if not isinstance(head, dict) or not all(
            isinstance(it, dict) for it in head.get("added_tokens") or []
        ):
            return True  # it is refused at once
        if _has_other_parts(model):
            return False
        _check_model(model)
        check_bounded_cost(head)
    except orjson.JSONDecodeError:
        return not _may_be_json(tokenizer_json)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return True


def _has_other_parts(model: bytes) -> bool:
    """Return whether there is more than the model in the bytes that begin with it."""
    for match in _BEGINS_VALUE.finditer(model):
        before = model[max(0, match.start() - _MOST_BYTES_BEFORE) : match.start()].rstrip(b" \t\r\n")
        # A quote after a letter or a digit ends a string. That of a token such as ":[ begins one.
        ends_key = not before or (before.endswith(b'"') and before[-2:-1].isalnum())
        if ends_key and not before.endswith(_KEYS_OF_MODEL):
            return True
    return False


def _check_model(model: bytes) -> None:
    """Raise UnknownCost, or another error, unless a model takes a time in proportion to texts and ids."""
    if _ESCAPED_LETTER.search(model) or _has_long_token(model):
        raise UnknownCost
    if _TYPE_OF_MODEL.findall(model) in _CHEAP_MODELS:
        return
    parsed = orjson.loads(b"{" + model)["model"]
    kind = parsed.get("type")
    if kind is None and "merges" in parsed and "max_input_chars_per_word" not in parsed:
        kind = "BPE"  # as tokenizers wrote it once
    if kind == "WordPiece":
        is_cheap = parsed["max_input_chars_per_word"] <= _MOST_WORD_CHARS
    elif kind == "Unigram":
        is_cheap = all(len(piece.encode()) <= _MOST_PIECE_BYTES for piece, _ in parsed["vocab"])
    else:
        is_cheap = kind in ("BPE", "WordLevel")
    if not is_cheap:
        raise UnknownCost


def _has_long_token(model: bytes) -> bool:
    """Return whether somewhere no string begins or ends for so long that a token may be that long."""
    num_parts = len(model) // _TOKEN_BYTES
    whole = np.frombuffer(model, np.uint8, num_parts * _TOKEN_BYTES)
    for begin in range(0, len(whole), _BLOCK_BYTES):
        # content: uint8[up to _BLOCK_BYTES]; is_end: bool, of the same shape
        content = whole[begin : begin + _BLOCK_BYTES]
        is_end = content == ord('"')
        is_end[1:] &= content[:-1] != ord("\\")
        if not is_end.reshape(-1, _TOKEN_BYTES).any(axis=1).all():
            return True
    return False


def _may_be_json(content: bytes) -> bool:
    """Return whether tokenizers may accept what orjson refuses, such as lone surrogates in unused parts."""
    try:
        json.loads(content.decode())
    except UnicodeDecodeError:
        return True
    except ValueError:
        return False
    return True


def check_bounded_cost(head: dict[str, Any]) -> None:
    """Raise UnknownCost, or another error, unless the parts beside the model have a bounded cost."""
    normalized = _growth(head.get("normalizer"), "normalizers", _GROWTH_OF_NORMALIZER)
    split = _growth(head.get("pre_tokenizer"), "pretokenizers", _GROWTH_OF_PRE_TOKENIZER)
    decoded = _growth(head.get("decoder"), "decoders", _GROWTH_OF_DECODER)
    added = sum(len(token["content"]) for token in head.get("added_tokens") or [])
    if normalized * split > _MOST_GROWTH or decoded > _MOST_GROWTH or added > _MOST_ADDED_BYTES:
        raise UnknownCost
    if _num_around(head.get("post_processor")) > _MOST_AROUND:
        raise UnknownCost


def _growth(part: dict[str, Any] | None, parts: str, known: dict[str, int]) -> float:
    """Return how many bytes a part makes of one at most. ``parts``: the key of a sequence's parts."""
    if part is None:
        return 1
    kind = part["type"]
    if kind == "Sequence":
        growth = 1.0
        for each in part[parts]:
            growth *= _growth(each, parts, known)
        return growth
    if kind == "Prepend":
        return 1 + len(part["prepend"].encode())
    if kind in ("Replace", "Split"):
        ((how, pattern),) = part["pattern"].items()
        is_known = how == "String" or pattern in KNOWN_REGEXES or re.fullmatch(_SIMPLE_REGEX, pattern)
        if not pattern or not is_known:
            raise UnknownCost
        if kind == "Split":
            return 1
        num_new = len(part["content"].encode())
        # A regular expression may match between any two characters, too.
        return max(1, num_new / len(pattern.encode())) if how == "String" else 1 + num_new
    return known[kind]


def _num_around(processor: dict[str, Any] | None) -> int:
    """Return how many tokens a post-processor adds. Raises an error if it repeats the text."""
    if processor is None or processor["type"] == "ByteLevel":
        return 0
    if processor["type"] == "Sequence":
        return sum(map(_num_around, processor["processors"]))
    if processor["type"] in ("BertProcessing", "RobertaProcessing"):
        return 2
    if processor["type"] != "TemplateProcessing":
        raise UnknownCost
    num_texts = num_tokens = 0
    for item in processor["single"]:
        if "Sequence" in item:
            num_texts += 1
        else:
            num_tokens += len(processor["special_tokens"][item["SpecialToken"]["id"]]["ids"])
    if num_texts != 1:
        raise UnknownCost
    return num_tokens


def split_tokenizer(tokenizer_json: bytes) -> tuple[dict[str, Any], bytes]:
    """Split a tokenizer.json into the parts before the model, parsed, and the bytes ``"model": {...}}``.

    ``tokenizers`` writes the model last, and it is most of the file. In this order it is not parsed.
    """
    model = tokenizer_json[max(0, tokenizer_json.find(b'"model": {')) :]
    head = tokenizer_json[: -len(model)].rstrip().rstrip(b",") + b"}"
    with contextlib.suppress(orjson.JSONDecodeError):
        parsed: dict[str, Any] = orjson.loads(head)
        if parsed.keys() >= {"added_tokens", "pre_tokenizer", "post_processor"}:
            return parsed, model
    parsed = orjson.loads(tokenizer_json)
    return parsed, orjson.dumps({"model": parsed.pop("model")})[1:]
