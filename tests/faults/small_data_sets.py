"""Small data sets that the real commands make, at every stage, and copies of them to disturb."""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.faults.commands import (
    BLANKED_NAME,
    LITTER,
    REPORT_NAME,
    STATE_NAME,
    command,
    open_loader,
    published_below,
)
from tests.faults.every_format import write_every_format
from tests.faults.forked_case import Ended, ForkedRun, run_forked

Stage = Literal["raw", "planned", "made", "verified", "littered"]

FORMS: dict[str, list[str]] = {
    "json": [],
    "npy": ["--token_format", "npy", "--no-keep_text"],
    "concat": ["--record", "packed", "--seq_len", "64"],
    "best_fit": ["--record", "packed", "--seq_len", "64", "--pack", "best_fit"],
    "formats": [],  # its raw text lies in one file of each format, too
}
_IMPORTED_AHEAD = frozenset(
    {
        *("preprocess", "loader", "slurm", "lustre", "shardprep", "transformers", "tokenizers"),
        *("pyarrow", "zstandard", "backports", "isal"),
    }
)
_BAD_LINE = b"not UTF-8: \xff\xfe\n"
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


def _nothing() -> None:
    """What happens before an undisturbed run."""


@dataclass(frozen=True)
class SmallDataSet:
    """A form of data set: what its folders are after each stage, and what every reader gets of it."""

    form: str
    options: list[str]
    place: Path  # where each run works: a copy of a template, always at the same path
    templates: Path
    batches: str  # the digest of all batches
    state: str  # of a loader after two steps, as JSON
    rest: str  # the digest of what it delivers from there on

    def reset(self, stage: Stage) -> None:
        """Make the workplace what it was at the end of ``stage``."""
        for path in self.place.iterdir():  # the folder itself stays: it may be a mount
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        shutil.copytree(self.templates / stage, self.place, symlinks=True, dirs_exist_ok=True)

    def run(
        self,
        name: str,
        before: Callable[[], None] = _nothing,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> Ended:
        """A command on the workplace as it is; ``before`` is called in its process just before it.

        ``meanwhile`` is called in this process each time that the command stops.
        """
        return run_forked(self._work(name, before), meanwhile=meanwhile)

    def start(self, name: str) -> ForkedRun:
        """A command that runs beside others."""
        return ForkedRun(self._work(name, _nothing))

    def _work(self, name: str, before: Callable[[], None]) -> Callable[[], tuple[int, Any]]:
        work = command(name, self.place, self.options)

        def run() -> tuple[int, Any]:
            os.environ["TMPDIR"] = tempfile.tempdir = str(self.place / "tmp")
            before()
            return work()

        return run

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
    _write_raw(place / "raw")
    (place / "tmp").mkdir()
    importlib.import_module("loader.dataloader")  # torch: 3 s of CPU in each fork that would load
    modules: set[str] = set()

    def do(*names: str) -> None:
        """Run commands in a fork, and note what they import."""

        def work() -> tuple[int, list[str]]:
            for name in names:
                code, _ = command(name, place, options)()
                if code:
                    return code, []
            return 0, sorted(sys.modules)

        modules.update(_must(run_forked(work)))

    options: list[str] = []
    do("train_tokenizer")
    (place / "trained").rename(place / "model")
    sets = []
    for form in sorted(forms, key=lambda form: form == "formats"):  # it comes last, for it adds to raw/
        if form == "formats":
            write_every_format(place / "raw")
        options = [*FORMS[form], "--digests", "--max_bad_fraction", "0.5"]
        templates = folder / form
        for name in ("data", "staged", "exported"):  # what the form before left
            shutil.rmtree(place / name, ignore_errors=True)
        for name in (REPORT_NAME, STATE_NAME):
            (place / name).unlink(missing_ok=True)
        _keep(place, templates / "raw")
        do("plan")
        _keep(place, templates / "planned")
        do("submit", "shard", "shard 1")  # a submission of all in jobs/
        _keep(place, templates / "made")
        do("verify")
        state = _must(run_forked(lambda: _state(place)))
        (place / STATE_NAME).write_text(state, encoding="utf-8")
        _keep(place, templates / "verified")
        batches = _must(run_forked(command("load", place, options)))
        rest = _must(run_forked(command("load resumed", place, options)))
        _litter(place / "data")
        _keep(place, templates / "littered")
        do("verify", "load", "stage", "status", "report", "clean", "export hf")
        sets.append(SmallDataSet(form, options, place, templates, batches, state, rest))
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
    """What attempts left that died: of done shards, of no shard long ago, and of no shard just now."""
    then = time.time() - 48 * 3600  # others go when they are a day old
    for name in (
        "shard-00000.tar",
        "shard-00001.idx",
        "quarantine/shard-00001.jsonl",
        "index.json",
        "plan.json",
    ):
        for attempt in range(3):
            path = (data / name).with_name(LITTER.format(Path(name).name, attempt))
            path.write_bytes(b"half of it")
            if name == "index.json":
                os.utime(path, (then, then))
    folder = data / LITTER.format("tokenizer", 1)
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(b"half of it")
    for path in (folder / "tokenizer.json", folder):
        os.utime(path, (then, then))


def _must(ended: Ended) -> Any:
    if ended.how != "ended" or ended.code:
        message = f"an undisturbed run failed: {ended}"
        raise RuntimeError(message)
    return ended.value


def _keep(place: Path, template: Path) -> None:
    shutil.copytree(place, template, symlinks=True)


def _write_raw(folder: Path) -> None:
    """Two files, some 70 documents of both scripts, a long one, an empty one, one that is not UTF-8."""
    folder.mkdir(parents=True)
    lines = [f"문서 {number} of a small set{' word' * (number % 13)}\n".encode() for number in range(70)]
    lines[20] = b"\n"
    lines[30] = b"a long document " * 40 + b"\n"
    lines[50] = _BAD_LINE
    (folder / "a.txt").write_bytes(b"".join(lines[:40]))
    (folder / "b.txt").write_bytes(b"".join(lines[40:]))
    blanked = hashlib.sha256(lines[3].removesuffix(b"\n")).hexdigest()
    (folder.parent / BLANKED_NAME).write_text(f"sha256:{blanked}\n", encoding="ascii")


def _fake_slurm(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in _COMMANDS_OF_SLURM:
        (folder / name).write_text(_FAKE_SLURM, encoding="ascii")
        (folder / name).chmod(0o755)
    return folder


def make_external_tar(path: Path, num_samples: int = 6) -> None:
    """A tar by webdataset's own TarWriter: ids and a text a sample, no idx, no manifest.

    The ids are npy where those of the tar that stood there are, else JSON.
    """
    import numpy as np
    from webdataset import TarWriter

    with tarfile.open(path) as tar:
        has_npy = any(name.endswith("token_ids.npy") for name in tar.getnames())
    with TarWriter(str(path), mtime=0) as writer:
        for number in range(num_samples):
            ids = [300, *range(1, 6 + number), 301]
            member = {"token_ids.npy": np.array(ids, np.uint16)} if has_npy else {"token_ids.json": ids}
            writer.write({"__key__": f"sample_{number:05d}", "text.txt": "text", **member})
