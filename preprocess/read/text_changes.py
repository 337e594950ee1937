"""What may be done to a text before it is encoded; nothing, unless an option asks for it.

The libraries that change text have versions, which are in the plan: another version may give another text.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from importlib import metadata

from preprocess.read.text_fields import UnusableText
from shardprep.command_line import needs
from shardprep.errors import Refused, UsageError
from shardprep.format.options import PlanOptions

_MOJIBAKE_RULE = "rule 2"  # of what --fix_text leaves out: another one gives other documents
_MOST_LAYERS = 4  # text may have been read wrongly more than once


def change_text(text: str, options: PlanOptions) -> str | UnusableText | None:
    """The text as it is to be encoded, why it cannot be had, or None where it is filtered out."""
    if options.fix_text and not text.isascii():
        fixed = undo_mojibake(text)
        if fixed is None:
            return UnusableText("mojibake", "it was read in a wrong encoding, and bytes of it are lost")
        text = fixed
    if options.normalize:
        text = unicodedata.normalize(options.normalize, text)
    if len(text) < options.min_chars or (options.max_chars and len(text) > options.max_chars):
        return None
    return text


def undo_mojibake(text: str) -> str | None:
    """Text that was UTF-8 and was read as another code page, as it was; other text as it is.

    None where it was read so and no code page restores the whole of it: it is never mended in part. ftfy's
    judgement of what looks so decides, and ftfy's code pages are tried. A text that looks so only here and
    there merely mentions such characters, and is kept as it is: see ``_is_misread``.
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
            return None if _is_misread(text) else text
    return None if is_bad(text) else text


def _is_misread(text: str) -> bool:
    """Whether more of a text's characters beyond ASCII were misread than read right.

    A misread character is a beginning of UTF-8 with some byte that goes on, such as \u00c3\u00a9 for
    \u00e9. Every other character beyond ASCII is one that was read right.
    """
    runs = _misread_runs().findall(text)
    num_in_runs = sum(not char.isascii() for run in runs for char in run)
    num_right = sum(not char.isascii() for char in text) - num_in_runs
    return len(runs) > num_right


@functools.lru_cache(maxsize=1)
def _misread_runs() -> re.Pattern[str]:
    """Characters that UTF-8 begins with, and those that go on, the first of which may be lost."""
    from ftfy.chardata import UTF8_CLUES as CLUES

    goes_on, surely = CLUES["utf8_continuation"].replace(" ", ""), CLUES["utf8_continuation_strict"] + "„‚•"
    of_2, of_3, of_4 = (CLUES[f"utf8_first_of_{number}"] for number in (2, 3, 4))
    second = f"(?:[{surely}\ufffd]|[?](?=[{surely}]))"
    return re.compile(f"[{of_2}][{goes_on}]|[{of_3}]{second}[{goes_on}]?|[{of_4}]{second}[{goes_on}]{{0,2}}")


def text_versions(options: PlanOptions) -> str:
    """The versions of what changes text, "" where nothing does. Raises UsageError where ftfy is missing."""
    versions = []
    if options.fix_text:
        try:
            versions.append(f"ftfy {metadata.version('ftfy')} ({_MOJIBAKE_RULE})")
        except metadata.PackageNotFoundError:
            raise UsageError(needs("--fix_text", "ftfy")) from None
    if options.fix_text or options.normalize:
        versions.append(f"Unicode {unicodedata.unidata_version}")
    return ", ".join(versions)


def check_text_versions(options: PlanOptions) -> None:
    """That what changes text is here in the plan's versions. Raises Refused, or UsageError."""
    found = text_versions(options)
    if found != options.text_versions:
        raise Refused(
            f"the plan changes text with {options.text_versions or 'nothing'}, here {found}: another "
            "version may give another text; use the Python and the libraries that planned, or plan anew"
        )
