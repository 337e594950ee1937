"""Which input files a folder has, and what each is stamped and weighed with when planning.

They are sorted by path. A file is opened once: its size, its mtime, a hash of 3 x 64 KiB, and what its format
says of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from preprocess.documents import SUFFIXES, format_of
from preprocess.formats.format import Inspected, Reading
from preprocess.inputs import InputFile, OpenInput, sample_sha256
from shardprep.errors import NotFound, UsageError

_NUM_STAT_THREADS = 16  # opening a file is a round trip on a network file system
_MOST_FILES_AT_ONCE = 64  # per turn of a thread: a turn takes as long as a small file


def list_inputs(input_dir: Path, *, recursive: bool) -> list[Path]:
    """The input files of a folder, sorted by relative path. Raises NotFound or UsageError.

    A subfolder that cannot be listed is an error: Path.glob would leave out what it holds. So is, once it is
    opened, whatever else has the name of an input: a link to nothing, a FIFO, a device.
    """
    try:
        if not input_dir.is_dir():
            raise NotFound(f"--input_dir {input_dir} is no folder; expected one that holds input files")
        paths = sorted(_input_paths(input_dir, recursive), key=lambda path: path.parts)
    except OSError as error:
        where = error.filename or input_dir
        raise NotFound(f"--input_dir {where} cannot be listed: {error.strerror}") from None
    if not paths:
        hint = "" if recursive else "; for subfolders add --recursive"
        raise NotFound(f"--input_dir {input_dir} holds no .txt file, nor any other input ({SUFFIXES}){hint}")
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"the name of input {os.fsencode(path)!r} is not UTF-8; rename the file"
            ) from None
    return paths


def _input_paths(input_dir: Path, recursive: bool) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error

    for folder, _, names in os.walk(input_dir, onerror=refuse):
        yield from (Path(folder, name) for name in names if format_of(name) is not None)
        if not recursive:
            return


def stamp_inputs(
    input_dir: Path, paths: list[Path], reading: Reading, progress: Callable[[int], None] = lambda _: None
) -> tuple[list[InputFile], list[Inspected]]:
    """Size, mtime and sampled hash of each file, and what its format says of it.

    ``progress`` is told how many more there are. Raises NotFound for one that cannot be opened or is no
    regular file, ReadWriteError where reading fails, BadInput where a file cannot be of its format.
    """

    root = str(input_dir / "_")[:-1]

    def stamp(some: list[Path]) -> list[tuple[InputFile, Inspected]]:
        return [_stamped(path, str(path).removeprefix(root), reading) for path in some]

    inputs: list[InputFile] = []
    inspected: list[Inspected] = []
    num_files = min(_MOST_FILES_AT_ONCE, -(-len(paths) // (4 * _NUM_STAT_THREADS)))
    turns = [paths[first : first + num_files] for first in range(0, len(paths), max(1, num_files))]
    with ThreadPoolExecutor(_NUM_STAT_THREADS) as pool:
        for found in pool.map(stamp, turns):
            inputs += [stamped for stamped, _ in found]
            inspected += [weighed for _, weighed in found]
            progress(len(found))
    return inputs, inspected


def _stamped(path: Path, relative: str, reading: Reading) -> tuple[InputFile, Inspected]:
    file = OpenInput(path)
    form = format_of(path.name)
    assert form is not None, path  # it was listed by its name
    stamped = InputFile(
        path=relative,
        num_bytes=file.stamp.num_bytes,
        mtime_ns=file.stamp.mtime_ns,
        sha256=sample_sha256(file),
    )
    return stamped, form.inspect(file, reading)
