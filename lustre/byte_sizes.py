"""Sizes as people type and read them, and as plain bytes: K, M, G and T are binary, as lfs has them."""

from __future__ import annotations

import re

from lustre.errors import LustreUsageError

_UNITS = (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))


def parse_size(text: str, name: str) -> int:
    """``4M``, ``4MB``, ``4MiB`` or ``4194304`` -> 4194304 bytes. Raises LustreUsageError, naming ``name``.

    Two habits of lfs are refused rather than shared: there a bare number below 4096 means KiB, and
    ``128b`` means blocks of 512 bytes. Here a bare number is bytes, whatever its size.
    """
    match = re.fullmatch(r"([0-9]{1,18})(?:([KMGT])(?:i?B)?)?", text, re.IGNORECASE)
    if not match:
        raise LustreUsageError(f"{name} is {text!r}, expected a number of bytes such as 4194304, 4M or 2G")
    return int(match[1]) * dict(_UNITS).get((match[2] or "").upper(), 1)


def size_text(num_bytes: int) -> str:
    """``4 MiB``: the largest binary unit that leaves a whole number."""
    for unit, size in _UNITS:
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size} {unit}iB"
    return f"{num_bytes} bytes"


def size_flag(num_bytes: int) -> str:
    """``4M``: the same, as ``parse_size`` reads it."""
    return size_text(num_bytes).replace(" bytes", "").replace(" ", "").replace("iB", "")
