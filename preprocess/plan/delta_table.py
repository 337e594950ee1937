"""Which files of a Delta table hold its rows: files of older versions lie among them until a vacuum."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from shardprep.command_line import needs
from shardprep.errors import BadInput, UsageError

DELTA_LOG = "_delta_log"


def files_of_delta_table(folder: Path) -> set[str]:
    """Return the data files of a table as it is now, relative to its folder.

    Raises BadInput where its log does not say all, or says of rows that they are deleted; UsageError where a
    checkpoint asks for pyarrow.
    """
    log = folder / DELTA_LOG
    commits = {int(path.stem): path for path in log.glob("*.json") if re.fullmatch(r"\d{20}", path.stem)}
    first, vectors = 0, dict[str, Any]()  # data file -> its deletion vector, if it has one
    checkpoints = sorted(log.glob("*.checkpoint.parquet"))
    if 0 not in commits and checkpoints:
        first = int(checkpoints[-1].name.partition(".")[0]) + 1
        for added in _files_of_checkpoint(checkpoints[-1]):
            vectors[added["path"]] = added.get("deletionVector")
    numbers = sorted(number for number in commits if number >= first)
    if numbers != list(range(first, first + len(numbers))) or not (numbers or first):
        raise _unreadable(folder, "the log has gaps, or its checkpoint has several parts")
    for number in numbers:
        try:
            for line in commits[number].read_bytes().splitlines():
                _follow(json.loads(line), vectors)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise _unreadable(folder, f"{commits[number].name}: {error}") from None
    if deleted := [path for path, vector in vectors.items() if vector is not None]:
        raise _unreadable(folder, f"rows of {deleted[0]} are deleted by a deletion vector")
    return {unquote(path) for path in vectors}


def _follow(action: Mapping[str, Any], vectors: dict[str, Any]) -> None:
    if added := action.get("add"):
        vectors[added["path"]] = added.get("deletionVector")
    elif removed := action.get("remove"):
        vectors.pop(removed["path"], None)


def _files_of_checkpoint(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError(needs("the checkpoint of a Delta table", "pyarrow")) from None
    try:
        table = pyarrow.parquet.read_table(path, columns=["add"], use_threads=False)
        return [added for added in table["add"].to_pylist() if added is not None]
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(path.parent.parent, f"{path.name}: {error}") from None


def _unreadable(folder: Path, why: str) -> BadInput:
    return BadInput(
        f"{folder} is a Delta table whose files do not tell its rows ({why}); write its rows to a folder of "
        "their own, such as by deltalake's DeltaTable(...).to_pyarrow_table(), and plan that",
        path=folder,
        found=why,
        expected="a folder of its current rows",
    )
