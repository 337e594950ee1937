"""Sizes as people type them."""

from __future__ import annotations

import re

from preprocess.shard_format import UsageError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str, flag: str) -> int:
    """``512M`` -> bytes; K, M, G and T are binary. Raises UsageError, naming the flag."""
    match = re.fullmatch(r"(\d+)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise UsageError(f"{flag} is {text!r}, expected a number of bytes such as 512M or 2G")
    return int(match[1]) * _UNITS[match[2].upper()]
