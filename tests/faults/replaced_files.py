"""Something else stands under the name of a file: a FIFO, a device, a folder, a link to nowhere, the file of
another shard or data set, or a part of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.faults.disturbed_files import FILES, DisturbedFile, Fault, disturb, spread
from tests.faults.outcomes import Outcome
from tests.faults.small_data_sets import SmallDataSet

FORMS = ("npy", "best_fit")
QUICK_FORMS = ("best_fit",)
_BLOCK_BYTES = 512  # of a tar
_QUICK_FAULTS = 8  # so few, and the kinds take turns

INPUTS = (
    DisturbedFile(name="../raw/a.txt", stage="raw", commands=("plan",)),
    DisturbedFile(name="../raw/a.txt", stage="planned", commands=("shard", "run")),
    DisturbedFile(name="../raw/b.txt", stage="planned", commands=("shard", "run")),
    DisturbedFile(
        name="shard-00000.tar",
        stage="verified",
        commands=("load", "status", "verify --fast"),
        sizes_alone=True,
    ),
    DisturbedFile(name="shard-00000.idx", stage="verified", commands=("status", "verify --fast")),
    DisturbedFile(name="jobs", stage="made", commands=("status",)),
    DisturbedFile(name="quarantine", stage="made", commands=("verify",)),
    DisturbedFile(name="tokenizer", stage="planned", commands=("shard",)),
)


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Each file of a data set and each input, of each kind, by each command that reads it."""
    for data_set in data_sets:
        for number, file in enumerate((*FILES, *INPUTS)):
            others = [each for each in data_sets if each is not data_set]
            faults = partial(_faults, file, number, num_faults, others)
            yield from disturb("replaced_files", data_set, file, faults)


def _faults(
    file: DisturbedFile, number: int, num_faults: int, others: list[SmallDataSet], data: bytes
) -> Iterator[Fault]:
    kinds = list(KINDS.items())
    if file.stage == "raw":  # what is neither a file nor a link is left out by name: test_input_ledger.py
        kinds = [each for each in kinds if "link" in each[0]]
    elif data:
        kinds += [("empty", partial(_cut, 0)), ("a half", partial(_cut, len(data) // 2))]
        kinds += _other_files(file, others)
        if file.name.endswith(".tar"):
            cuts = spread(len(data) // _BLOCK_BYTES, num_faults)
            kinds += [(f"cut to {cut} blocks", partial(_cut, cut * _BLOCK_BYTES)) for cut in cuts]
    if num_faults <= _QUICK_FAULTS and file.stage != "raw":
        kinds = [kinds[(number + step) % len(kinds)] for step in (0, 2)]
    yield from kinds


def _other_files(file: DisturbedFile, others: list[SmallDataSet]) -> Iterator[Fault]:
    """The file of that name of another data set, and of the other shard."""
    for other in others:
        source = other.templates / file.stage / "data" / file.name
        if source.is_file() and not file.name.startswith(("../", "tokenizer/")):  # those are equal
            yield f"the one of {other.form}", partial(shutil.copyfile, source)
    if file.name.startswith("shard-") and not file.sizes_alone:
        number = "00001" if "00000" in file.name else "00000"
        yield "the other shard's", lambda path: _copy_sibling(path, f"shard-{number}{path.suffix}")


def _copy_sibling(path: Path, name: str) -> None:
    shutil.copyfile(path.with_name(name), path)


def _cut(size: int, path: Path) -> None:
    os.truncate(path, size)


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        path.rename(path.with_name(f".moved_{path.name}"))
        make(path)

    return apply


KINDS: dict[str, Callable[[Path], None]] = {
    "a FIFO": _instead(lambda path: os.mkfifo(path)),
    "/dev/zero": _instead(lambda path: path.symlink_to("/dev/zero")),
    "a folder": _instead(lambda path: path.mkdir()),
    "a dangling link": _instead(lambda path: path.symlink_to("nowhere")),
    "a link to itself": _instead(lambda path: path.symlink_to(path)),
    "/dev/null": _instead(lambda path: path.symlink_to("/dev/null")),
}
