"""Small data sets that the real commands make, at every stage, and copies of them to disturb."""

from __future__ import annotations

import gc
import hashlib
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from tests.faults.commands import EXPORTS, LISTS, LITTER, command, published_below
from tests.faults.forked_case import Ended, ForkedRun, run_forked
from tests.faults.os_calls import Call, OsCalls
from tests.input_writers import write_every_format
from tests.slurm.fake_slurm import install_fake_slurm

Stage = Literal["raw", "planned", "made", "verified", "littered"]

FORMS: dict[str, list[str]] = {
    "json": [],
    "npy": ["--token_format", "npy", "--no-keep_text"],
    "concat": ["--record", "packed", "--seq_len", "64"],
    "best_fit": ["--record", "packed", "--seq_len", "64", "--pack", "best_fit"],
    "formats": [],  # its raw text lies in one file of each format, too
}
_IMPORTED_AHEAD = {"preprocess", "loader", "slurm", "lustre", "shardprep", "transformers", "tokenizers"}
_IMPORTED_AHEAD |= {"pyarrow", "zstandard", "backports", "isal"}


class Hit(NamedTuple):
    """A command at a stage of the data set, hit again and again."""

    command: str
    stage: Stage
    name: str  # in the table


# Name in the table -> the command, and the stage of the data set at which it runs.
_HITS: dict[str, tuple[str, Stage]] = {
    **{name: (name, "raw") for name in ("plan", "train_tokenizer")},
    **{name: (name, "planned") for name in ("shard", "run", "submit", "doctor")},
    **{name: (name, "made") for name in ("verify", "verify --fast", "load tars", "status")},
    **{name: (name, "verified") for name in ("load", "stage", "peek", "report", "blank", *LISTS, *EXPORTS)},
    "clean": ("clean", "littered"),
    "shard, done": ("shard", "verified"),
    "load, no index": ("load", "made"),
    "formats that are cut": ("shard", "planned"),
    "formats read whole": ("shard 1", "planned"),
}


def hits(shares: Mapping[str, float], num_faults: int) -> Iterator[tuple[Hit, int]]:
    """These commands, each with its share of the faults: none in a short form where that is below a half."""
    for name, share in shares.items():
        if number := round(share * num_faults):
            yield Hit(*_HITS[name], name), number


@dataclass(frozen=True)
class Undisturbed:
    """What a command delivers and leaves where nothing is disturbed, and the calls that it makes."""

    value: Any
    files: Mapping[str, str]
    calls: list[Call]


def nothing(*_: object) -> None:
    """What happens where nobody says what."""


@dataclass(frozen=True)
class SmallDataSet:
    """A form of data set: what its folders are after each stage, and what every reader gets of it."""

    form: str
    options: list[str]
    place: Path  # where each run works: a copy of a template, always at the same path
    templates: Path
    calls: OsCalls
    batches: str  # the digest of all batches
    rest: str  # the digest of what a loader delivers from its state after two steps on
    _undisturbed: dict[object, Undisturbed] = field(default_factory=dict)

    def reset(self, stage: Stage) -> None:
        """Make the workplace what it was at the end of ``stage``."""
        for path in self.place.iterdir():  # the folder itself stays: it may be a mount
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        shutil.copytree(self.templates / stage, self.place, symlinks=True, dirs_exist_ok=True)

    def start(self, name: str, before: Callable[[], object] = nothing) -> ForkedRun:
        """Begin a command on the workplace as it is; ``before`` is called in its process just before it."""
        work = command(name, self.place, self.options)

        def run() -> tuple[int, Any]:
            os.environ["TMPDIR"] = tempfile.tempdir = str(self.place / "tmp")
            before()
            return work()

        return ForkedRun(run)

    def run(self, name: str) -> Ended:
        """Run a command to its end."""
        return self.start(name).end()

    def undisturbed(
        self, name: str, stage: Stage, prepare: Callable[[SmallDataSet], object] = nothing
    ) -> Undisturbed:
        """Run a command on a fresh workplace after ``prepare``, once for all campaigns."""
        key = (name, stage, prepare)
        if key not in self._undisturbed:
            self.reset(stage)
            prepare(self)
            with self.calls.ordered("count"):
                value = _must(self.start(name, self.calls.arm).end())
            self._undisturbed[key] = Undisturbed(value, self.published(), self.calls.calls())
        return self._undisturbed[key]

    def published(self) -> dict[str, str]:
        """Name -> digest of all that counts in the workplace: see ``published_below``."""
        return published_below(self.place)


def make_small_data_sets(folder: Path, forms: Sequence[str]) -> list[SmallDataSet]:
    """Make the data sets below ``folder``; this process stays without threads, and imports what they did."""
    install_fake_slurm(folder, pytest.MonkeyPatch())
    place = folder / "place"
    _write_raw(place)
    importlib.import_module("loader.dataloader")  # torch: 3 s of CPU in each fork that would load
    modules: set[str] = set()

    def do(*names: str) -> Any:
        """Run commands in a fork, and note what they import; what the last one delivers."""

        def work() -> tuple[int, Any]:
            code, value = 0, None
            for name in names:
                if not code:
                    code, value = command(name, place, options)()
            return code, (value, sorted(sys.modules))

        value, imported = _must(run_forked(work))
        modules.update(imported)
        return value

    options: list[str] = []
    do("train_tokenizer")
    (place / "trained").rename(place / "model")
    calls, sets = OsCalls(place), []
    for form in sorted(forms, key=lambda form: form == "formats"):  # it comes last, for it adds to raw/
        if form == "formats":
            write_every_format(place / "raw")
        options = [*FORMS[form], "--digests", "--max_bad_fraction", "0.5"]
        templates = folder / form
        for path in place.iterdir():  # what the form before left
            if path.name not in ("raw", "model", "tmp", "blanked"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

        def keep(stage: Stage, templates: Path = templates) -> None:
            shutil.copytree(place, templates / stage, symlinks=True)

        keep("raw")
        do("plan")
        keep("planned")
        do("submit", "shard", "shard 1")  # a submission of all in jobs/
        keep("made")
        do("verify")
        state = do("state")
        (place / "state").write_text(state, encoding="utf-8")
        keep("verified")
        batches, rest = do("load"), do("load resumed")
        _litter(place / "data")
        keep("littered")
        do("verify", "stage", "status", "report", "clean", "export hf")
        sets.append(SmallDataSet(form, options, place, templates, calls, batches, rest))
    # A fork need not import what was imported before.
    for name in sorted(modules):
        if name.partition(".")[0] in _IMPORTED_AHEAD:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all pages
    return sets


def _litter(data: Path) -> None:
    """What attempts left that died: of done shards; of no shard, long ago and just now."""
    folder = data / LITTER.format("tokenizer", 1)
    folder.mkdir()
    names = ("shard-00000.tar", "shard-00001.idx", "quarantine/shard-00001.jsonl", "index.json", "plan.json")
    left = {name: (data / name).with_name(LITTER.format(Path(name).name, 1)) for name in names}
    left["tokenizer"] = folder / "tokenizer.json"
    for path in left.values():
        path.write_bytes(b"half of it")
    then = time.time() - 48 * 3600  # others go when they are a day old
    for path in (left["index.json"], left["tokenizer"], folder):
        os.utime(path, (then, then))


def _must(ended: Ended) -> Any:
    if ended.how != "ended" or ended.code:
        message = f"an undisturbed run failed: {ended}"
        raise RuntimeError(message)
    return ended.value


def _write_raw(place: Path) -> None:
    """Two files, some 70 documents of both scripts: a long, an empty and a double one, one not in UTF-8."""
    for name in ("raw", "tmp"):
        (place / name).mkdir(parents=True)
    lines = [f"문서 {number} of a small set{' word' * (number % 13)}\n".encode() for number in range(70)]
    lines[20] = b"\n"
    lines[30] = b"a long document " * 40 + b"\n"
    lines[50] = b"not UTF-8: \xff\xfe\n"
    lines[61] = lines[60]
    (place / "raw" / "a.txt").write_bytes(b"".join(lines[:40]))
    (place / "raw" / "b.txt").write_bytes(b"".join(lines[40:]))
    blanked = hashlib.sha256(lines[3].removesuffix(b"\n")).hexdigest()
    (place / "blanked").write_text(f"sha256:{blanked}\n", encoding="ascii")
