"""Writes the outcomes of campaigns as they come, so that campaigns that are stopped count, too."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T", bound=Any)  # a dataclass


def recorded(outcomes: Iterable[T], path: Path | None) -> tuple[list[T], bool]:
    """Collect outcomes until they end or Ctrl-C, and write each to the file at once.

    Returns them, and whether they ended by themselves.
    """
    collected = list[T]()
    with (path or Path(os.devnull)).open("w", encoding="utf-8") as file:
        try:
            for outcome in outcomes:
                collected.append(outcome)
                file.write(json.dumps(asdict(outcome)) + "\n")
                file.flush()
        except KeyboardInterrupt:
            return collected, False
        except Exception:  # of a campaign that cannot go on
            traceback.print_exc()
            return collected, False
    return collected, True
