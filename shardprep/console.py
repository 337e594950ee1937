"""What a command prints: lines, progress, numbers for people; and readers that go away.

``say`` prints a line to standard error, ``print_lines`` to standard output, and nothing else in our packages
prints. Both print control characters of what others wrote as escapes, so nothing foreign moves the cursor or
begins a line of a log. After ``guard_streams`` the streams do the same to what libraries and tracebacks
write, and outlast their reader: what nobody can read any more is dropped, and the work goes on.

These lines are a command's answers, wanted at every level and without a prefix, so they are no ``logging``.
"""

from __future__ import annotations

import io
import os
import re
import select
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

from shardprep.errors import ReadWriteError
from shardprep.errors import quoted as quoted

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from tqdm import tqdm

T = TypeVar("T")

LOG_EVERY_S = 30.0
_MOST_COLUMNS = 79


class _Terminal:
    """Standard error for a bar, whose codes move the cursor. ``guard_streams`` would escape them."""

    def write(self, codes: str) -> None:
        if isinstance(sys.stderr, io.TextIOWrapper):
            io.TextIOWrapper.write(sys.stderr, codes)

    def flush(self) -> None:
        sys.stderr.flush()


_TERMINAL: Any = _Terminal()
_bars: list[tqdm[NoReturn]] = []  # on the terminal now; ``say`` prints above it


class Progress:
    """Counts up to a known total: input bytes, or what ``unit`` names (in the plural)."""

    def __init__(self, label: str, total: int, *, unit: str = "bytes") -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = 0
        self._counts: dict[str, int] = {}
        self._began = self._spoke = time.monotonic()
        self._bar: tqdm[NoReturn] | None = None
        # On a terminal a bar that goes when the total is reached, else a line every half minute.
        if sys.stderr.isatty():
            from tqdm import tqdm  # 0.03 s that a log's reader need not wait for

            columns = min(_MOST_COLUMNS, shutil.get_terminal_size().columns - 1)
            sign = "B" if unit == "bytes" else f" {unit}"
            looks: Any = {"desc": label, "unit": sign, "unit_scale": True, "ncols": columns, "leave": False}
            self._bar = tqdm(total=total, file=_TERMINAL, **looks)
            _bars.append(self._bar)

    def add(self, num_done: int, counts: Mapping[str, int] | None = None) -> None:
        """Count more as done, or less. ``counts``: other things done with it, whose speeds are told, too."""
        self._done += num_done
        for name, number in (counts or {}).items():
            self._counts[name] = self._counts.get(name, 0) + number
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(num_done)
            if self._done >= self._total and self._bar in _bars:
                _bars.remove(self._bar)
                self._bar.close()
        elif now - self._spoke >= LOG_EVERY_S:
            self._spoke = now
            # How far it is, how fast, also in what else is counted, and how long it will still take.
            elapsed_s, unit = now - self._began, self._unit
            rate = self._done / elapsed_s
            of, speed = counted(self._total, unit.removesuffix("s")), f"{rate:.1f} {unit}/s"
            if unit == "bytes":
                of, speed = short_bytes(self._total), f"{short_bytes(rate)}/s"
            for name, number in self._counts.items():
                speed += f", {short_number(number / elapsed_s)} {name}/s"
            left = f", {short_time((self._total - self._done) / rate)} left" if rate > 0 else ""
            say(f"{self._label}: {self._done / max(1, self._total):.0%} of {of}, {speed}{left}")

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began


def with_progress(label: str, items: Collection[T], *, unit: str = "shards") -> Iterator[T]:
    """Yield items, and show how many are done: each is, once the next one is asked for."""
    progress = Progress(label, len(items), unit=unit)
    for item in items:
        yield item
        progress.add(1)


def short_number(value: float) -> str:
    """Return ``12.3 M`` for 12345678: three digits and a decimal prefix. 512 stays as it is."""
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
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith(('s', 'ch')) else 's'}"


def shards_text(ids: str) -> str:
    """Return ``shard 0`` for 0, ``shards 3-7`` for 3-7, so that nobody takes the number for a count."""
    return f"shard{'' if ids.isdecimal() else 's'} {ids}"


_MOST_NAMED = 12  # sources that have a line of their own


def source_lines(sources: Mapping[str, Mapping[str, int]], *, all_in: str) -> list[str]:
    """Return a line per source, most tokens first, if there are several; ``all_in`` has the others."""
    if len(sources) < 2:
        return []
    largest = sorted(sources.items(), key=lambda item: (-item[1]["num_tokens"], item[0]))
    lines = [
        f"  {name}: {of['num_documents']:,} documents, {of['num_tokens']:,} tokens, "
        f"{short_bytes(of['num_bytes'])}, {of['num_quarantined']:,} left out"
        for name, of in largest[:_MOST_NAMED]
    ]
    if (more := len(largest) - _MOST_NAMED) > 0:
        lines.append(f"  and {more} more sources: {all_in} has them all")
    return lines


def _scaled(value: float) -> tuple[str, str]:
    """Return three digits of a number, and its decimal prefix."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}", prefix
    return f"{value:.0f}" if value == int(value) else f"{value:.3g}", ""


# C0 without the line end, DEL and C1; what turns the direction of text; separators of lines and paragraphs;
# halves of surrogate pairs, which a file's name may hold. Joiners and other marks without a width stay:
# scripts and emoji need them, and no terminal acts on them.
_CONTROLS = "\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_A_TEXT, _IN_A_LINE = re.compile(f"[{_CONTROLS}]"), re.compile(f"[\n{_CONTROLS}]")


def printable(line: str) -> str:
    r"""Return the line with each control character as an escape of Python: ``\x1b``, ``\n``, ``\u202e``."""
    return _IN_A_LINE.sub(_escape, line)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def say(line: str) -> None:
    """Print a line to standard error, where logs and progress go."""
    if _bars:
        _bars[-1].write(printable(line), file=_TERMINAL)
        return
    sys.stderr.write(printable(line) + "\n")
    sys.stderr.flush()


def print_lines(*lines: str) -> None:
    """Print lines to standard output, where the answer of a command goes."""
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
    sys.stdout.flush()


def draw(codes: str) -> None:
    """Send a terminal the codes that draw a screen. Its lines are ``printable`` already."""
    io.TextIOWrapper.write(sys.stdout, codes)  # type: ignore[arg-type]  # past what _Guarded escapes
    sys.stdout.flush()


def guard_streams() -> None:
    """Make this process's streams drop what cannot be read, and print control characters as escapes.

    Of standard error every failure is dropped, a full disk, too: a log is not worth the work. Of standard
    output only a closed pipe is: what was asked for must not be missing unseen, so another failure raises
    ReadWriteError, once. A stream that was put in their place is left alone.
    """
    if sys.stdout is sys.__stdout__:
        sys.stdout = _guarded(sys.stdout, BrokenPipeError)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _guarded(sys.stderr, OSError)


def output_is_read() -> bool:
    """Return whether standard output has a reader. For a command that would go on printing."""
    poll = select.poll()
    poll.register(1, 0)  # errors are told unasked
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


class _Outlasting(io.FileIO):
    def __init__(self, descriptor: int, dropped: type[OSError]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._dropped = dropped

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except self._dropped:
            return memoryview(data).nbytes
        except OSError as error:
            self._dropped = OSError  # once is enough: what is left in a buffer is written again at the end
            raise ReadWriteError(f"standard output cannot be written: {error.strerror}") from None


class _Guarded(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        super().write(_IN_A_TEXT.sub(_escape, text))
        return len(text)


def _guarded(stream: TextIO | None, dropped: type[OSError]) -> TextIO:
    """Return a stream anew over its descriptor, the null device for one that was closed before the start."""
    if stream is None:
        return open(os.devnull, "w")  # noqa: PTH123 - a TextIO, which lives as long as the process
    raw = _Outlasting(stream.fileno(), dropped)
    is_unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
    return _Guarded(
        raw if is_unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",  # of an encoding that does not have a letter
        line_buffering=bool(stream.line_buffering),
        write_through=is_unbuffered,
    )
