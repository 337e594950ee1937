"""Say what the looks at all inputs show together, before any shard is made.

Files of which no sampled record is usable end planning, each by its name, with the command that mends all. A
file with another encoding, or with other fields, than its neighbours is only named.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from preprocess.plan.looks import UNCLEAR, Look
from preprocess.plan.mending import (
    command_to_lines,
    flags_for_all,
    flags_of,
    is_by_name,
    problem_of_fields,
)
from preprocess.plan.other_files import ascii_if_odd
from preprocess.plan.sampling import first_records
from preprocess.read import encodings
from preprocess.read.text_fields import NoColumn
from shardprep.console import counted, printable
from shardprep.errors import BadInput
from shardprep.format import commands
from shardprep.format.inputs import InputKind, input_kind
from shardprep.format.plan import InputFile
from shardprep.format.plan_options import PlanOptions

_NUM_FIELDS_SHOWN = 20
_NUM_FILES_SHOWN = 10
_MANY_FILES = 4  # of which only the first is named
_FEW_SHARED = 0.5  # of the fields of two files, if they differ


class _Unusable(NamedTuple):
    """A file of which nothing can be made."""

    file: InputFile
    look: Look
    problem: BadInput


def refuse_unusable(input_dir: Path, files: Sequence[tuple[InputFile, Look]], options: PlanOptions) -> None:
    """Raise BadInput for files of which nothing can be made, each by its name, with what mends them."""
    unusable = [_Unusable(item, look, look.problem) for item, look in files if look.problem is not None]
    if not unusable:
        return
    unusable = _seen_in_tables(input_dir, unusable, options)
    # One that takes a command comes first, because the flags for the others can be told with it.
    unusable.sort(key=lambda each: not each.look.pipe)
    has_right = any(input_kind(file.path).format.has_fields and look.keeps_field() for file, look in files)
    flags = flags_for_all([each.look.flags or () for each in unusable], options, keeps_field=has_right)
    error = unusable[0].problem
    if unusable[0].look.pipe:
        _advise_command(error, input_dir, unusable, options, flags)
    elif flags and len(unusable) > 1:
        error.remedy = flags
        error.advice = f"plan with {flags}"
    by_found: dict[str, list[str]] = {}
    for each in unusable[1:_NUM_FILES_SHOWN]:
        by_found.setdefault(each.problem.found or str(each.problem), []).append(ascii_if_odd(each.file.path))
    if by_found:
        others = [f"{', '.join(names)} ({found})" for found, names in by_found.items()]
        num_more = len(unusable) - _NUM_FILES_SHOWN
        more = f" and {num_more} more" if num_more > 0 else ""
        num = counted(len(unusable) - 1, "other file")
        error.advise(f"nothing can be made of {num} either: {', '.join(others)}{more}")
    raise error


def _advise_command(
    error: BadInput,
    input_dir: Path,
    unusable: Sequence[_Unusable],
    options: PlanOptions,
    flags: str | None,
) -> None:
    """Set the remedy of an error to the command that makes JSON lines, and plans again if that mends all.

    ``flags``: of ``plan``, for all files, as ``flags_for_all`` returns them.
    """
    pipes = {each.file.path: each.look.pipe for each in unusable if each.look.pipe}
    error.remedy = command_to_lines(input_dir, pipes, options, most=_NUM_FILES_SHOWN)
    is_all_mended = flags is not None and all(each.look.flags is not None for each in unusable)
    again = commands.plan_again(flags or "") if is_all_mended and not is_by_name(options) else ""
    if again:
        error.remedy += f" && {again}"
    elif flags:
        error.advise(f"then plan with {flags}")
    if shutil.which("jq") is None:
        error.advise("jq is not installed here: install it first")


def _seen_in_tables(input_dir: Path, unusable: Sequence[_Unusable], options: PlanOptions) -> list[_Unusable]:
    """Find the field of the text in tables without the column that was asked for, once for equal columns."""
    found: dict[str | None, tuple[str, ...] | None] = {}  # columns -> flags that take the text
    seen: list[_Unusable] = []
    for item, look, error in unusable:
        columns = error.expected
        # One with advice says already what is wrong, such as another delimiter.
        is_unknown = isinstance(error, NoColumn) and error.advice is None
        if is_unknown and columns not in found and len(found) < _NUM_FILES_SHOWN:
            records = first_records(input_dir, item, options)
            error = problem_of_fields(input_dir / item.path, records, options) or error
            found[columns] = flags_of(error)
        flags = found.get(columns, look.flags)
        seen.append(_Unusable(item, look._replace(flags=flags), error))
    return seen


def lines_about(looks: Sequence[tuple[str, InputKind, Look]]) -> Iterator[str]:
    """Yield what is to be told about all files: encodings, fields, and files unlike their neighbours."""
    by_encoding: dict[str, list[str]] = {}
    by_names: dict[str, Counter[frozenset[str]]] = {}
    for name, kind, look in looks:
        if look.seen_encoding:
            by_encoding.setdefault(encodings.shown(look.seen_encoding), []).append(name)
        if look.names:
            by_names.setdefault(kind.format.suffixes[0], Counter())[look.names] += 1
    if len(by_encoding) > 1:
        yield f"encodings: {'; '.join(_with_example(key, some) for key, some in by_encoding.items())}"
    if UNCLEAR in by_encoding:
        some = _with_example("bytes that are not UTF-8", by_encoding[UNCLEAR])
        yield f"warning: {some}: records with them are left out; --encoding auto reads CP949"
    usual = {suffix: counts.most_common(1)[0] for suffix, counts in by_names.items()}
    differing: dict[str, list[str]] = {}  # the fields of files -> their names
    for name, kind, look in looks:
        names, num_files = usual.get(kind.format.suffixes[0], (look.names, 0))
        if num_files > 1 and len(names & look.names) < _FEW_SHARED * len(names | look.names):
            differing.setdefault(_shown_names(look.names), []).append(name)
    for shown, some_names in list(differing.items())[:_NUM_FILES_SHOWN]:
        yield f"warning: fields unlike those of other files: {_with_example(shown, some_names)}"
    note = next((look.note for _, _, look in looks if look.note), "")
    if note:
        yield f"note: {note}"


def _with_example(what: str, names: Sequence[str]) -> str:
    if len(names) < _MANY_FILES:
        shown = ", ".join(map(ascii_if_odd, names))
    else:
        shown = f"such as {ascii_if_odd(names[0])}"
    return f"{what} in {counted(len(names), 'file')}, {shown}"


def _shown_names(names: frozenset[str]) -> str:
    return ", ".join(printable(each) for each in sorted(names)[:_NUM_FIELDS_SHOWN])
