"""``verify --deep``: makes some shards anew from the input and compares; webdataset reads their tars.

Such a shard is read, cut and laid out as a task does it, into a scratch folder. Its ids are those of the
worker's engine, and of some documents of every batch those of the reference, too. Equal hashes then say that
each byte or row of the input is covered once and in its order, that BOS and EOS stand where they should, and
that nothing else is there. It costs a task's time for each shard, the reference's for the sample, and the
space of one shard under TMPDIR.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from preprocess.cost_estimate import scratch_folder
from preprocess.engines import Engine, TokenBatch, tokenizers_engine
from preprocess.options import WorkerSettings
from preprocess.plan import Plan
from preprocess.shard_samples import ShardSamples
from preprocess.tokenizer_files import TOKENIZER_FILE
from preprocess.verify import Problem
from preprocess.worker import Worker, load_worker
from shardprep.errors import BrokenShard, ShardprepError
from shardprep.format.manifest import Manifest, read_manifest
from shardprep.format.names import TOKENIZER_DIR, remake_command, tar_path

_OF_A_BATCH = 8  # documents of a batch that the reference encodes, too


class _CheckedEngine:
    """The engine of a worker, some of whose ids are compared with the reference's."""

    def __init__(self, engine: Engine, reference: Engine, seed: int) -> None:
        self.num_compared = 0
        self._engine, self._reference = engine, reference
        self._chooser = random.Random(seed)  # noqa: S311 - a sample

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        tokens = self._engine.encode(texts)
        chosen = sorted(self._chooser.sample(range(len(texts)), min(_OF_A_BATCH, len(texts))))
        expected = self._reference.encode([texts[number] for number in chosen])
        for place, number in enumerate(chosen):
            found = tokens.ids[tokens.offsets[number] : tokens.offsets[number + 1]]
            wanted = expected.ids[expected.offsets[place] : expected.offsets[place + 1]]
            if not np.array_equal(found, wanted):
                raise BrokenShard(
                    f"{self._engine.name} {self._engine.version} gives other ids than the reference for "
                    f"{texts[number][:60]!r}; plan anew with --engine tokenizers"
                )
        self.num_compared += len(chosen)
        return tokens


def choose_shards(plan: Plan, num_shards: int) -> list[int]:
    """Some shards that have input, ascending; the same ones for a plan each time."""
    sizes = plan.shard_bytes()
    full = [shard_id for shard_id in range(plan.num_shards) if sizes[shard_id]]
    chooser = random.Random(plan.plan_id)  # noqa: S311 - a sample
    return sorted(chooser.sample(full, min(num_shards, len(full))))


def verify_deep(
    folder: Path,
    plan: Plan,
    shard_ids: Sequence[int],
    *,
    input_dir: Path | None,
    num_cpus: int,
    progress: Callable[[int], None],
) -> tuple[list[Problem], int]:
    """The shards that differ from what their input gives; and how many documents the reference encoded.

    ``progress`` is told 1 for each shard. Raises what loading the tokenizer raises.
    """
    settings = WorkerSettings(input_dir=input_dir)
    worker = load_worker(plan, folder, settings, num_cpus=num_cpus, warn=lambda _: None)
    reference = tokenizers_engine(
        folder / TOKENIZER_DIR / TOKENIZER_FILE, allow_special_tokens=plan.options.encodes_control_tokens
    )
    problems, num_compared = [], 0
    for shard_id in shard_ids:
        checked = _CheckedEngine(worker.engine, reference, shard_id)
        engine = dataclasses.replace(worker.engine, encode=checked.encode)
        try:
            _compare(folder, dataclasses.replace(worker, engine=engine), shard_id)
            _read_by_webdataset(folder, plan, shard_id)
        except ShardprepError as error:
            problems.append(Problem(shard_id=shard_id, error=error))
        num_compared += checked.num_compared
        progress(1)
    return problems, num_compared


def _compare(folder: Path, worker: Worker, shard_id: int) -> None:
    """Make a shard anew in a scratch folder, and compare. Raises BrokenShard."""
    there = read_manifest(folder, shard_id)
    with scratch_folder() as scratch:
        made = dataclasses.replace(worker, folder=scratch).run_shard(
            worker.plan.shard(shard_id), lambda _: None
        )
    differing = _differences(there, made)
    if differing:
        raise BrokenShard(
            f"shard {shard_id:05d} made anew from its input differs: {'; '.join(differing)}; "
            f"run: {remake_command(shard_id, folder)}"
        )


def _differences(there: Manifest, made: Manifest) -> list[str]:
    found = []
    for name in ("counts", "tar", "idx", "quarantine"):
        before, now = getattr(there, name), getattr(made, name)
        if before == now:
            continue
        if name == "counts":
            pairs = zip(
                dataclasses.fields(before), dataclasses.astuple(before), dataclasses.astuple(now), strict=True
            )
            found += [f"{field.name} {old}, anew {new}" for field, old, new in pairs if old != new]
        else:
            found.append(f"its {name} has another content")
    return found


def _read_by_webdataset(folder: Path, plan: Plan, shard_id: int) -> None:
    """That webdataset, where it is installed, reads the same ids from the tar. Raises BrokenShard."""
    try:
        import webdataset
    except ImportError:
        return
    number = 0
    with ShardSamples(folder, plan.spec, shard_id) as samples:
        tar = str(tar_path(folder, shard_id))
        for sample in webdataset.WebDataset(tar, shardshuffle=False, empty_check=False).decode():
            field = "token_ids.npy" if "token_ids.npy" in sample else "token_ids.json"
            rows = np.atleast_2d(np.asarray(sample[field]))
            for row in rows:
                ids = samples.ids(number) if number < len(samples.records) else None
                if ids is None or not np.array_equal(row[: len(ids)], ids):
                    raise _not_the_same(folder, shard_id, number)
                number += 1
        if number != len(samples.records):
            raise _not_the_same(folder, shard_id, number)


def _not_the_same(folder: Path, shard_id: int, number: int) -> BrokenShard:
    return BrokenShard(
        f"webdataset reads another sample {number} from {tar_path(folder, shard_id)} than its idx says; "
        f"run: {remake_command(shard_id, folder)}"
    )


def has_webdataset() -> bool:
    """Whether tars are read by webdataset, too."""
    import importlib.util

    return importlib.util.find_spec("webdataset") is not None
