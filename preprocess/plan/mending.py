"""What mends files of which nothing can be made: a flag of ``plan``, or a command that makes JSON lines."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preprocess.read import encodings
from shardprep.console import printable, quoted
from shardprep.errors import BadInput
from shardprep.format.inputs import InputKind, input_kind
from shardprep.format.plan_options import PlanOptions

_MOST_WHOLE_BYTES = 1 << 20  # of one object over several lines, to find the list in it
_NUM_FIELDS_SHOWN = 20
_OPENERS = {".gz": "zcat", ".zst": "zstdcat", ".xz": "xzcat", ".bz2": "bzcat", "": "cat"}
_LIST_IN_OBJECT = re.compile(rb'"([^"\\]+)"\s*:\s*\[\s*\{')
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_WHITE_SPACE = re.compile(r"\s")
_FIELD_FLAG = "--text_field "
_AUTO = "--encoding auto"


def flags_of(error: BadInput) -> tuple[str, ...]:
    """Return the flags that an error's remedy has, if they are known."""
    remedy = error.remedy or ""
    return (remedy,) if remedy.startswith("--") and not remedy.endswith(("NAME", "FILE")) else ()


def pipe_to_lines(beginning: bytes, codec: str) -> str:
    """Return the commands that make JSON lines of one list, or of one object over several lines, or ""."""
    filter_ = ".[]"
    if beginning.startswith(b"{"):
        if not _is_over_lines(beginning):
            return ""
        key = _list_in(beginning[:_MOST_WHOLE_BYTES])
        filter_ = "."
        if key:
            filter_ = f".{key}[]" if key.isidentifier() and key.isascii() else f'.["{key}"][]'
    is_utf_8 = codec in (encodings.UTF_8, encodings.UTF_8_WITH_MARK)
    recoded = "" if is_utf_8 else f"iconv -f {codec} -t utf-8 | "
    return f"{recoded}jq -c '{filter_}'"


def records_inside(beginning: bytes, codec: str) -> list[Any]:
    """Return the records of one list, or of one object over several lines. [] if it is cut."""
    try:
        value, _ = json.JSONDecoder().raw_decode(beginning.decode(codec))
    except ValueError:
        return []
    if isinstance(value, dict):
        key = _list_in(beginning[:_MOST_WHOLE_BYTES])
        value = value.get(key, []) if key else [value]
    return [each for each in value if isinstance(each, dict)]


def problem_of_json(path: Path, kind: InputKind, beginning: bytes, pipe: str) -> BadInput:
    """Return the error for one list, or for one object over several lines."""
    what = "one list of JSON"
    if beginning.startswith(b"{"):
        key = _list_in(beginning[:_MOST_WHOLE_BYTES])
        what = "an object over several lines" + (f", with its records in the list {key}" if key else "")
    stem = str(path.absolute()).removesuffix(_suffix_of(path.name))
    new = quoted(f"{stem}.lines.jsonl")
    moved = f"mv {quoted(path)} {quoted(f'{path}.whole')}"
    remedy = f"{_OPENERS[kind.compression]} {quoted(path)} | {pipe} > {new} && {moved}"
    return BadInput(path=path, found=what, expected="an object in each line", remedy=remedy)


def command_for_all(input_dir: Path, some: Sequence[str], pipe: str) -> str:
    """Return the command that makes one file of JSON lines of all files with a suffix in a folder.

    ``some``: paths of these files in the input folder, which are all that have the suffix.
    """
    suffix = _suffix_of(some[0])
    folder = input_dir.absolute() / _common_folder(some)
    files = f"find {quoted(folder)} -name '*{suffix}'"
    # A byte order mark that stands first in a file is dropped.
    opener = _OPENERS[input_kind(some[0]).compression]
    read = r"sed -s '1s/^\xef\xbb\xbf//'" if opener == "cat" else opener
    lines = f"{files} -print0 | sort -z | xargs -0 {read} | {pipe} > {quoted(folder / 'objects.jsonl')}"
    return f"{lines} && {files} -exec mv {{}} {{}}.whole ';'"


def _common_folder(names: Sequence[str]) -> Path:
    """Return the deepest folder in which all files are."""
    common = Path(names[0]).parent
    while not all(Path(name).is_relative_to(common) for name in names):
        common = common.parent
    return common


def _suffix_of(name: str) -> str:
    """Return the suffix of a file's name, with that of its compression."""
    num_suffixes = 2 if input_kind(name).compression else 1
    return "".join(Path(name).suffixes[-num_suffixes:])


def _is_over_lines(beginning: bytes) -> bool:
    """Return whether text begins with an object that ends in a later line, or where the text is cut."""
    text = beginning.decode(errors="replace")
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip())
    return "\n" in text[:end]


def _list_in(data: bytes) -> str:
    """Return the name of the first list of objects in an object that may be cut, or ""."""
    for match in _LIST_IN_OBJECT.finditer(data):
        before = _STRING.sub(b"", data[: match.start()])
        depth = sum(map(before.count, (b"{", b"["))) - sum(map(before.count, (b"}", b"]")))
        if depth == 1:
            return match[1].decode(errors="replace")
    return ""


def problem_of_fields(path: Path, records: Sequence[Any], options: PlanOptions) -> BadInput | None:
    """Return the error for records without the field of the text, with the flag for one that they have."""
    num_chars: Counter[str] = Counter()  # characters in the texts of each field
    num_listed: Counter[str] = Counter()  # and in the objects of each list
    flags: list[str] = []  # that would take the text, the best one first

    def look(record: dict[str, Any], place: str = "") -> None:
        for name, value in record.items():
            num_chars[place + name] += _num_chars(value)
            if isinstance(value, dict):
                look(value, f"{place}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                if "role" in value[0]:
                    field = "" if place + name == "messages" else f" {_FIELD_FLAG}{place}{name}"
                    flags.append(f"--record chat{field}")
                num_listed[place + name] += sum(map(_num_chars_inside, value))

    for record in records:
        look(record)
    if not num_chars:
        return None
    if any(isinstance(record.get("html"), bytes) for record in records):
        advice = "plan with --transform FILE, whose function takes the text out of record['html']"
        return BadInput(
            path=path, found="web pages", expected="texts", advice=advice, remedy="--transform FILE"
        )
    fields = ", ".join(printable(name) for name in list(num_chars)[:_NUM_FIELDS_SHOWN])
    if flags:  # what a conversation has beside its messages is no text
        for name in (options.tools_field, options.documents_field):
            num_chars.pop(name, None)
    kind = "a list of messages" if options.is_chat else "a string"
    wanted = options.text_template or options.text_field
    problem = BadInput(
        path=path, found=f"a sample of records with the fields {fields}", expected=f"{wanted!r} as {kind}"
    )
    listed = num_listed.most_common(1)
    if listed and not flags and listed[0][1] > max(num_chars.values()):
        inside = "".join(f"[{name!r}]" for name in listed[0][0].split("."))
        problem.advise(f"plan with --transform FILE, whose function joins the texts in record{inside}")
        problem.remedy = "--transform FILE"
        return problem
    flags += [f"{_FIELD_FLAG}{name}" for name, number in num_chars.most_common(1) if number]
    if not flags:
        problem.advise("no field has words")
    flags = list(dict.fromkeys(flags)) or [f"{_FIELD_FLAG}NAME"]
    problem.advise(f"plan with {', or '.join(flags)}")
    problem.remedy = flags[0]
    return problem


def _num_chars(value: Any) -> int:
    """Return the length of a text. A name, an address or an id has no white space, and is none."""
    return len(value) if isinstance(value, str) and _WHITE_SPACE.search(value) else 0


def _num_chars_inside(value: Any) -> int:
    return sum(map(_num_chars, value.values())) if isinstance(value, dict) else 0


def flags_for_all(flags: Sequence[str], options: PlanOptions, *, keeps_field: bool) -> str:
    """Return the flags that mend several files, each of which needs some of ``flags``, or "".

    ``keeps_field``: the text of other files is in the field of the options.
    """
    fields = [options.text_field] if keeps_field else []
    others: list[str] = []
    for flag, _ in Counter(flags).most_common():
        if flag.startswith(_FIELD_FLAG):
            fields.append(flag.removeprefix(_FIELD_FLAG))
        else:
            others.append(flag)
    if set(others) - {_AUTO} or (options.text_template and fields):
        return ""  # not all can be given together
    if len(fields) > keeps_field:
        others.append(_FIELD_FLAG + ",".join(dict.fromkeys(fields)))
    return " ".join(others)


def problem_of_encoding(path: Path, seen: str) -> BadInput:
    if seen:
        remedy = "--encoding auto"
        advice = f"plan with {remedy}, which takes each file as UTF-8 or as CP949"
        found = f"text in {encodings.shown(seen)} (undecodable as UTF-8)"
        return BadInput(path=path, found=found, expected="UTF-8", advice=advice, remedy=remedy)
    new = quoted(path.with_suffix(f".utf-8{path.suffix}"))
    moved = f"mv {quoted(path)} {quoted(f'{path}.before')}"
    remedy = f"iconv -f ENCODING -t utf-8 {quoted(path)} > {new} && {moved}"
    found = "undecodable text, neither UTF-8 nor clearly CP949"
    return BadInput(path=path, found=found, expected="UTF-8", remedy=remedy)
