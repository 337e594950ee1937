"""Small data sets at every stage, made by the real commands, and commands to disturb on copies of them.

A workplace has raw/, model/, data/, and other outputs of commands: staged/, exported/, report.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import itertools
import json
import os
import pkgutil
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from shardprep.__main__ import main
from tests.checkout import PACKAGES
from tests.faults.forked_case import Ended, ForkedRun
from tests.faults.os_calls import Call, OsCalls
from tests.input_writers import write_every_format
from tests.slurm.fake_slurm import install_fake_slurm
from tests.world import open_loader

LITTER = ".{}.other-{}-0123abcd.tmp"  # temporaries of killed attempts, which clean removes
LISTS = ("duplicates", "overlap")  # commands that write lists
EXPORTS = ("export megatron", "export nanogpt", "export hf")
WITH_HELPERS = "shard with helpers"
# Words in capitals are paths in the workplace; OPTIONS are the options of the form.
_WORDS = {
    "plan": "plan --input_dir RAW --output_dir DATA --model_id MODEL --num_shards 2 OPTIONS",
    "shard": "shard --shard_id 0 --output_dir DATA",
    "shard 1": "shard --shard_id 1 --output_dir DATA",
    WITH_HELPERS: "shard --shard_id 0 --output_dir DATA",
    "run": "run DATA --num_proc 1",
    "verify": "verify DATA",
    "verify --fast": "verify DATA --fast",
    "stage": "stage DATA --to STAGED",
    "status": "status DATA",
    "peek": "peek DATA --num 3",
    "doctor": "doctor --output_dir DATA --model_id MODEL",
    "train_tokenizer": "train_tokenizer --input_dir RAW --output_dir TRAINED --vocab_size 300",
    "clean": "clean DATA",
    "submit": "submit DATA --mem_gb 1",
    "report": "report DATA --json --output REPORT",
    "blank": "blank DATA --ids BLANKED --output_dir STAGED --num_proc 1 --max_bad_fraction 0.5",
    "duplicates": "duplicates DATA --output NAMES",
    "overlap": "overlap DATA --against RAW --output EXPORTED/overlap",
    "export megatron": "export DATA --to megatron --output_dir EXPORTED/megatron",
    "export nanogpt": "export DATA --to nanogpt --output_dir EXPORTED/nanogpt",
    "export hf": "export DATA --to hf --output_dir EXPORTED/hf",
    "blank by id": "blank DATA --ids LISTED --output_dir STAGED --num_proc 1 --max_bad_fraction 0.5",
    "overlap in data": "overlap DATA --against RAW",
    "peek at id": "peek DATA id:doc-3",
    "peek at place": "peek DATA a.txt:0",
    "verify --deep": "verify DATA --deep 1",
}
Stage = Literal["raw", "planned", "made", "verified", "littered", "full", "blanked"]
_MADE_BY: dict[Stage, list[str]] = {
    "raw": [],
    "planned": ["plan"],
    "made": ["submit", "shard", "shard 1"],  # jobs/ has a submission of all shards
    "verified": ["verify", "state"],
    "littered": [],
}

FORMS: dict[str, list[str]] = {
    "json": [],
    "npy": ["--token_format", "npy", "--no-keep_text"],
    "concat": ["--record", "packed", "--seq_len", "64"],
    "best_fit": ["--record", "packed", "--seq_len", "64", "--pack", "best_fit"],
    "formats": [],  # its raw text is also in one file of each format
    "with_ids": ["--id_field", "id", "--exclude", "EXCLUDED"],  # its raw text is also in a file with ids
}
_UNCOUNTED = (".partial", "/written.jsonl")
_KEPT = ("raw", "model", "tmp", "blanked", "listed", "excluded")  # by the next form
# Library modules that commands import late. The loader imports torch.
_IMPORTED_AHEAD = [
    "encodings.cp949",
    "encodings.utf_16_le",
    "encodings.utf_32_le",
    "isal.igzip_lib",
    "tokenizers.trainers",
    "transformers.models.auto.tokenization_auto",
]


def command(name: str, place: Path, options: list[str]) -> Callable[[], tuple[int, Any]]:
    """Return a command as a function for ``ForkedRun``. Its value is a digest of what it delivers."""
    data = place / "data"
    delivers: dict[str, Callable[[], object]] = {
        "state": lambda: (place / "state").write_text(json.dumps(open_loader(data, 2, seed=3).state_at(2))),
        "load": lambda: loaded(data),
        "load staged": lambda: loaded(place / "staged"),
        "load tars": lambda: loaded([*map(str, sorted(data.glob("*.tar")))], model_id=place / "model"),
        "load resumed": lambda: loaded(data, state=json.loads((place / "state").read_bytes())),
    }

    def run() -> tuple[int, Any]:
        if name in delivers:
            return 0, delivers[name]()
        if name == WITH_HELPERS:
            _pretend_three_cpus()
        words = _WORDS[name].replace("OPTIONS", " ".join(options)).split()
        code = main([re.sub("^[A-Z]+", lambda word: str(place / word[0].lower()), word) for word in words])
        return 0 if (name, code) == ("doctor", 1) else code, None  # doctor ends with 1 for a warning

    return run


def _pretend_three_cpus() -> None:
    """Let this process have three CPUs, and helpers for a shard of 2 kB."""
    os.sched_getaffinity = lambda _: {0, 1, 2}
    os.sched_setaffinity = lambda *_: None
    os.environ["SHARDPREP_STRETCH_BYTES"] = "60"


def loaded(shards: object, *, state: Any = None, **options: object) -> str:
    """Return a digest of all batches of an epoch, or those after a state, and of all decoded ids."""
    digest = hashlib.sha256()
    with open_loader(shards, 2, seed=3, **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        tokenizer = loader.tokenizer
        special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
        digest.update(json.dumps([len(loader), special]).encode())
        for batch in loader:
            for name in sorted(batch):
                digest.update(f"{name} {batch[name].dtype} {list(batch[name].shape)} ".encode())
                digest.update(batch[name].numpy().tobytes())
        texts = tokenizer.decode(list(range(tokenizer.vocab_size)))
        digest.update(texts.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


class Hit(NamedTuple):
    """A command, to be disturbed at a stage of the data set."""

    command: str
    stage: Stage
    name: str  # in the table


# Name in the table -> the command and the stage at which it runs.
_HITS: dict[str, tuple[str, Stage]] = {
    **{name: (name, "raw") for name in ("plan", "train_tokenizer")},
    **{name: (name, "planned") for name in ("shard", WITH_HELPERS, "run", "submit", "doctor")},
    **{name: (name, "made") for name in ("verify", "verify --fast", "load tars", "status")},
    **{name: (name, "verified") for name in ("load", "stage", "peek", "report", "blank", *LISTS, *EXPORTS)},
    "clean": ("clean", "littered"),
    "shard, done": ("shard", "verified"),
    "load, no index": ("load", "made"),
    "formats that are cut": ("shard", "planned"),
    "formats read whole": ("shard 1", "planned"),
}


def hits(shares: Mapping[str, float], num_faults: int) -> Iterator[tuple[Hit, int]]:
    """Yield these commands with their number of faults, skipping those whose share rounds to 0."""
    for name, share in shares.items():
        if number := round(share * num_faults):
            yield Hit(*_HITS[name], name), number


@dataclass(frozen=True)
class Undisturbed:
    """The output, files and calls of a command that runs without a fault."""

    value: Any
    files: Mapping[str, str]
    calls: list[Call]


def nothing(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class SmallDataSet:
    """A form of data set, with a copy of its folders after each stage."""

    form: str
    options: list[str]
    place: Path  # the workplace of every run: a copy of a template, always at the same path
    templates: Path
    calls: OsCalls
    _undisturbed: dict[object, Undisturbed] = field(default_factory=dict)

    def reset(self, stage: Stage) -> None:
        """Restore the workplace at the end of ``stage``."""
        for path in self.place.iterdir():  # keep the folder itself, which may be a mount point
            _remove_folder(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        shutil.copytree(self.templates / stage, self.place, symlinks=True, dirs_exist_ok=True)

    def start(self, name: str, before: Callable[[], object] = nothing) -> ForkedRun:
        """Start a command on the workplace; ``before`` is called in its process just before the command."""
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
        """Return the undisturbed result of a command on a fresh workplace after ``prepare``. It is cached."""
        key = (name, stage, prepare)
        if key not in self._undisturbed:
            self.reset(stage)
            prepare(self)
            with self.calls.ordered("count"):
                ended = self.start(name, self.calls.arm).end()
            assert ended.is_well, f"{name} fails undisturbed: {ended}"
            self._undisturbed[key] = Undisturbed(ended.value, self.published(), self.calls.calls())
        return self._undisturbed[key]

    def make(self) -> None:
        """Run the commands of each stage and save the workplace after each."""
        for path in self.place.iterdir():  # left by the previous form
            if path.name not in _KEPT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if self.form == "formats":
            write_every_format(self.place / "raw")
        if self.form == "with_ids":
            lines = [json.dumps({"id": f"doc-{n}", "text": f"document {n}"}) for n in range(20)]
            (self.place / "raw" / "c.jsonl").write_text("\n".join(lines), encoding="utf-8")
        for stage, names in _MADE_BY.items():
            for name in names:
                ended = self.run(name)
                assert ended.is_well, f"{self.form}: {name} fails undisturbed: {ended}"
            if stage == "littered":
                _litter(self.place / "data")
            shutil.copytree(self.place, self.templates / stage, symlinks=True)

    def published(self) -> dict[str, str]:
        """Return name -> digest of the files that count: data set, copies, exports, lists and report.

        Manifests are hashed without ``run``, which may differ, and the report without its time. Temporaries,
        jobs and the tokenizer do not count.
        """
        found = {}
        for path in [*self.place.rglob("*")]:
            name = path.relative_to(self.place).as_posix()
            folder = name.partition("/")[0]
            if not path.is_file():
                continue
            data = path.read_bytes()
            if folder in ("data", "staged") and path.name.startswith(("shard-", "index.json", "plan.json")):
                if path.match("shard-*.json"):
                    data = data.partition(b'\n "run": ')[0]
            elif folder == "data" and path.match(LITTER.format("*", "?")):
                name, data = f"litter/{path.name}", b""
            elif name == "report":
                data = re.sub(rb'"written": [^,}]*', b"", data)
            # The record has a line a file, in the order in which they were written.
            elif folder not in ("exported", "names", "trained") or "/." in name or name.endswith(_UNCOUNTED):
                continue
            found[name] = hashlib.sha256(data).hexdigest()
        return found


def _remove_folder(path: Path) -> None:
    """Remove a folder of any depth, where ``shutil.rmtree`` ends at 1,000 levels."""
    numbers = itertools.count()
    folders = [path]
    while folders:
        folder = folders.pop()
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                # Beside the first one, so that no path is too long.
                folders.append(path.with_name(f".removed-{next(numbers)}"))
                Path(entry).rename(folders[-1])
            else:
                Path(entry).unlink()
        folder.rmdir()


def make_small_data_sets(folder: Path, forms: Sequence[str]) -> list[SmallDataSet]:
    """Make the data sets below ``folder``. Imports everything that forks need, and starts no thread."""
    install_fake_slurm(folder, pytest.MonkeyPatch())
    packages = map(importlib.import_module, PACKAGES)
    names = [each.name for of in packages for each in pkgutil.walk_packages(of.__path__, f"{of.__name__}.")]
    for name in [*names, *_IMPORTED_AHEAD]:
        with contextlib.suppress(ImportError):  # a framework is not installed
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # garbage collection in a fork would copy all pages
    place = folder / "place"
    _write_raw(place)
    calls = OsCalls(place)
    options = ["--digests", "--max_bad_fraction", "0.5"]
    sets = [SmallDataSet(form, [*FORMS[form], *options], place, folder / form, calls) for form in forms]
    sets.sort(key=lambda data_set: ("with_ids", "formats").count(data_set.form))  # last: they add to raw/
    ended = sets[0].run("train_tokenizer")
    assert ended.is_well, ended
    (place / "trained").rename(place / "model")
    for data_set in sets:
        data_set.make()
    return sets


def _litter(data: Path) -> None:
    """Create temporaries of killed attempts: of done shards, and old and new ones of other files."""
    folder = data / LITTER.format("tokenizer", 1)
    folder.mkdir()
    names = ("shard-00000.tar", "shard-00001.idx", "quarantine/shard-00001.jsonl", "index.json", "plan.json")
    left = {name: (data / name).with_name(LITTER.format(Path(name).name, 1)) for name in names}
    left["tokenizer"] = folder / "tokenizer.json"
    for path in left.values():
        path.write_bytes(b"half of it")
    then = time.time() - 48 * 3600  # files of no shard are removed after a day
    for path in (left["index.json"], left["tokenizer"], folder):
        os.utime(path, (then, then))


def _write_raw(place: Path) -> None:
    """Write two files with 70 lines in both scripts: one long, one empty, one repeated, one not UTF-8."""
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
    (place / "listed").write_text("doc-3\n", encoding="ascii")
    (place / "excluded").write_text("doc-5\n", encoding="ascii")
