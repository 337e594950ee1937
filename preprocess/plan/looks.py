"""Look at the beginning of each input, and say what would go wrong: before any shard is made, by name.

A file of which no sampled record is usable ends planning, with the reason and the command that mends it. A
file with another encoding, or with other fields, than its neighbours is only named. The bytes are those that
are hashed for the plan anyway, so a look costs some 0.1 ms and no reading.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from preprocess.plan.other_files import ascii_if_odd, content_that_is_no_text
from preprocess.read import encodings
from preprocess.read.encodings import Sample
from preprocess.read.json_lines import record_of_line
from preprocess.read.text_fields import TextFields, UnusableText
from shardprep.console import counted, printable, quoted
from shardprep.errors import BadInput
from shardprep.format.choices import AUTO
from shardprep.format.inputs import InputKind
from shardprep.format.plan_options import PlanOptions

_MOST_LINES = 200  # of a sample, that are tried
_MOST_WHOLE_BYTES = 1 << 20  # of one object over several lines, to find the list in it
_NUM_FIELDS_SHOWN = 20
_UNDECODABLE = "no line that can be decoded"
UNCLEAR = "unclear"  # instead of an encoding
_NUM_FILES_SHOWN = 10
_NUM_EXAMPLES = 3
_FEW_SHARED = 0.5  # of the fields of two files, if they differ
_SEPARATORS = (b"<|endoftext|>", b"<|end_of_text|>", b"<|eot_id|>", b"<|im_end|>", b"</s>", b"<eos>")
_OF_FIELDS = frozenset({"no_field", "null_field", "wrong_type"})  # reasons of a wrong --text_field
_OPENERS = {".gz": "zcat", ".zst": "zstdcat", ".xz": "xzcat", ".bz2": "bzcat", "": "cat"}
_LIST_IN_OBJECT = re.compile(rb'"([^"\\]+)"\s*:\s*\[\s*\{')
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ENDS_SENTENCE = tuple(".!?…\"'”’)」』。！？:;")
_MIN_WRAPPED_LINES = 20
_MAX_WRAPPED_CHARS = 120


class Look(NamedTuple):
    """What the samples of a file show."""

    encoding: str = ""  # to freeze in the plan, "" if --encoding says it
    seen_encoding: str = ""  # of text in lines
    names: frozenset[str] = frozenset()  # of its fields
    field: str = ""  # that the text is taken from, if --text_field names several
    problem: BadInput | None = None  # nothing can be made of the file
    note: str = ""  # for people, told once for all files


def look_at(path: Path, name: str, kind: InputKind, samples: Sequence[Sample], fields: TextFields) -> Look:
    """Look at samples of a file's text. ``name``: its path in the input folder; ``fields``: of this file."""
    if not samples or not samples[0].data:
        return Look()
    no_text = content_that_is_no_text(path, samples[0].data)
    if no_text is not None:
        what, advice = no_text
        return Look(problem=BadInput(path=path, found=what, expected="text", advice=advice))
    wanted = encodings.wanted_encoding(fields.options, name)
    is_auto = wanted == AUTO
    seen = encodings.seen_encoding(samples)
    if is_auto and not seen:
        found = "text whose encoding is not clear from samples"
        advice = f"name it, such as --encoding '{_pattern(name)}=latin-1,auto', or convert the file"
        error = BadInput(path=path, found=found, expected="UTF-8 or CP949 throughout", advice=advice)
        return Look(seen_encoding=UNCLEAR, problem=error)
    codec = seen if is_auto else wanted
    if codec == encodings.UTF_8 and samples[0].data.startswith(encodings.MARK):
        codec = encodings.UTF_8_WITH_MARK
    if kind.format.has_fields and kind.format.unit == "row":
        look = Look()
    elif kind.format.has_fields:
        look = _look_at_json(path, kind, samples, codec, fields)
    else:
        problem = _problem_of_text(path, samples, codec)
        look = Look(problem=problem, note=_note_of_text(name, samples, fields.options))
    if codec == encodings.UTF_8 and seen != codec:
        is_unusable = look.problem is not None and look.problem.found == _UNDECODABLE
        # A file that is clearly CP949 may have lines in ASCII, but all others would be lost.
        if seen or is_unusable:
            look = look._replace(problem=_problem_of_encoding(path, seen))
    # What --encoding says for all files is not repeated for each.
    frozen = "" if codec == fields.options.encoding else codec
    is_utf_8 = codec in (encodings.UTF_8, encodings.UTF_8_WITH_MARK)
    return look._replace(encoding=frozen, seen_encoding=(seen or UNCLEAR) if is_utf_8 else codec)


def _look_at_json(
    path: Path, kind: InputKind, samples: Sequence[Sample], codec: str, fields: TextFields
) -> Look:
    records: list[Any] = []
    reasons: Counter[str] = Counter()
    names: set[str] = set()
    for line in _lines_of(samples):
        record: Any = None
        try:
            record, text = record_of_line(encodings.as_utf_8(line, codec), fields)
        except UnicodeDecodeError:
            text = UnusableText("undecodable", "")
        if isinstance(record, dict):
            names.update(record)
            records.append(record)
        if not isinstance(text, UnusableText):
            field = ".".join(fields.chosen(record).text_paths[0]) if fields.is_first_of else ""
            return Look(names=frozenset(names), field=field)
        reasons[text.reason] += 1
    if not reasons:
        return Look()
    if [*reasons] == ["undecodable"]:
        return Look(problem=_problem_of_codec(path, samples, codec))
    beginning = samples[0].data.removeprefix(encodings.MARK).lstrip()
    problem = None
    if "bad_json" in reasons and beginning[:1] in (b"[", b"{"):
        problem = _problem_of_json(path, kind, beginning)
    if fields.is_chat and not (_OF_FIELDS | {"preference_pair"}).isdisjoint(reasons):
        return Look(names=frozenset(names))  # planning's own sample says more about forms of conversations
    if problem is None and records and not _OF_FIELDS.isdisjoint(reasons):
        problem = problem_of_fields(path, records, fields.options)
    if problem is None:
        found = (
            f"{counted(reasons.total(), 'record')} of a sample, none usable ({', '.join(sorted(reasons))})"
        )
        problem = BadInput(path=path, found=found, expected="an object in each line")
    return Look(names=frozenset(names), problem=problem)


def _lines_of(samples: Sequence[Sample]) -> Iterator[bytes]:
    """Yield the first lines of each sample that are whole and not blank."""
    for sample in samples:
        is_list = sample.is_first and sample.data.removeprefix(encodings.MARK).lstrip()[:1] == b"["
        if not (sample.has_whole_line() or is_list):
            continue  # a part of a long line says nothing
        lines = sample.whole_lines().removeprefix(encodings.MARK).split(b"\n", _MOST_LINES)
        # The rest behind the last split is no line.
        for line in lines[:_MOST_LINES]:
            if line.strip():
                yield line


def _problem_of_json(path: Path, kind: InputKind, beginning: bytes) -> BadInput | None:
    """Return the error for one list, or for one object over several lines. None if it is neither."""
    what = "one list of JSON"
    filter_ = ".[]"
    if beginning.startswith(b"{"):
        if not _is_over_lines(beginning):
            return None
        key = _list_in(beginning[:_MOST_WHOLE_BYTES])
        what = "an object over several lines" + (f", with its records in the list {key}" if key else "")
        filter_ = f'.["{key}"][]' if key and not key.isidentifier() else f".{key}[]" if key else "."
    stem = str(path.absolute())
    for suffix in (kind.compression and path.suffix, *kind.format.suffixes):
        stem = stem[: -len(suffix)] if suffix and stem.lower().endswith(suffix.lower()) else stem
    new = quoted(f"{stem}.lines.jsonl")
    moved = f"mv {quoted(path)} {quoted(f'{path}.whole')}"
    remedy = f"{_OPENERS[kind.compression]} {quoted(path)} | jq -c '{filter_}' > {new} && {moved}"
    return BadInput(path=path, found=what, expected="an object in each line", remedy=remedy)


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
    num_chars: Counter[str] = Counter()  # characters in the strings of each field
    flags: list[str] = []  # that would take the text, the best one first

    def look(record: dict[str, Any], place: str = "") -> None:
        for name, value in record.items():
            num_chars[place + name] += len(value) if isinstance(value, str) else 0
            if isinstance(value, dict):
                look(value, f"{place}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
                field = "" if place + name == "messages" else f" --text_field {place}{name}"
                flags.append(f"--record chat{field}")

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
    flags += [f"--text_field {name}" for name, number in num_chars.most_common(1) if number]
    flags = list(dict.fromkeys(flags)) or ["--text_field NAME"]
    kind = "a list of messages" if options.is_chat else "a string"
    wanted = options.text_template or options.text_field
    found = f"a sample of records with the fields {fields}"
    advice = f"plan with {', or '.join(flags)}"
    return BadInput(path=path, found=found, expected=f"{wanted!r} as {kind}", advice=advice, remedy=flags[0])


def _problem_of_text(path: Path, samples: Sequence[Sample], codec: str) -> BadInput | None:
    """Return the error for plain text if no line of its samples has the encoding."""
    has_line = False
    for sample in samples:
        data = sample.whole_lines()
        try:
            data.decode(codec)
        except UnicodeDecodeError:
            pass
        else:
            return None  # nearly always the first sample is right as a whole
    for line in _lines_of(samples):
        has_line = True
        try:
            line.decode(codec)
        except UnicodeDecodeError:
            continue
        return None
    return _problem_of_codec(path, samples, codec) if has_line else None


def _problem_of_codec(path: Path, samples: Sequence[Sample], codec: str) -> BadInput:
    """Return the error of a file of which no line can be decoded with the encoding that was asked for."""
    expected = encodings.shown(codec)
    is_utf_8 = encodings.seen_encoding(samples) == encodings.UTF_8
    if is_utf_8 and codec not in (encodings.UTF_8, encodings.UTF_8_WITH_MARK):
        remedy = "--encoding utf-8"
        advice = f"plan with {remedy}, or with --encoding auto if other files differ"
        found = f"{_UNDECODABLE}: it is UTF-8"
        return BadInput(path=path, found=found, expected=expected, advice=advice, remedy=remedy)
    return BadInput(path=path, found=_UNDECODABLE, expected=expected)


def _problem_of_encoding(path: Path, seen: str) -> BadInput:
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


def _note_of_text(name: str, samples: Sequence[Sample], options: PlanOptions) -> str:
    """Return what a sample of plain text says against a document a line, or ""."""
    if options.doc != "line" or options.separator:
        return ""
    data = samples[0].data
    for separator in _SEPARATORS if b"<" in data else ():
        if data.count(separator) > 1:
            flag = f"--separator '{separator.decode()}'"
            return (
                f"{name} has {separator.decode()} between texts, and a document is a line: {flag} cuts there"
            )
    if _is_wrapped(data):
        return f"{name} has lines that go on in the next line: --doc paragraph cuts at blank lines instead"
    return ""


def _is_wrapped(data: bytes) -> bool:
    """Return whether text seems to be prose with ends of lines at a margin, and blank lines."""
    lines = data.decode(errors="ignore").replace("\r\n", "\n").split("\n")[:_MOST_LINES]
    going = [line for line, following in itertools.pairwise(lines) if line.strip() and following.strip()]
    if len(going) < _MIN_WRAPPED_LINES or "" not in map(str.strip, lines[1:-1]):
        return False
    sizes = sorted(map(len, going))
    # Most lines end shortly before the margin, and most in the middle of a sentence.
    margin = sizes[len(sizes) * 9 // 10]
    is_even = sizes[len(sizes) // 4] >= margin * 0.75 and margin <= _MAX_WRAPPED_CHARS
    num_ended = sum(line.rstrip().endswith(_ENDS_SENTENCE) for line in going)
    return is_even and num_ended < len(going) / 3


def _pattern(name: str) -> str:
    return name if name.isprintable() and "'" not in name else "PATTERN"


def refuse_unusable(problems: Sequence[tuple[str, BadInput]]) -> None:
    """Raise BadInput for files of which nothing can be made, each by its name. ``problems``: by name."""
    if not problems:
        return
    first = problems[0][1]
    others = [f"{ascii_if_odd(name)} ({each.found or each})" for name, each in problems[1:_NUM_FILES_SHOWN]]
    if others:
        num_more = len(problems) - _NUM_FILES_SHOWN
        more = f" and {num_more} more" if num_more > 0 else ""
        num = counted(len(problems) - 1, "other file")
        first.advise(f"nothing can be made of {num} either: {', '.join(others)}{more}")
    raise first


def lines_about(looks: Sequence[tuple[str, InputKind, Look]], options: PlanOptions) -> Iterator[str]:
    """Yield what is to be told about all files: encodings, fields, and files unlike their neighbours."""
    by_encoding: dict[str, list[str]] = {}
    by_field: dict[str, list[str]] = {}
    by_names: dict[str, Counter[frozenset[str]]] = {}
    for name, kind, look in looks:
        if look.seen_encoding:
            by_encoding.setdefault(encodings.shown(look.seen_encoding), []).append(name)
        if look.field:
            by_field.setdefault(look.field, []).append(name)
        if look.names:
            by_names.setdefault(kind.format.suffixes[0], Counter())[look.names] += 1
    for what, names_by in (("encodings", by_encoding), ("fields of the text", by_field)):
        if len(names_by) > 1:
            yield f"{what}: {'; '.join(_with_example(key, some) for key, some in names_by.items())}"
    unclear = [*by_encoding.get(UNCLEAR, ())]
    if options.encoding in (encodings.UTF_8, encodings.UTF_8_WITH_MARK):
        unclear += by_encoding.get(encodings.shown(encodings.CP949), ())
    if unclear:
        some = _with_example("bytes that are not UTF-8", unclear)
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
    shown = (
        ", ".join(map(ascii_if_odd, names[:_NUM_FILES_SHOWN])) if len(names) <= 3 else ascii_if_odd(names[0])
    )
    return f"{what} in {counted(len(names), 'file')}, {'such as ' if len(names) > 3 else ''}{shown}"


def _shown_names(names: frozenset[str]) -> str:
    return ", ".join(printable(each) for each in sorted(names)[:_NUM_FIELDS_SHOWN])
