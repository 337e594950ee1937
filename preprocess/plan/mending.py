"""What mends files of which nothing can be made: a flag of ``plan``, or a command that makes JSON lines."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from preprocess.read import encodings
from shardprep.console import printable, quoted
from shardprep.errors import BadInput, shell_word
from shardprep.format.choices import parsed_choices
from shardprep.format.inputs import input_kind
from shardprep.format.plan_options import PlanOptions

_MOST_WHOLE_CHARS = 1 << 20  # of one object over several lines, to find the list in it
_NUM_FIELDS_SHOWN = 20
_WITHOUT_MARK = r"sed -s '1s/^\xef\xbb\xbf//'"
_OPENERS = {".gz": "zcat", ".zst": "zstdcat", ".xz": "xzcat", ".bz2": "bzcat", "": _WITHOUT_MARK}
_RENAME = "mv --backup=numbered"
_LIST_IN_OBJECT = re.compile(r'"([^"\\]+)"\s*:\s*\[\s*\{')
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_LONG_NUMBER = re.compile(r"[:\[,]\s*-?\d{16,}\s*[,\]}]")
_WHITE_SPACE = re.compile(r"\s")
FUNCTION = "--transform FILE"
FIELD_FLAG = "--text_field "
_AUTO = "--encoding auto"


def flags_of(error: BadInput) -> tuple[str, ...] | None:
    """Return the flags that an error's remedy has, None if they are not known."""
    remedy = error.remedy or ""
    return (remedy,) if remedy.startswith("--") and not remedy.endswith(("NAME", "FILE")) else None


def pipe_to_lines(beginning: str, codec: str) -> str:
    """Return the commands that make JSON lines of one list, or of one object over several lines, or ""."""
    query = ".[]"
    if beginning.startswith("{"):
        if not _is_over_lines(beginning):
            return ""
        found = _first_list(beginning)
        query = "."
        if found:
            key = found[1]
            query = f".{key}[]" if key.isidentifier() and key.isascii() else f'.["{key}"][]'
    # As one program for all inputs, jq stops at the first error. Else it would end with 0 after later inputs.
    program = shlex.quote(f"inputs | {query}")
    if codec in (encodings.UTF_8, encodings.UTF_8_WITH_MARK):
        return f"jq -cn {program}"
    # With -a the lines are ASCII, which is right with any --encoding.
    return f"iconv -f {codec} -t utf-8 | jq -acn {program}"


def records_inside(beginning: str) -> list[Any]:
    """Return the first records of one list, or one object over several lines, that may be cut."""
    decoder = json.JSONDecoder()
    records: list[Any] = []
    at = 1
    if beginning.startswith("{"):
        found = _first_list(beginning)
        at = found.end() - 1 if found else 0
    # Between records stand white space and commas. What is no record ends the list, or is cut.
    with contextlib.suppress(ValueError):
        while at < len(beginning):
            if beginning[at] in " \t\r\n,":
                at += 1
                continue
            value, at = decoder.raw_decode(beginning, at)
            if isinstance(value, dict):
                records.append(value)
    return records


def problem_of_json(path: Path, beginning: str) -> BadInput:
    """Return the error for one list, or for one object over several lines."""
    what = "one list of JSON"
    if beginning.startswith("{"):
        found = _first_list(beginning)
        what = "an object over several lines" + (
            f", with its records in the list {found[1]}" if found else ""
        )
    problem = BadInput(path=path, found=what, expected="an object in each line")
    if _LONG_NUMBER.search(beginning):
        problem.advise("jq before 1.7 rounds its integers above 2^53")
    return problem


def command_to_lines(input_dir: Path, pipes: Mapping[str, str], options: PlanOptions, *, most: int) -> str:
    """Return the command that makes JSON lines of files, at once of all files of a folder that need the same.

    ``pipes``: of each file, by its path in the input folder; ``most``: files or folders.
    """
    # The first subfolder may be a document's source, so files of several ones are not joined.
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, pipe in pipes.items():
        folder, _, _ = name.rpartition("/")
        groups.setdefault((folder.partition("/")[0], _suffix_of(name), pipe), []).append(name)
    steps: list[str] = []
    taken: set[Path] = set()
    for (_, suffix, pipe), some in groups.items():
        finds = "" if is_by_name(options) or len(some) == 1 else _finds_all(input_dir, some)
        if finds:
            read = f"{finds} -print0 | sort -z | xargs -0 {_opener(some[0])}"
            new = _free(input_dir, f"{_common_folder(some) / 'objects'}", taken)
            steps.append(
                _step(read, pipe, new, f"{finds} -print0 | xargs -0 -I{{}} {_RENAME} {{}} {{}}.whole")
            )
            continue
        for name in some[:most]:
            new = _free(input_dir, f"{name.removesuffix(suffix)}.lines", taken)
            renames = f"{_RENAME} {_word(name)} {_word(f'{name}.whole')}"
            steps.append(_step(f"{_opener(name)} {_word(name)}", pipe, new, renames))
    return f"(set -o pipefail; cd {quoted(input_dir)} && {' && '.join(steps[:most])})"


def is_by_name(options: PlanOptions) -> bool:
    """Return whether options depend on the names of files, and may not fit those of new files."""
    patterns = [
        *(pattern for pattern, _ in parsed_choices(options.encoding, "=")),
        *(pattern for pattern, _ in parsed_choices(options.text_field, ":")),
    ]
    return any(patterns) or bool(options.split)


def _step(read: str, pipe: str, new: str, renames: str) -> str:
    """Return the commands that write lines, and then give the originals other names.

    If one fails, the next does not begin. No file is replaced: ``ln`` fails where there is one.
    """
    part = _word(f"{new}.part")
    return f"{read} | {pipe} > {part} && ln {part} {_word(new)} && unlink {part} && {renames}"


def _opener(name: str) -> str:
    """Return the command that prints files, without a byte order mark."""
    return _OPENERS[input_kind(name).compression]


def _word(name: str) -> str:
    """Return a path in the input folder as a word of a command there, which is never a flag."""
    return shell_word(f"./{name}" if name.startswith("-") else name)


def _free(input_dir: Path, stem: str, taken: set[Path]) -> str:
    """Return the path of a new file of JSON lines in the input folder, and add it to ``taken``."""
    for number in itertools.count(1):
        path = input_dir / f"{stem}{number if number > 1 else ''}.jsonl"
        if path not in taken and not os.path.lexists(path):
            break
    taken.add(path)
    return str(path.relative_to(input_dir))


def _finds_all(input_dir: Path, some: Sequence[str]) -> str:
    """Return the ``find`` that finds files by their suffix, or "" if it finds others, too."""
    common = _common_folder(some)
    suffix = _suffix_of(some[0])
    is_flat = all(Path(name).parent == common for name in some)
    found: set[Path] = set()
    for place, folders, files in os.walk(input_dir / common):
        found.update(Path(place, name) for name in (*folders, *files) if name.endswith(suffix))
        if is_flat:
            break
    if found != {input_dir / name for name in some}:
        return ""
    depth = " -maxdepth 1" if is_flat else ""
    return f"find {_word(str(common))}{depth} -name '*{suffix}'"


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


def _is_over_lines(beginning: str) -> bool:
    """Return whether text begins with an object that ends in a later line, or where the text is cut."""
    try:
        _, end = json.JSONDecoder().raw_decode(beginning)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string") or error.pos >= len(beginning.rstrip())
    return "\n" in beginning[:end]


def _first_list(beginning: str) -> re.Match[str] | None:
    """Return the name and the beginning of the first list of objects in an object that may be cut."""
    for match in _LIST_IN_OBJECT.finditer(beginning, 0, _MOST_WHOLE_CHARS):
        before = _STRING.sub("", beginning[: match.start()])
        depth = sum(map(before.count, "{[")) - sum(map(before.count, "}]"))
        if depth == 1:
            return match
    return None


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
                    field = "" if place + name == "messages" else f" {FIELD_FLAG}{shlex.quote(place + name)}"
                    flags.append(f"--record chat{field}")
                num_listed[place + name] += sum(map(_num_chars_inside, value))

    for record in records:
        look(record)
    if not num_chars:
        return None
    if any(isinstance(record.get("html"), bytes) for record in records):
        advice = "plan with --transform FILE, whose function takes the text out of record['html']"
        return BadInput(path=path, found="web pages", expected="texts", advice=advice, remedy=FUNCTION)
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
        problem.remedy = FUNCTION
        return problem
    flags += [FIELD_FLAG + shlex.quote(name) for name, number in num_chars.most_common(1) if number]
    if not flags:
        problem.advise("no field has words")
    flags = list(dict.fromkeys(flags)) or [f"{FIELD_FLAG}NAME"]
    problem.advise(f"plan with {', or '.join(flags)}")
    problem.remedy = flags[0]
    return problem


def _num_chars(value: Any) -> int:
    """Return the length of a text. A name, an address or an id has no white space, and is none."""
    return len(value) if isinstance(value, str) and _WHITE_SPACE.search(value) else 0


def _num_chars_inside(value: Any) -> int:
    return sum(map(_num_chars, value.values())) if isinstance(value, dict) else 0


def flags_for_all(
    flags_of_files: Iterable[Sequence[str]], options: PlanOptions, *, keeps_field: bool
) -> str | None:
    """Return the flags that mend several files, each of which needs some, None if they exclude each other.

    ``keeps_field``: the text of other files is in the field of the options.
    """
    fields = [options.text_field] if keeps_field else []
    others: list[str] = []
    for flag, _ in Counter(itertools.chain.from_iterable(flags_of_files)).most_common():
        if flag.startswith(FIELD_FLAG):
            fields += shlex.split(flag.removeprefix(FIELD_FLAG))
        else:
            others.append(flag)
    if set(others) - {_AUTO} or (options.text_template and fields):
        return None
    if len(fields) > keeps_field:
        others.append(FIELD_FLAG + shlex.quote(",".join(dict.fromkeys(fields))))
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
