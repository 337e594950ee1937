"""What other tools leave beside their data, and what they call it: which files of a folder are no input.

pyarrow.dataset, Spark and ``datasets`` leave these names out, too. Files are opened only where their names
make it likely that they hold the same.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from preprocess.read.compressed import COMPRESSIONS, decompressed
from preprocess.read.inputs import OpenInput
from shardprep.command_line import needs
from shardprep.console import counted, short_bytes
from shardprep.errors import BadInput, ShardprepError, UsageError
from shardprep.format.input_formats import input_kind, known_input_kind
from shardprep.format.options import SPLITS

# Why a name is left out, and what a user can do about it. plan.json has the reasons as they stand here.
UNKNOWN = "unknown suffix"
UNDERSCORE = "begins with _"
DELTA_LOG = "_delta_log"
REMEDIES = {
    UNKNOWN: "; --also '{pattern}' takes such files, as plain text",
    "file of a repository": "; --also '{pattern}' takes it",
    "note of datasets": "",
    "cache of datasets": "; --also '{pattern}' takes it",
    "note of Iceberg": "; files of old snapshots are taken, too: export the table if rows were replaced",
    "hidden": "; rename what is an input",
    "AppleDouble": "",
    UNDERSCORE: ", as Spark does; --also '{pattern}' takes it",
}
# What ``datasets`` puts beside its data.
_NOTES = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
# What ``Dataset.map`` and the like leave there: the rows once more, as they were before, or after.
_CACHE = re.compile(r"cache-[\w-]+\.arrow")
_REPOSITORY_NAME = re.compile(
    r"((readme|requirements)([-_.].+)?|(licen[cs]e|third[-_]party[-_]notices?)([-.].+)?|copying|copyright"
    r"|notices?|changelog|contributing|contributors|code[-_]of[-_]conduct|cmakelists|robots|checksums?"
    r"|(md5|sha1|sha256|sha512)sums?)\.txt"
)
_SPLIT_WORDS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
_BEGINNING_BYTES = 64 << 10
_NUM_THREADS = 16


def why_no_folder(name: str) -> str | None:
    """Why what a folder of this name holds is no input; None where it may be."""
    if name.startswith("."):
        return "hidden"
    # A partition may have such a name: _year=2026.
    return UNDERSCORE if name.startswith("_") and "=" not in name else None


def why_no_input(name: str) -> str | None:
    """Why a file of this name is no input; None where it is."""
    if name.startswith("."):
        return "AppleDouble" if name.startswith("._") else "hidden"
    if name.startswith("_") and "=" not in name:
        return UNDERSCORE
    if known_input_kind(name) is None:
        return UNKNOWN
    if name in _NOTES:
        return "note of datasets"
    if _CACHE.fullmatch(name):
        return "cache of datasets"
    if name.endswith(".metadata.json") or name == "version-hint.text":
        return "note of Iceberg"
    return "file of a repository" if _REPOSITORY_NAME.fullmatch(name.lower()) else None


def split_of(path: str) -> str:
    """The split that a file's name tells, or the nearest of its folders': "train", ...; "" for none.

    As ``datasets`` reads them: ``data/train-00000-of-00002.parquet``, ``wiki.valid.txt``, ``test/a.jsonl``.
    """
    *folders, name = path.lower().split("/")
    stem = name.removesuffix(f".{name.rpartition('.')[2]}") if "." in name else name
    if input_kind(path).compression:
        stem = stem.rpartition(".")[0] or stem
    for part in (stem, *reversed(folders)):
        words = [word for word in re.split(r"[^a-z]+", part) if word not in ("", "of")]
        found = {_SPLIT_WORDS[word] for word in (*words[:1], *words[-1:]) if word in _SPLIT_WORDS}
        if len(found) == 1:
            return found.pop()
    return ""


def compressed_copies(root: Path, paths: Iterable[str]) -> list[str]:
    """Which files are others in a compressed form, as ``gunzip -k`` leaves ``a.jsonl`` beside ``a.jsonl.gz``.

    The first 64 KiB of their text are compared.
    """
    forms: dict[str, list[str]] = {}
    for path in paths:
        is_packed = bool(input_kind(path).compression)
        forms.setdefault(path.rpartition(".")[0] if is_packed else path, []).append(path)

    def copies_among(plain: str, group: list[str]) -> list[str]:
        # A plain one goes before all others: shards may begin inside of it.
        first, *others = sorted(group, key=lambda path: (path != plain, path))
        beginning = _beginning_of_text(root / first)
        return [path for path in others if beginning and _beginning_of_text(root / path) == beginning]

    groups = [(plain, group) for plain, group in forms.items() if len(group) > 1]
    if not groups:
        return []
    with ThreadPoolExecutor(_NUM_THREADS) as pool:  # to open a file is a round trip
        return list(itertools.chain.from_iterable(pool.map(lambda of: copies_among(*of), groups)))


def _beginning_of_text(path: Path) -> bytes | None:
    """The first bytes of a file's text; None where it cannot be read: planning will say why."""
    try:
        file = OpenInput(path)
        if not (compression := input_kind(path.name).compression):
            return file.read(0, _BEGINNING_BYTES)
        span = (0, file.stamp.num_bytes)
        pieces = decompressed(file, COMPRESSIONS[compression], file.read_all, span, _BEGINNING_BYTES, 0)
        return next(pieces).data[:_BEGINNING_BYTES]
    except ShardprepError:
        return None


def files_of_delta_table(folder: Path) -> set[str]:
    """The data files of a Delta table as it is now, relative to its folder.

    Files of older versions lie among them until somebody vacuums. Raises BadInput where its log does not say
    all, or says of rows that they are deleted; UsageError without pyarrow.
    """
    log = folder / DELTA_LOG
    commits = {int(path.stem): path for path in log.glob("*.json") if re.fullmatch(r"\d{20}", path.stem)}
    first, current = 0, dict[str, Any]()
    checkpoints = sorted(log.glob("*.checkpoint.parquet"))
    if 0 not in commits and checkpoints:
        first = int(checkpoints[-1].name.partition(".")[0]) + 1
        for action in _actions_of_checkpoint(checkpoints[-1]):
            _apply(action, current)
    numbers = sorted(number for number in commits if number >= first)
    if numbers != list(range(first, first + len(numbers))) or not (numbers or first):
        raise _unreadable_table(folder, "the log has gaps, or its checkpoint has several parts")
    for number in numbers:
        try:
            for line in commits[number].read_bytes().splitlines():
                _apply(json.loads(line), current)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise _unreadable_table(folder, f"{commits[number].name}: {error}") from None
    if deleted := [path for path, vector in current.items() if vector is not None]:
        raise _unreadable_table(folder, f"rows of {deleted[0]} are deleted by a deletion vector")
    return {unquote(path) for path in current}


def _actions_of_checkpoint(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError(needs("the checkpoint of a Delta table", "pyarrow")) from None
    try:
        table = pyarrow.parquet.read_table(path, columns=["add"], use_threads=False)
        return [{"add": add} for add in table["add"].to_pylist() if add is not None]
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable_table(path.parent.parent, f"{path.name}: {error}") from None


def _apply(action: Mapping[str, Any], current: dict[str, Any]) -> None:
    """Follow one line of a log: data file -> its deletion vector, if it has one."""
    if add := action.get("add"):
        current[add["path"]] = add.get("deletionVector")
    elif remove := action.get("remove"):
        current.pop(remove["path"], None)


def _unreadable_table(folder: Path, why: str) -> BadInput:
    return BadInput(
        f"{folder} is a Delta table whose files do not tell its rows ({why}); write its rows to a folder of "
        "their own, such as by deltalake's DeltaTable(...).to_pyarrow_table(), and plan that"
    )


def split_lines(sizes: Sequence[tuple[str, int]], chosen: str) -> list[str]:
    """What to say of the splits of the files that are taken, given their paths and bytes."""
    by_split: dict[str, list[int]] = {}
    for path, num_bytes in sizes:
        by_split.setdefault(split_of(path), []).append(num_bytes)
    named = [name for name in SPLITS if name in by_split]
    if not chosen and len(named) < 2:
        return []
    shown = ", ".join(
        f"{name or 'no split'} {counted(len(by_split[name]), 'file')} ({short_bytes(sum(by_split[name]))})"
        for name in (*named, "")
        if name in by_split
    )
    if chosen:
        return [f"splits by their names: {shown}"]
    return [f"warning: splits by their names: {shown}; all are taken: --split {named[0]} takes one alone"]
