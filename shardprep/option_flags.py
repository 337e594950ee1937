"""Flags for the options of a dataclass, and what a user gave of them."""

from __future__ import annotations

import argparse
import functools
import re
import types
import typing
from collections.abc import Container
from dataclasses import fields
from pathlib import Path
from typing import Any

from shardprep.errors import UsageError

_METAVARS = {int: "N", float: "X", Path: "PATH"}
_type_hints = functools.cache(typing.get_type_hints)  # 2 ms a class: each annotation is compiled anew


def add_flags_of(
    parser: argparse._ActionsContainer,
    options: type,
    *,
    exclude: Container[str] = (),
    is_grouped: bool = True,
) -> None:
    """Add a flag for each option of a dataclass, except ``exclude``, under the titles of their groups."""
    hints = _type_hints(options)
    items = [item for item in fields(options) if item.metadata["help"] and item.name not in exclude]
    place_of: dict[str, argparse._ActionsContainer] = {}  # by the title of a group
    for item in items:
        title = item.metadata["group"]
        if title not in place_of:
            place_of[title] = parser.add_argument_group(title) if is_grouped else parser
    own = vars(options)["__annotations__"]  # these come before inherited ones
    for item in sorted(items, key=lambda item: item.name not in own):
        text = str(item.metadata["help"])
        if "(default" not in text:
            default = item.metadata.get("shown") or shown_default(item.default)
            text += f" (default: {default})"
        # A flag that is not given is absent from the namespace, unlike one that is given its default.
        settings = {**_type_settings(hints[item.name]), "default": argparse.SUPPRESS}
        place = place_of[item.metadata["group"]]
        place.add_argument(f"--{item.name}", help=text.replace("%", "%%"), **settings)


def shown_default(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default) if default else "none"


def given_of(args: argparse.Namespace, options: type) -> dict[str, Any]:
    """Return the values of a dataclass's fields that the user gave as flags."""
    names = {item.name for item in fields(options)}
    return {name: value for name, value in vars(args).items() if name in names}


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str, flag: str, *, such_as: str = "512M or 2G") -> int:
    """Return the bytes of ``512M``, ``512MB`` or ``512MiB``, all binary. Raises UsageError."""
    # 128b is refused: to lfs it means blocks of 512 bytes.
    match = re.fullmatch(r"([0-9]{1,18})(?:([KMGT])(?:i?B)?)?", text.strip(), re.IGNORECASE)
    if not match:
        raise UsageError.of_value(flag, text, f"a number of bytes such as {such_as}")
    return int(match[1]) * _UNITS[(match[2] or "").upper()]


def _number_or_text(text: str) -> int | str:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _type_settings(hint: Any) -> dict[str, Any]:
    """Return the settings of argparse for a field's type, with or without ``| None``."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)] if is_union else [hint]
    if set(kinds) == {int, str}:
        return {"type": _number_or_text, "metavar": "N"}
    (kind,) = kinds
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        shown = ",".join(filter(None, choices))
        return {"choices": choices, "metavar": f"{{{shown}}}"}
    return {"type": kind, "metavar": _METAVARS.get(kind, "TEXT")}
