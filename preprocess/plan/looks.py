"""Look at the beginning of an input: its encoding, its fields, and whether anything can be made of it.

The bytes are those that are hashed for the plan anyway, so a look takes some 20 us and no reading. What is
said about all files together is in ``looks_together.py``.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from preprocess.plan.mending import (
    FIELD_FLAG,
    FUNCTION,
    flags_of,
    pipe_to_lines,
    problem_of_encoding,
    problem_of_fields,
    problem_of_json,
    records_inside,
)
from preprocess.plan.other_files import content_that_is_no_text
from preprocess.read import encodings
from preprocess.read.encodings import Sample
from preprocess.read.json_lines import record_of_line
from preprocess.read.text_fields import TextFields, UnusableText
from shardprep.console import counted
from shardprep.errors import BadInput
from shardprep.format.choices import AUTO
from shardprep.format.inputs import InputKind
from shardprep.format.plan_options import PlanOptions

_MOST_LINES = 200  # of a sample, that are tried
_UNDECODABLE = "no line that can be decoded"
UNCLEAR = "unclear"  # instead of an encoding
_SEPARATORS = (b"<|endoftext|>", b"<|end_of_text|>", b"<|eot_id|>", b"<|im_end|>", b"</s>", b"<eos>")
_OF_FIELDS = frozenset({"no_field", "null_field", "wrong_type"})  # reasons of a wrong --text_field
_ENDS_SENTENCE = tuple(".!?…\"'”’)」』。！？:;")
_MIN_WRAPPED_LINES = 20
_MAX_WRAPPED_CHARS = 120


class Look(NamedTuple):
    """What the samples of a file show."""

    encoding: str = ""  # to freeze in the plan, "" if --encoding says it
    seen_encoding: str = ""  # of text in lines
    names: frozenset[str] = frozenset()  # of its fields
    problem: BadInput | None = None  # nothing can be made of the file
    pipe: str = ""  # commands that make JSON lines of the file's text
    flags: tuple[str, ...] | None = None  # of plan, that mend the file or its lines; None if unknown
    note: str = ""  # for people, told once for all files

    def keeps_field(self) -> bool:
        """Return whether the text is in the field of the options, once the problem is mended."""
        if self.problem is None:
            return True
        return self.flags is not None and not any(flag.startswith(FIELD_FLAG) for flag in self.flags)


def look_at(
    path: Path, name: str, kind: InputKind, samples: Sequence[Sample], fields: TextFields, *, notes: bool
) -> Look:
    """Look at samples of a file's text.

    Args:
        name: its path in the input folder.
        fields: of this file.
        notes: whether to look for notes about plain text, which takes the most time.
    """
    if not samples or not samples[0].data:
        return Look()
    no_text = content_that_is_no_text(path, samples[0].data)
    if no_text is not None:
        what, advice = no_text
        return Look(problem=BadInput(path=path, found=what, expected="text", advice=advice))
    wanted = encodings.wanted_encoding(fields.options, name)
    seen = encodings.seen_encoding(samples)
    if wanted == AUTO and not seen:
        found = "text whose encoding is not clear from samples"
        advice = f"name it, such as --encoding '{_pattern(name)}=latin-1,auto', or convert the file"
        error = BadInput(path=path, found=found, expected="UTF-8 or CP949 throughout", advice=advice)
        return Look(seen_encoding=UNCLEAR, problem=error)
    codec = seen if wanted == AUTO else wanted
    if codec == encodings.UTF_8 and samples[0].data.startswith(encodings.MARK):
        codec = encodings.UTF_8_WITH_MARK
    is_utf_8 = codec in (encodings.UTF_8, encodings.UTF_8_WITH_MARK)
    look = Look()
    if not kind.format.has_fields:
        # Of text that is seen as UTF-8 each whole line is, so no line has to be tried.
        problem = None if is_utf_8 and seen == encodings.UTF_8 else _problem_of_text(path, samples, codec)
        look = Look(problem=problem, note=_note_of_text(name, samples, fields.options) if notes else "")
    elif kind.format.is_json:
        look = _look_at_json(path, samples, seen if codec == encodings.UTF_8 and seen else codec, fields)
    if codec == encodings.UTF_8 and seen != codec:
        is_unusable = look.problem is not None and look.problem.found == _UNDECODABLE
        # A file that is clearly CP949 may have lines in ASCII, but all others would be lost.
        # A command that makes JSON lines changes the encoding, too.
        if (seen or is_unusable) and not look.pipe:
            look = _with_problem_of_encoding(look, problem_of_encoding(path, seen))
    # What --encoding says for all files is not repeated for each.
    frozen = "" if codec == fields.options.encoding else codec
    return look._replace(encoding=frozen, seen_encoding=(seen or UNCLEAR) if is_utf_8 else codec)


def _with_problem_of_encoding(look: Look, problem: BadInput) -> Look:
    """Return a look at a file that needs a flag for its encoding, beside those that it needs anyway."""
    flags = flags_of(problem)
    if look.problem is not None and look.problem.found != _UNDECODABLE:
        flags = None if flags is None or look.flags is None else (*look.flags, *flags)
    return look._replace(problem=problem, flags=flags)


def _look_at_json(path: Path, samples: Sequence[Sample], codec: str, fields: TextFields) -> Look:
    records: list[Any] = []
    reasons: Counter[str] = Counter()
    all_names: set[str] = set()
    for line in _lines_of(samples):
        record: Any = None
        try:
            utf_8 = encodings.as_utf_8(line, codec)
            # Mostly the first line is usable. What else a worker checks, such as whether a key occurs twice,
            # takes longer than all other looks at a file.
            usable = _usable_record(utf_8, fields)
            if usable is not None:
                return Look(names=frozenset((*all_names, *usable)))
            record, text = record_of_line(utf_8, fields)
        except UnicodeDecodeError:
            text = UnusableText("undecodable", "")
        if isinstance(record, dict):
            all_names.update(record)
            records.append(record)
        if not isinstance(text, UnusableText):
            return Look(names=frozenset(all_names))
        reasons[text.reason] += 1
    if not reasons:
        return Look()
    if [*reasons] == ["undecodable"]:
        return Look(problem=_problem_of_codec(path, samples, codec))
    names = frozenset(all_names)
    beginning = samples[0].data.removeprefix(encodings.MARK).decode(codec, errors="replace").lstrip()
    if "bad_json" in reasons and beginning[:1] in ("[", "{"):
        pipe = pipe_to_lines(beginning, codec)
        if pipe:
            return _look_at_whole_json(path, beginning, pipe, fields)._replace(names=names)
    if fields.is_chat and not (_OF_FIELDS | {"preference_pair"}).isdisjoint(reasons):
        return Look(names=names)  # planning's own sample says more about forms of conversations
    unfit = None
    if records and not _OF_FIELDS.isdisjoint(reasons):
        unfit = problem_of_fields(path, records, fields.options)
    if unfit is None:
        shown = ", ".join(sorted(reasons))
        found = f"{counted(reasons.total(), 'record')} of a sample, none usable ({shown})"
        unfit = BadInput(path=path, found=found, expected="an object in each line")
    return Look(names=names, problem=unfit, flags=flags_of(unfit))


def _usable_record(line: bytes, fields: TextFields) -> dict[str, Any] | None:
    """Return the object of a line if it seems to have a usable text."""
    try:
        record: dict[str, Any] = orjson.loads(line)
    except ValueError:
        return None
    return None if isinstance(fields.text(record), UnusableText) else record


def _look_at_whole_json(path: Path, beginning: str, pipe: str, fields: TextFields) -> Look:
    """Return what mends one list, or an object over several lines: a command, and flags for its lines."""
    problem = problem_of_json(path, beginning)
    records = records_inside(beginning)
    flags: tuple[str, ...] | None = ()
    if all(isinstance(fields.text(record), UnusableText) for record in records):
        of_lines = problem_of_fields(path, records, fields.options)
        if of_lines is not None:
            flags = flags_of(of_lines)
            if of_lines.remedy == FUNCTION:
                problem.advise(f"then {of_lines.advice}")
    return Look(problem=problem, pipe=pipe, flags=flags)


def _lines_of(samples: Sequence[Sample]) -> Iterator[bytes]:
    """Yield the first lines of each sample that are whole and not blank."""
    for sample in samples:
        is_list = sample.is_first and sample.data.removeprefix(encodings.MARK).lstrip()[:1] == b"["
        if not (sample.has_whole_line() or is_list):
            continue  # a part of a long line says nothing
        # One by one, because mostly the first line says all.
        lines = io.BytesIO(sample.whole_lines().removeprefix(encodings.MARK))
        yield from filter(bytes.strip, itertools.islice(lines, _MOST_LINES))


def _problem_of_text(path: Path, samples: Sequence[Sample], codec: str) -> BadInput | None:
    """Return the error for plain text if no line of its samples has the encoding."""
    has_line = False
    for line in _lines_of(samples):
        has_line = True
        with contextlib.suppress(UnicodeDecodeError):
            line.decode(codec)
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


def _note_of_text(name: str, samples: Sequence[Sample], options: PlanOptions) -> str:
    """Return what a sample of plain text says against a document a line, or ""."""
    if options.doc != "line" or options.separator:
        return ""
    data = samples[0].data
    for separator in _SEPARATORS:
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
    has_blank_line = "" in map(str.strip, lines[1:-1])
    # Lines that go on: the next one is not blank.
    going = [line for line, following in itertools.pairwise(lines) if line.strip() and following.strip()]
    if len(going) < _MIN_WRAPPED_LINES or not has_blank_line:
        return False
    # Most lines end shortly before the margin, and most in the middle of a sentence.
    sizes = sorted(map(len, going))
    margin = sizes[len(sizes) * 9 // 10]
    short = sizes[len(sizes) // 4]
    if margin > _MAX_WRAPPED_CHARS or short < margin * 0.75:
        return False
    num_ended = sum(line.rstrip().endswith(_ENDS_SENTENCE) for line in going)
    return num_ended < len(going) / 3


def _pattern(name: str) -> str:
    return name if name.isprintable() and "'" not in name else "PATTERN"
