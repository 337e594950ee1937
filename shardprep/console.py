"""Printing: lines, progress bars and numbers for people.

``say`` prints a line to standard error, ``print_lines`` and ``print_exactly`` to standard output; nothing
else in our packages prints. They escape control characters, so text from a file cannot move the cursor or
begin a line of a log.
After ``guard_streams`` the streams also escape what libraries and tracebacks write, and survive a reader that
goes away: the output is dropped and the work continues.

These lines are results, wanted at every level and without a prefix, so they do not use ``logging``.
"""

from __future__ import annotations

import io
import os
import re
import select
import shutil
import sys
import time
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

from shardprep.errors import CONTROL_IN_TEXT, ReadWriteError, escape
from shardprep.errors import printable as printable
from shardprep.errors import quoted as quoted

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from tqdm import tqdm

T = TypeVar("T")
LOG_EVERY_S = 30.0
_MAX_COLUMNS = 79
_WORDS = re.compile(r" +|(?:'[^']*'|[^ ])+")  # blanks, or a word with its quotes


class _Terminal:
    """Standard error for progress bars, without the escapes of ``guard_streams``."""

    def write(self, codes: str) -> None:
        if isinstance(sys.stderr, io.TextIOWrapper):
            io.TextIOWrapper.write(sys.stderr, codes)

    def flush(self) -> None:
        sys.stderr.flush()


_TERMINAL: Any = _Terminal()
_bars: list[tqdm[NoReturn]] = []  # on the terminal; ``say`` prints above it


# A narrow terminal shows how much is done and how long it takes, since tqdm would cut these.
_WIDE = 70  # columns
_AMOUNTS = "{n_fmt}{unit} of {total_fmt}{unit}, {rate_fmt}, {remaining} left"
_WIDE_BAR = "{desc}: {percentage:3.0f}% |{bar}| " + _AMOUNTS
_NARROW_BAR = "{desc}: {percentage:3.0f}%, {remaining} left"
_NARROW_COLUMNS = 22  # of the narrow bar behind the label: ": 100%, 100:00:00 left"


class Progress:
    """Progress towards a known total, in bytes or in ``unit`` (a noun in the plural).

    With ``num_shards``, the label ends with the number of whole shards: 2 of 6 shards.
    """

    def __init__(
        self, label: str, total: int, *, unit: str = "bytes", is_shown: bool = True, num_shards: int = 0
    ) -> None:
        self._name = label
        self._num_shards = num_shards
        self._num_whole = 0
        self._columns = 0
        self._total = total
        self._unit = unit
        self._done = 0
        self._counts: dict[str, int] = {}
        self._began = self._last_line = time.monotonic()
        self._bar: tqdm[NoReturn] | None = None
        # A terminal shows a bar until the total is reached. Elsewhere a line is printed every 30 s.
        self._is_shown = is_shown
        if is_shown and sys.stderr.isatty():
            from tqdm import tqdm  # 0.03 s, which only a bar needs

            columns = min(_MAX_COLUMNS, shutil.get_terminal_size().columns - 1)
            self._columns = columns
            suffix = "B" if unit == "bytes" else f" {unit}"
            style: Any = {"unit": suffix, "unit_scale": True, "ncols": columns, "leave": False}
            style["bar_format"] = _WIDE_BAR if columns >= _WIDE else _NARROW_BAR
            self._bar = tqdm(total=total, file=_TERMINAL, desc=self._shown_label(), **style)
            _bars.append(self._bar)

    def add_shards(self, number: int) -> None:
        """Count shards that are whole now."""
        self._num_whole += number
        if self._bar is not None:
            self._bar.set_description_str(self._shown_label(), refresh=False)

    @property
    def _label(self) -> str:
        if not self._num_shards:
            return self._name
        if self._num_whole > self._num_shards:  # shards of others, too
            return f"{self._name}{counted(self._num_whole, 'shard')}"
        return f"{self._name}{self._num_whole:,} of {counted(self._num_shards, 'shard')}"

    def _shown_label(self) -> str:
        """Return the label of the bar: in a narrow one the time that is left stays whole."""
        room = self._columns - _NARROW_COLUMNS
        if self._columns >= _WIDE or len(self._label) <= room:
            return self._label
        return f"{self._label[: max(0, room - 1)]}…"

    def add(self, num_done: int, counts: Mapping[str, int] | None = None) -> None:
        """Add to the number done, which may be negative. ``counts``: other counts whose rates are shown."""
        self._done += num_done
        for name, number in (counts or {}).items():
            self._counts[name] = self._counts.get(name, 0) + number
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(num_done)
            if self._done >= self._total and self._bar in _bars:
                _bars.remove(self._bar)
                self._bar.close()
        elif self._is_shown and now - self._last_line >= LOG_EVERY_S:
            self._last_line = now
            elapsed_s = now - self._began
            unit = self._unit
            rate = self._done / elapsed_s
            total = counted(self._total, unit.removesuffix("s"))
            rates = f"{rate:.1f} {unit}/s"
            if unit == "bytes":
                total = short_bytes(self._total)
                rates = f"{short_bytes(rate)}/s"
            for name, number in self._counts.items():
                rates += f", {short_number(number / elapsed_s)} {name}/s"
            left = f", {short_time((self._total - self._done) / rate)} left" if rate > 0 else ""
            say(f"{self._label}: {self._done / max(1, self._total):.0%} of {total}, {rates}{left}")

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began


def with_progress(label: str, items: Collection[T], *, unit: str = "shards") -> Iterator[T]:
    """Yield items and show progress. An item is done when the next one is requested."""
    progress = Progress(label, len(items), unit=unit)
    for item in items:
        yield item
        progress.add(1)


def short_number(value: float) -> str:
    """Return ``12.3 M`` for 12345678, three digits and a decimal prefix, and ``512`` for 512."""
    return " ".join(filter(None, _scaled(value)))


def short_bytes(value: float) -> str:
    """Return ``12.3 MB`` for 12345678, ``512 B`` for 512."""
    return "{} {}B".format(*_scaled(value))


def short_time(seconds: float) -> str:
    """Return ``12.3 s``, ``5 min 03 s``, ``15 min``, ``2 h 05 min`` or ``1,234 h``."""
    if seconds < 59.5:
        return f"{seconds:.3g} s"
    if seconds < 599.5:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if not hours:
        return f"{minutes} min"
    return f"{hours} h {minutes:02d} min" if hours < 100 else f"{hours:,} h"


def counted(number: int, noun: str) -> str:
    """Return ``1 shard``, ``2,500 shards``, ``3 batches``."""
    if number != 1:
        noun += "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}"


_MAX_IDS_CHARS = 200  # in a line; of thousands of scattered shards, the rest is a number


def shards_text(ids: str) -> str:
    """Return ``shard 0`` for 0, ``shards 3-7`` for 3-7: "3 shards" would be a count.

    Of many ranges only the first are named, and then how many more shards there are.
    """
    if ids.isdecimal():
        return f"shard {ids}"
    if len(ids) <= _MAX_IDS_CHARS:
        return f"shards {ids}"
    end = ids.rindex(",", 0, _MAX_IDS_CHARS)
    num_more = 0
    for each in ids[end + 1 :].split(","):
        first, _, last = each.partition("-")
        num_more += int(last or first) - int(first) + 1
    return f"shards {ids[:end]} and {num_more:,} more"


def shards_to_type(ids: str) -> str:
    """Return ids for a command that leaves out what is done or runs: many ranges as one around them."""
    if len(ids) <= _MAX_IDS_CHARS:
        return ids
    first = ids.partition(",")[0].partition("-")[0]
    last = ids.rpartition(",")[2].rpartition("-")[2]
    return f"{first}-{last}"


_MAX_NAMED = 12  # sources, one per line


def source_lines(sources: Mapping[str, Mapping[str, int]], *, all_in: str) -> list[str]:
    """Return a line per source, most tokens first, if there are several. ``all_in``: what has them all."""
    if len(sources) < 2:
        return []
    largest = sorted(sources.items(), key=lambda item: (-item[1]["num_tokens"], item[0]))
    lines = []
    for name, counts in largest[:_MAX_NAMED]:
        learnt = f" ({counts['num_learnt_tokens']:,} learnt)" if "num_learnt_tokens" in counts else ""
        lines.append(
            f"  {name}: {counts['num_documents']:,} documents, {counts['num_tokens']:,} tokens{learnt}, "
            f"{short_bytes(counts['num_bytes'])}, {counts['num_quarantined']:,} left out"
        )
    more = len(largest) - _MAX_NAMED
    if more > 0:
        lines.append(f"  and {more} more sources: {all_in} has them all")
    return lines


def _scaled(value: float) -> tuple[str, str]:
    """Return a number with three digits, and its decimal prefix."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            scaled = value / size
            num_decimals = 0
            if scaled < 9.995:
                num_decimals = 2
            elif scaled < 99.95:
                num_decimals = 1
            return f"{scaled:.{num_decimals}f}", prefix
    if value == int(value):
        return f"{value:.0f}", ""
    return f"{value:.3g}", ""


def say(line: str) -> None:
    """Print a line to standard error, where logs and progress go. A terminal breaks it between words."""
    text = printable(line)
    if sys.stderr.isatty():
        text = _with_whole_words(text, shutil.get_terminal_size().columns)
    if _bars:
        _bars[-1].write(text, file=_TERMINAL)
        return
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _with_whole_words(text: str, columns: int) -> str:
    """Return a line that a terminal of this width breaks between words only, by more blanks between them.

    A line end would do this, too, but a command that is copied from the terminal would be cut there. Text in
    quotes is a word.
    """
    if len(text) * 2 <= columns:
        return text
    shown = ""
    place = 0  # column of the next character
    parts = _WORDS.findall(text)
    for number, part in enumerate(parts):
        length = _columns_of(part)
        # A blank after the word has to fit, too, or it would begin the next line.
        needed = length + (number + 1 < len(parts))
        if part[0] != " " and place and length <= columns < place + needed:
            shown += " " * (columns - place)
            place = 0
        shown += part
        place = (place + length) % columns
    return shown


def _columns_of(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)


def in_columns(text: str, columns: int) -> str:
    """Return a cell of a table that takes exactly this many columns: padded, or cut with a sign."""
    if _columns_of(text) > columns:
        while _columns_of(text) > columns - 1:
            text = text[:-1]
        text += "…"
    return text + " " * (columns - _columns_of(text))


def print_lines(*lines: str) -> None:
    """Print lines to standard output, where results go. A terminal breaks them between words."""
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        print_exactly(*(_with_whole_words(printable(line), columns) for line in lines))
    else:
        print_exactly(*lines)


def print_exactly(*lines: str) -> None:
    """Print lines for programs, such as JSON or a script, to standard output."""
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
    sys.stdout.flush()


def draw(codes: str) -> None:
    """Write the codes that draw a screen on a terminal. The caller has made its lines ``printable``."""
    io.TextIOWrapper.write(sys.stdout, codes)  # type: ignore[arg-type]  # bypasses the escapes of _Guarded
    sys.stdout.flush()


def guard_streams() -> None:
    """Make standard output and standard error escape control characters and survive a closed reader.

    Every failure of standard error is ignored, even a full disk: a lost log must not end the work. On
    standard output only a closed pipe is ignored. Any other failure raises ReadWriteError, once, because
    results must not be lost silently. A stream that somebody replaced is left alone.
    """
    if sys.stdout is sys.__stdout__:
        sys.stdout = _guarded(sys.stdout, BrokenPipeError)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _guarded(sys.stderr, OSError)


def output_is_read() -> bool:
    """Return whether standard output still has a reader."""
    poll = select.poll()
    poll.register(1, 0)  # errors are always reported
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


class _TolerantFile(io.FileIO):
    def __init__(self, descriptor: int, ignored: type[OSError]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._ignored = ignored

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except self._ignored:
            return memoryview(data).nbytes
        except OSError as error:
            self._ignored = OSError  # the rest of the buffer is written again at exit
            raise ReadWriteError(f"standard output cannot be written: {error.strerror}") from None


class _Guarded(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        super().write(CONTROL_IN_TEXT.sub(escape, text))
        return len(text)


def _guarded(stream: TextIO | None, ignored: type[OSError]) -> TextIO:
    """Return a guarded stream over the same descriptor, or the null device for a closed stream."""
    if stream is None:
        return open(os.devnull, "w")  # noqa: PTH123 - a TextIO, which lives as long as the process
    raw = _TolerantFile(stream.fileno(), ignored)
    is_unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
    return _Guarded(
        raw if is_unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",  # for characters that the encoding lacks
        line_buffering=bool(stream.line_buffering),
        write_through=is_unbuffered,
    )
