"""The flags that the command of this process was given, for the commands that its messages advise.

``Program.run`` sets them, and ``start_child`` passes them on. In a program that calls our packages as a
library there are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_flags: dict[str, object] = {}


def flags() -> Mapping[str, object]:
    """Return the values of the flags by their names, and the name of the ``command``."""
    return _flags


@contextmanager
def flags_are(given: Mapping[str, object]) -> Iterator[None]:
    """Set the flags within ``with``."""
    before = dict(_flags)
    _flags.clear()
    _flags.update(given)
    try:
        yield
    finally:
        _flags.clear()
        _flags.update(before)
