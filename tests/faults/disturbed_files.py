"""A file of a data set is damaged or replaced, and read by every command that reads it: three campaigns.

- bit_flips: one bit of one byte.
- edited_files: bytes written, inserted, doubled or removed at several places.
- replaced_files: a FIFO, a device, a folder, a link, another shard's or data set's file, or a part of it.

Each is refused, or has no effect.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.faults.json_spans import spans
from tests.faults.judging import Undisturbed, undisturbed, verdict
from tests.faults.outcomes import Outcome, spread
from tests.faults.small_data_sets import SmallDataSet, Stage, make_external_tar

_HEADER_BYTES = 512  # and the size of a block of a tar
_TYPE_OFFSET = 156  # in a header
_QUICK_FAULTS = 8  # so few, and the kinds take turns


@dataclass(frozen=True, kw_only=True)
class DisturbedFile:
    """A file of a data set, and the commands that read it."""

    name: str  # below data/
    stage: Stage
    commands: tuple[str, ...]
    free_text: str = ""  # JSON path of a name outside of all hashes: another text there is another name
    headers_only: bool = False  # of a tar: the bytes of its members cannot be checked without a manifest
    sizes_alone: bool = False  # is all that the commands look at: another shard's may have the same
    prepare: Callable[[SmallDataSet], None] = lambda data_set: None

    @property
    def is_json(self) -> bool:
        # No bad values with right hashes in findings: those that were forged away are no findings.
        return self.name.endswith(".json") and self.name not in ("findings.json", "tokenizer/tokenizer.json")


def _keep_tars_only(data_set: SmallDataSet) -> None:
    """Our tars as somebody got them who took nothing else."""
    for path in (data_set.place / "data").iterdir():
        if path.is_file() and path.suffix != ".tar":
            path.unlink()


def _put_external_tars(data_set: SmallDataSet) -> None:
    _keep_tars_only(data_set)
    for path in (data_set.place / "data").glob("*.tar"):
        make_external_tar(path)


def _find_wrong(data_set: SmallDataSet) -> None:
    """A bit of a token id flips, and verify finds it."""
    tar = data_set.place / "data" / "shard-00001.tar"
    content = bytearray(tar.read_bytes())
    content[_HEADER_BYTES + 200] ^= 1
    tar.write_bytes(content)
    ended = data_set.run("verify")
    if ended.code != 65:
        raise RuntimeError(f"verify found nothing: {ended}")


_MODEL_ID = "tokenizer.model_id"
FILES = (
    DisturbedFile(name="plan.json", stage="planned", commands=("shard",), free_text=_MODEL_ID),
    DisturbedFile(
        name="plan.json",
        stage="verified",
        commands=("verify", "verify --fast", "status"),
        free_text=_MODEL_ID,
    ),
    DisturbedFile(name="tokenizer/tokenizer.json", stage="planned", commands=("shard",)),
    DisturbedFile(name="tokenizer/tokenizer.json", stage="verified", commands=("verify", "load")),
    DisturbedFile(name="tokenizer/tokenizer_config.json", stage="planned", commands=("shard",)),
    DisturbedFile(name="tokenizer/tokenizer_config.json", stage="verified", commands=("verify", "load")),
    DisturbedFile(name="index.json", stage="verified", commands=("load", "stage", "verify")),
    DisturbedFile(
        name="shard-00000.json",
        stage="made",
        commands=("load", "verify", "shard", "status"),
        free_text=f"spec.{_MODEL_ID}",
    ),
    DisturbedFile(name="shard-00000.idx", stage="verified", commands=("load", "stage", "verify")),
    DisturbedFile(name="shard-00000.tar", stage="verified", commands=("stage", "verify")),
    DisturbedFile(
        name="shard-00000.tar",
        stage="verified",
        commands=("load tars",),
        headers_only=True,
        prepare=_keep_tars_only,
    ),
    DisturbedFile(
        name="shard-00001.tar",
        stage="verified",
        commands=("load tars",),
        headers_only=True,
        prepare=_put_external_tars,
    ),
    DisturbedFile(name="quarantine/shard-00001.jsonl", stage="verified", commands=("verify",)),
    DisturbedFile(name="jobs/0000.json", stage="made", commands=("status",)),
    DisturbedFile(name="findings.json", stage="verified", commands=("shard 1",), prepare=_find_wrong),
)
# What is replaced by another kind of file, besides these.
_INPUTS = (
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

Fault = tuple[str, Callable[[Path], object]]  # in words, and what it does to the file
_undisturbed: dict[object, Undisturbed] = {}  # several campaigns run the same commands


def disturb(
    campaign: str, data_set: SmallDataSet, file: DisturbedFile, faults: Callable[[bytes], Iterator[Fault]]
) -> Iterator[Outcome]:
    """Put every fault of a file through every command that reads it."""
    path = Path(os.path.normpath(data_set.place / "data" / file.name))  # an input lies beside the data set
    for name in file.commands:
        key = (data_set.place, data_set.form, file.stage, name, file.prepare)
        if key not in _undisturbed:
            _undisturbed[key] = undisturbed(data_set, file.stage, name, lambda: file.prepare(data_set))
        expected = _undisturbed[key]
        data_set.reset(file.stage)
        file.prepare(data_set)
        if not path.exists():
            continue
        for words, apply in faults(path.read_bytes() if path.is_file() else b""):
            data_set.reset(file.stage)
            file.prepare(data_set)
            apply(path)
            ended = data_set.run(name)
            is_rewritten = name.startswith("verify") and file.name == "index.json"
            kind, what = verdict(
                data_set, name, ended, expected, None if is_rewritten else f"data/{file.name}"
            )
            yield Outcome(campaign, data_set.form, file.name, name, words, kind, what)


def bit_flips(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Flip bits spread over each file, another bit of the byte each time."""
    for data_set in data_sets:
        for file in FILES:
            yield from disturb("bit_flips", data_set, file, partial(_flips, file, num_faults))


def _flips(file: DisturbedFile, number: int, data: bytes) -> Iterator[Fault]:
    if file.headers_only:
        types, others = _header_offsets(data)
        offsets = [types[place] for place in spread(len(types), -(-number // 4))]
        offsets += [others[place] for place in spread(len(others), number)]
    else:
        free = _free_bytes(file, data)
        offsets = [offset for offset in spread(len(data), number) if offset not in free]
    for place, offset in enumerate(offsets):
        bit = (offset * 5 + place) % 8
        yield f"bit {bit} of byte {offset}", partial(_flip, offset, bit)


def _flip(offset: int, bit: int, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def _free_bytes(file: DisturbedFile, data: bytes) -> range:
    """Return the bytes of a name that nothing can tell from another."""
    if not file.free_text:
        return range(0)
    found = {path: (start, end) for path, start, end in spans(data.decode())}
    start, end = (len(data.decode()[:at].encode()) for at in found[file.free_text])
    return range(start, end)


def _header_offsets(tar: bytes) -> tuple[list[int], list[int]]:
    """Of all headers of a tar: the bytes of the type, which decide if there is a member; the others."""
    types: list[int] = []
    others: list[int] = []
    at = 0
    while tar[at : at + _HEADER_BYTES].strip(b"\0"):
        types.append(at + _TYPE_OFFSET)
        others += [offset for offset in range(at, at + _HEADER_BYTES) if tar[offset]]
        size = int(tar[at + 124 : at + 135], 8)
        at += _HEADER_BYTES + -(-size // _HEADER_BYTES) * _HEADER_BYTES
    return types, others


_PIECES = (
    b"", b"0", b"-1", b"1e999", b"9" * 400, b"[" * 5000, b'"', b"\\ud800", b"null", b"{}", b"\0" * 8,
    b"\xff" * 8,
)  # fmt: skip


def edited_files(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Edit each file at some places by chance, with seeds that are told."""
    for data_set in data_sets:
        for file in FILES:
            if not file.headers_only:
                yield from disturb("edited_files", data_set, file, partial(_edits, file, num_faults))


def _edits(file: DisturbedFile, number: int, data: bytes) -> Iterator[Fault]:
    free = _free_bytes(file, data)
    for seed in range(number):
        edited = _edited(data, random.Random(seed))
        if edited != data and data[free.start : free.stop] in edited:
            yield f"edits of seed {seed}", partial(_write, edited)


def _write(data: bytes, path: Path) -> None:
    path.write_bytes(data)


def _edited(data: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.randint(1, 4)):
        at, piece = chance.randrange(len(data) + 1), chance.choice([*_PIECES, chance.randbytes(8)])
        rest = data[at:]
        after = {
            "write": piece + rest[len(piece) :],
            "insert": piece + rest,
            "remove": rest[len(piece) * 9 + 1 :],
            "double": rest[: 64 * len(piece)] + rest,
            "end": b"",
        }
        data = data[:at] + chance.choice(list(after.values()))
    return data


def replaced_files(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Put each kind in place of each file of a data set and each input, for each command that reads it."""
    for data_set in data_sets:
        others = [each for each in data_sets if each is not data_set]
        for number, file in enumerate((*FILES, *_INPUTS)):
            faults = partial(_replacements, file, number, num_faults, others)
            yield from disturb("replaced_files", data_set, file, faults)


def _replacements(
    file: DisturbedFile, number: int, num_faults: int, others: list[SmallDataSet], data: bytes
) -> Iterator[Fault]:
    kinds = list(_KINDS.items())
    if file.stage == "raw":  # what is neither a file nor a link is left out by name: test_input_ledger.py
        kinds = [each for each in kinds if "link" in each[0]]
    elif data:
        kinds += [("empty", _cut_to(0)), ("a half", _cut_to(len(data) // 2))]
        for other in others:
            source = other.templates / file.stage / "data" / file.name
            if source.is_file() and not file.name.startswith(("../", "tokenizer/")):  # those are equal
                kinds.append((f"the one of {other.form}", partial(shutil.copyfile, source)))
        if file.name.startswith("shard-") and not file.sizes_alone:
            sibling = file.name.replace("00000", "other").replace("00001", "00000").replace("other", "00001")
            kinds.append(("the other shard's", lambda path: shutil.copyfile(path.with_name(sibling), path)))
        if file.name.endswith(".tar"):
            cuts = spread(len(data) // _HEADER_BYTES, num_faults)
            kinds += [(f"cut to {cut} blocks", _cut_to(cut * _HEADER_BYTES)) for cut in cuts]
    if num_faults <= _QUICK_FAULTS and file.stage != "raw":
        kinds = [kinds[number % len(kinds)]]
    yield from kinds


def _cut_to(size: int) -> Callable[[Path], object]:
    return lambda path: os.truncate(path, size)


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return what puts something else in place of a file, which it moves aside."""

    def apply(path: Path) -> None:
        path.rename(path.with_name(f".moved_{path.name}"))
        make(path)

    return apply


_KINDS: dict[str, Callable[[Path], object]] = {
    "a FIFO": instead(lambda path: os.mkfifo(path)),
    "/dev/zero": instead(lambda path: path.symlink_to("/dev/zero")),
    "a folder": instead(lambda path: path.mkdir()),
    "a dangling link": instead(lambda path: path.symlink_to("nowhere")),
    "a link to itself": instead(lambda path: path.symlink_to(path)),
    "/dev/null": instead(lambda path: path.symlink_to("/dev/null")),
}
