"""Small data sets that the real commands make, at every stage, and copies of them to disturb."""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.faults.commands import EXPORTS, LITTER, command, open_loader, published_below
from tests.faults.every_format import write_every_format
from tests.faults.forked_case import Ended, ForkedRun, run_forked
from tests.faults.os_calls import Call, OsCalls

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
# Slurm's commands, as far as `submit` and `status` ask them: a cluster that accepts and forgets all.
_FAKE_SLURM = """#!/bin/sh
case "$(basename "$0") $*" in
    sbatch*) cat >/dev/null; echo 100 ;;
    *"show config"*) echo 'MaxArraySize = 1001'; echo 'MaxJobCount = 10000'; echo 'ClusterName = small' ;;
    *"show job"*)
        echo 'JobId=100 JobName=small UserId=me(0) NumCPUs=1 MinMemoryNode=1G TimeLimit=01:00:00' \\
            'SubmitTime=2026-01-01T00:00:00' ;;
esac
"""
_COMMANDS_OF_SLURM = ("sbatch", "squeue", "sacct", "sacctmgr", "scontrol", "scancel", "sinfo")


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
    **{name: (name, "verified") for name in ("load", "stage", "peek", "report", "blank", *EXPORTS)},
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
    state: str  # of a loader after two steps, as JSON
    rest: str  # the digest of what it delivers from there on
    _undisturbed: dict[object, Undisturbed] = field(default_factory=dict)

    def reset(self, stage: Stage) -> None:
        """Make the workplace what it was at the end of ``stage``."""
        for path in self.place.iterdir():  # the folder itself stays: it may be a mount
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        shutil.copytree(self.templates / stage, self.place, symlinks=True, dirs_exist_ok=True)

    def run(
        self,
        name: str,
        before: Callable[[], object] = nothing,
        *,
        meanwhile: Callable[[], object] | None = None,
    ) -> Ended:
        """A command on the workplace as it is; ``before`` is called in its process just before it.

        ``meanwhile`` is called in this process each time that the command stops.
        """
        return run_forked(self._work(name, before), meanwhile=meanwhile)

    def start(self, name: str) -> ForkedRun:
        """A command that runs beside others."""
        return ForkedRun(self._work(name, nothing))

    def _work(self, name: str, before: Callable[[], object]) -> Callable[[], tuple[int, Any]]:
        work = command(name, self.place, self.options)

        def run() -> tuple[int, Any]:
            os.environ["TMPDIR"] = tempfile.tempdir = str(self.place / "tmp")
            before()
            return work()

        return run

    def undisturbed(
        self, name: str, stage: Stage, prepare: Callable[[SmallDataSet], object] = nothing
    ) -> Undisturbed:
        """Run a command on a fresh workplace after ``prepare``, once for all campaigns."""
        key = (name, stage, prepare)
        if key not in self._undisturbed:
            self.reset(stage)
            prepare(self)
            with self.calls.ordered("count"):
                value = _must(self.run(name, self.calls.arm))
            self._undisturbed[key] = Undisturbed(value, self.published(), self.calls.calls())
        return self._undisturbed[key]

    def published(self) -> dict[str, str]:
        """Name -> digest of all that counts in the workplace: see ``published_below``."""
        return published_below(self.place)


def make_small_data_sets(folder: Path, forms: Sequence[str]) -> list[SmallDataSet]:
    """Make the data sets below ``folder``; this process stays without threads, and imports what they did."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["PATH"] = f"{_fake_slurm(folder / 'slurm_bin')}:{os.environ['PATH']}"
    for name in [name for name in os.environ if name.startswith(("SLURM_", "DATASET_"))]:
        del os.environ[name]
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

    def keep(stage: Stage) -> None:
        shutil.copytree(place, templates / stage, symlinks=True)

    options: list[str] = []
    do("train_tokenizer")
    (place / "trained").rename(place / "model")
    calls, sets = OsCalls(place), []
    for form in sorted(forms, key=lambda form: form == "formats"):  # it comes last, for it adds to raw/
        if form == "formats":
            write_every_format(place / "raw")
        options = [*FORMS[form], "--digests", "--max_bad_fraction", "0.5"]
        templates = folder / form
        for name in ("data", "staged", "exported"):  # what the form before left
            shutil.rmtree(place / name, ignore_errors=True)
        for name in ("report", "state"):
            (place / name).unlink(missing_ok=True)
        keep("raw")
        do("plan")
        keep("planned")
        do("submit", "shard", "shard 1")  # a submission of all in jobs/
        keep("made")
        do("verify")
        state = _must(run_forked(lambda: _state(place)))
        (place / "state").write_text(state, encoding="utf-8")
        keep("verified")
        batches, rest = do("load"), do("load resumed")
        _litter(place / "data")
        keep("littered")
        do("verify", "stage", "status", "report", "clean", "export hf")
        sets.append(SmallDataSet(form, options, place, templates, calls, batches, state, rest))
    # A fork need not import what was imported before.
    for name in sorted(modules):
        if name.partition(".")[0] in _IMPORTED_AHEAD:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all pages
    return sets


def _state(place: Path) -> tuple[int, str]:
    with open_loader(place / "data") as loader:
        return 0, json.dumps(loader.state_at(2))


def _litter(data: Path) -> None:
    """What attempts left that died: of done shards; of no shard, long ago and just now."""
    folder = data / LITTER.format("tokenizer", 1)
    folder.mkdir()
    old = [folder / "tokenizer.json", folder]
    for name in (
        "shard-00000.tar",
        "shard-00001.idx",
        "quarantine/shard-00001.jsonl",
        "index.json",
        "plan.json",
    ):
        path = (data / name).with_name(LITTER.format(Path(name).name, 1))
        path.write_bytes(b"half of it")
        if name == "index.json":
            old.append(path)
    old[0].write_bytes(b"half of it")
    then = time.time() - 48 * 3600  # others go when they are a day old
    for path in old:
        os.utime(path, (then, then))


def _must(ended: Ended) -> Any:
    if ended.how != "ended" or ended.code:
        message = f"an undisturbed run failed: {ended}"
        raise RuntimeError(message)
    return ended.value


def _write_raw(place: Path) -> None:
    """Two files, some 70 documents of both scripts, a long one, an empty one, one that is not UTF-8."""
    for name in ("raw", "tmp"):
        (place / name).mkdir(parents=True)
    lines = [f"문서 {number} of a small set{' word' * (number % 13)}\n".encode() for number in range(70)]
    lines[20] = b"\n"
    lines[30] = b"a long document " * 40 + b"\n"
    lines[50] = b"not UTF-8: \xff\xfe\n"
    (place / "raw" / "a.txt").write_bytes(b"".join(lines[:40]))
    (place / "raw" / "b.txt").write_bytes(b"".join(lines[40:]))
    blanked = hashlib.sha256(lines[3].removesuffix(b"\n")).hexdigest()
    (place / "blanked").write_text(f"sha256:{blanked}\n", encoding="ascii")


def _fake_slurm(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in _COMMANDS_OF_SLURM:
        (folder / name).write_text(_FAKE_SLURM, encoding="ascii")
        (folder / name).chmod(0o755)
    return folder
