"""Values of an option that differ by file: ``ko/*=cp949,utf-8``, or ``*.parquet:content,text``.

A value may have a pattern before it, of the path in the input folder, or of the name alone if the pattern
has no slash. A file takes the values whose pattern it matches, or else those without a pattern.
"""

from __future__ import annotations

import fnmatch
import functools

from shardprep.format.inputs import known_input_kind

AUTO = "auto"  # an encoding: that which a sample shows


def choices_for(path: str, option: str, mark: str) -> list[str]:
    """Return the values that a file takes, in order. ``mark``: between a pattern and its value."""
    matching: list[str] = []
    others: list[str] = []
    for pattern, value in parsed_choices(option, mark):
        if not pattern:
            others.append(value)
        elif fnmatch.fnmatchcase(path if "/" in pattern else path.rpartition("/")[2], pattern):
            matching.append(value)
    return matching or others


@functools.lru_cache(maxsize=8)  # asked for each file
def parsed_choices(option: str, mark: str) -> tuple[tuple[str, str], ...]:
    """Return (pattern, value) of each choice. The pattern is "" if it has none."""
    found: list[tuple[str, str]] = []
    for choice in filter(None, map(str.strip, option.split(","))):
        pattern, has_mark, value = choice.partition(mark)
        if has_mark and _is_pattern(pattern):
            found.append((pattern.strip(), value.strip()))
        else:
            found.append(("", choice))
    return tuple(found)


def _is_pattern(text: str) -> bool:
    """Return whether a text is a pattern of files, and not the beginning of a field's name."""
    return any(letter in text for letter in "*?[/") or known_input_kind(text) is not None
