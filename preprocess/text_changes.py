"""What may be done to a text before it is encoded: mojibake undone, Unicode normalized, lengths limited.

Nothing of it happens unless it is asked for. The libraries that change text have versions, which lie in the
plan: another version may give another text.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from importlib import metadata
from typing import Literal, cast

from preprocess.text_fields import UnusableText
from shardprep.errors import UsageError

Normalize = Literal["", "NFC", "NFD", "NFKC", "NFKD"]
_MOST_LAYERS = 4  # text may have been read wrongly more than once


@dataclass(frozen=True, kw_only=True)
class TextChanges:
    """See the fields of PrepConfig of the same names."""

    fix_text: bool = False
    normalize: str = ""
    min_chars: int = 0
    max_chars: int = 0  # 0: no limit

    def apply(self, text: str) -> str | UnusableText | None:
        """The text as it is to be encoded, why it cannot be had, or None where it is filtered out."""
        if self.fix_text and not text.isascii():
            fixed = undo_mojibake(text)
            if fixed is None:
                return UnusableText("mojibake", "it was read in a wrong encoding, and bytes of it are lost")
            text = fixed
        if self.normalize:
            text = unicodedata.normalize(cast("Literal['NFC']", self.normalize), text)
        if len(text) < self.min_chars or (self.max_chars and len(text) > self.max_chars):
            return None
        return text


def undo_mojibake(text: str) -> str | None:
    """Text that was UTF-8 and was read as another code page, as it was; other text as it is.

    None where it looks so and no code page restores the whole of it: it is never mended in part. ftfy's
    judgement of what looks so decides, and ftfy's code pages are tried.
    """
    from ftfy.badness import is_bad
    from ftfy.chardata import CHARMAP_ENCODINGS

    for _ in range(_MOST_LAYERS):
        if not is_bad(text):
            return text
        for code_page in CHARMAP_ENCODINGS:
            try:
                restored = text.encode(code_page).decode("utf-8")
            except UnicodeError:
                continue
            text = restored
            break
        else:
            return None
    return None if is_bad(text) else text


def text_versions(*, fix_text: bool, normalize: str) -> str:
    """The versions of what changes text, "" where nothing does. Raises UsageError where ftfy is missing."""
    versions = []
    if fix_text:
        try:
            versions.append(f"ftfy {metadata.version('ftfy')}")
        except metadata.PackageNotFoundError:
            raise UsageError("--fix_text needs ftfy, which is not installed; run: pip install ftfy") from None
    if fix_text or normalize:
        versions.append(f"Unicode {unicodedata.unidata_version}")
    return ", ".join(versions)
