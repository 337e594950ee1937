"""Declare options: ``option`` makes a field of a dataclass that is a flag, too. Imports nothing of ours."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str = "", **facts: Any) -> Any:  # noqa: A002 - argparse's word
    """Declare an option as a field of a frozen dataclass. Without ``help`` it is not a flag.

    Facts of a flag are ``group``, the title above it in the help, and ``shown``, its default in words.
    """
    return field(default=default, metadata={"help": help, **facts})
