"""Texts on which engines may differ, and the hash of their ids."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from preprocess.make.code_points import is_new_code_point
from preprocess.make.token_ids import TokenBatch
from shardprep.foreign_tokenizer import split_tokenizer

FEW_BYTES = 1 << 18  # the reference encodes this much text in 0.05 s; comparing the engines takes 1 s
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
    # points: int64[code points], without surrogates and without the private use from U+F0100 on
    points = np.flatnonzero(~is_new_code_point())
    is_surrogate = (points >= 0xD800) & (points <= 0xDFFF)
    points = points[~is_surrogate & (points < 0xF0100)]
    # Ideographs and syllables of Hangul behave alike, and one context is enough for them.
    is_ideograph = (points >= 0x3400) & (points < 0xA000)
    is_ideograph |= (points >= 0xAC00) & (points < 0xD800)
    is_ideograph |= points >= 0x20000
    alone = [f"{c}\n \n" for c in map(chr, points[is_ideograph].tolist())]
    alone += [f"{c}\n \n1{c}1" for c in map(chr, points[~is_ideograph].tolist())]
    joined = ["".join(alone[begin : begin + 500]) for begin in range(0, len(alone), 500)]
    classes = "aZé가一ʰसा٣1½Ⅷ \t\xa0\u3000\u2028\n\r\x85'’!…😀\u200d\0\u0301ſK\ue000sSt"
    pairs = (f"x{a}{b}y {a}{b}{b}'{a}{b}1{a}" for a, b in itertools.product(classes, repeat=2))
    head, _ = split_tokenizer(tokenizer_json)
    tokens = [token["content"] for token in head.get("added_tokens") or []]
    known = "\u088f\ua7ce\ua7d2\ua7f1\U00010940\U00011de0\U00016ff4\U000323b0"
    return [
        *joined,
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
