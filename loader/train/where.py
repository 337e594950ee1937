"""``where``: print the documents that a training step saw, or the steps that saw documents blanked since.

For a step: make the run's loader with ``origins``, move it to the step by ``state_at``, and read the step.

For blanked documents: ``blank`` replaced their ids by BLANK in place, so the shards that it remade show which
samples contain them. Training's RunReader then goes through the run and reads marks instead of samples. This
takes 0.3 us of CPU per sample so far, 0.6 us in a mixture. With ``group_by_length`` it reads every idx.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loader.batch.run_reader import RunReader
from loader.dataloader import get_llama3_dataloader
from loader.order.hashes import Int64s
from loader.order.mixture import Position, Run
from loader.order.state import STATE_FORMAT
from loader.read.chunks import Window, window_of_lengths
from loader.read.reading import ShardReader
from loader.read.samples import JoinedRows, Samples
from loader.read.shards import VALIDATION, ShardSet
from loader.token_loader import TokenLoader
from shardprep.console import Progress, counted, print_exactly, print_lines, say
from shardprep.errors import BrokenShard, NotFound, UsageError
from shardprep.format.json_files import load_json
from shardprep.format.names import ids_of_ranges
from shardprep.format.plan import need_plan
from shardprep.format.shard_samples import ShardSamples
from shardprep.format.spec import BLANK, blank_id


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the documents that a training step saw, each with its address for peek and its input file and "
        "byte, or the steps that saw documents blanked since. A checkpoint's loader state describes the run."
    )
    text = "the run's input_shards; in a mixture NAME=PATH, once for each folder of a source"
    parser.add_argument("input_shards", metavar="DATA", nargs="+", help=text)
    text = "checkpoint that contains the loader's state: a file of torch.save, or .json"
    parser.add_argument("--state", type=Path, required=True, help=text)
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--step", type=int, help="training step, from 0 (default: the last before --state)")
    text = "print the steps before --state that saw documents which are blanked in DATA"
    asked.add_argument("--blanked", action="store_true", help=text)
    text = "model whose tokenizer made tars of other tools (default: the data set's own tokenizer)"
    parser.add_argument("--model_id", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def where(args: argparse.Namespace) -> int:
    """Print the documents that a step saw, or the steps that saw blanked ones. Returns the exit code."""
    state = find_state(args.state)
    options = {**named_sources(args.input_shards), **options_of_state(state), "model_id": args.model_id}
    if options["split"] == "validation":  # also of a data set that is planned without a split
        options["input_shards"] = {VALIDATION: options["input_shards"]}
    with get_llama3_dataloader(**options) as loader:
        loader.load_run(state)
        if args.blanked:
            return _print_steps(loader, is_json=args.json)
        end = loader.progress.delivered.step
        step = max(end - 1, 0) if args.step is None else args.step
        may_change = len(loader.run.stages) > 1 or loader.run.is_mixture
        if step < 0 or (may_change and step >= end):
            expected = f"at least 0 and below {end}, the state's; later steps may be amended"
            raise UsageError.of_value("--step", step, expected)
        at = loader.state_at(step)
        loader.load_state_dict(at)
        documents = list(_documents(loader, state["layout"]["world_size"]))
    if args.json:
        answer = {"step": step, "epoch": at["epoch"], "step_of_epoch": at["step"], "documents": documents}
        print_exactly(json.dumps(answer, default=str))
        return 0
    num_documents = counted(len(documents), "document")
    print_lines(f"step {step}: step {at['step']} of epoch {at['epoch']}, {num_documents}")
    for each in documents:
        source = "" if each["source"] == "all" else f"{each['source']} "
        address = each["address"] or f"{each['tar']} sample {each['sample']}"
        line = f"rank {each['rank']} batch {each['batch']} row {each['row']} token {each['token']}"
        print_lines(f"{line}: {source}{address}{', ' if each['place'] else ''}{each['place']}")
    return 0


def _documents(loader: TokenLoader, world_size: int) -> Iterator[dict[str, object]]:
    """Yield the documents of the next step, by their ranks in training. The loader reads as one rank."""
    batch_size = loader.step_batches.batch_size
    rank_samples = loader.run.tick_samples // world_size
    for number, batch in enumerate(loader):
        tick, first = divmod(number * batch_size, loader.run.tick_samples)
        for row, token, *numbers in batch["origins"].tolist():
            rank, place = divmod(first + row, rank_samples)
            yield {
                "rank": rank,
                "batch": (tick * rank_samples + place) // batch_size,
                "row": place % batch_size,
                "token": token,  # of the row, at which the document begins or continues
                **asdict(loader.origin(*numbers)),
            }
        if loader.ends_step:
            return


def named_sources(input_shards: list[str]) -> dict[str, object]:
    """Return the loader's arguments for DATA: NAME=PATH is a source of a mixture, PATH alone is not."""
    named: dict[str, list[str]] = {}
    unnamed = []
    for text in input_shards:
        name, equals, path = text.partition("=")
        if equals and "/" not in name and not Path(text).exists():
            named.setdefault(name, []).append(path)
        else:
            unnamed.append(text)
    if not named:
        return {"input_shards": input_shards}
    if unnamed:
        raise UsageError(found=f"{unnamed[0]} without a name, among named sources", expected="NAME=PATH")
    return {"input_shards": named, "weights": dict.fromkeys(named, 1), "weights_in": "samples"}


def find_state(path: Path) -> dict[str, Any]:
    """Return the loader's state in a checkpoint, at any depth. Raises NotFound or BrokenShard."""
    if not path.is_file():
        raise NotFound(f"--state {path} is not a file", path=path)
    is_zip = False
    try:
        if path.suffix == ".json":
            content = load_json(path.read_bytes())
        else:
            # torch.save writes a zip file since torch 1.6, which mmap needs.
            is_zip = zipfile.is_zipfile(path)
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # torch and pickle raise errors of many types
        # torch's longer messages are about its own arguments, or advise to run code from the file.
        found = "no checkpoint of torch.save, or a damaged one"
        if path.suffix == ".json":
            found = f"no JSON: {error}"
        elif is_zip:
            found = (
                f"a checkpoint that cannot be read: {str(error).partition('. ')[0] or type(error).__name__}"
            )
        raise BrokenShard(path=path, found=found, expected="a file of torch.save, or .json") from None
    parts = [content]
    while parts:
        part = parts.pop(0)
        if isinstance(part, Mapping) and part.get("format") == STATE_FORMAT:
            return dict(part)
        if isinstance(part, (Mapping, list, tuple)):
            parts += part.values() if isinstance(part, Mapping) else part
    raise NotFound(path=path, found="no state of the loader", expected="what loader.state_dict() returned")


def options_of_state(state: Mapping[str, Any]) -> dict[str, object]:
    """Return arguments for a loader that reads the run of a state as one rank. Raises BrokenShard."""
    try:
        run = state["fingerprint"]
        num_cut = 1 if state["targets"] == "shifted" else 0  # the loader adds this token again
        return {
            **{name: run[name] for name in ("seed", "shuffle", "group_by_length")},
            **{name: run[name] - num_cut if run[name] else None for name in ("seq_len", "max_length")},
            "targets": state["targets"],
            "split": "validation" if run["keeps_tail"] else run["split"],
            "batch_size": state["layout"]["batch_size"],
            "global_batch_size": state["tick_samples"],
            "origins": True,
            "rank": 0,
            "world_size": 1,
            "num_workers": 0,
            "pin_memory": False,
        }
    except (LookupError, TypeError):
        raise BrokenShard("the state is damaged: it lacks values; take another checkpoint") from None


def refuse_missing_sources(run: Run, samples: Mapping[str, Samples]) -> None:
    """Raise UsageError if DATA lacks a source that the run has had."""
    for source in run.sources:
        if source.name not in samples:
            raise UsageError(found=f"no data for source {source.name}", expected=f"{source.name}=PATH")


def _print_steps(loader: TokenLoader, *, is_json: bool) -> int:
    """Print the steps before the loader's position that saw blanked documents. Returns the exit code."""
    run = loader.run
    num_steps = loader.progress.delivered.step
    found = sorted(_steps_with_blanks(run, loader.samples, num_steps).items())
    if loader.progress.skips.num_steps:
        say("note: the loop left epochs early by set_epoch; all their steps count as seen")
    steps = [{"step": step, "epoch": run.epoch_of(step), "sources": counts} for step, counts in found]
    if is_json:
        print_exactly(json.dumps({"num_steps": num_steps, "steps": steps}))
        return 0
    sums = sum((counts for _, counts in found), Counter[str]())
    print_lines(f"{len(found):,} of {counted(num_steps, 'step')} saw blanked documents")
    print_lines(*(f"  {name}: {counted(count, 'sample')} with some" for name, count in sums.items()))
    for step, counts in found:
        text = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        print_lines(f"step {step}, epoch {run.epoch_of(step)}: {text}")
    return 0


def _blanked_samples(shards: ShardSet) -> Int64s:
    """Return the stored samples that contain a part of a blanked document: int64[n], ascending."""
    plans = {data.folder: need_plan(data.folder) for data in shards.with_idx if data.has_blanks}
    remade = {folder: {*ids_of_ranges(plan.options.blanked)} for folder, plan in plans.items()}
    found = [np.zeros(0, np.int64)]
    for number in range(shards.num_shards):
        data, row = shards.locate(number)
        shard_id = int(data.shard_ids[row])
        if shard_id not in remade.get(data.folder, ()):
            continue
        records = [np.zeros(0, np.int64)]
        num_tokens = 0
        blanks = [BLANK, blank_id(data.spec.tokenizer.vocab_size)]  # in JSON ids, and in binary ids
        with ShardSamples(data.folder, data.spec, shard_id) as shard:
            ends = np.cumsum(shard.records["num_tokens"])
            for ids in shard.pieces():
                places = num_tokens + np.flatnonzero(np.isin(ids, blanks))
                records.append(np.searchsorted(ends, places, side="right"))
                num_tokens += len(ids)
        first, end = shards.first_sample[number : number + 2].tolist()
        samples = np.unique(np.concatenate(records)) + first - shards.record_numbers(first, number)
        found.append(samples[(samples >= first) & (samples < end)])  # others: the other side of the split
    return np.concatenate(found)


class _MarkedSamples:
    """Samples without ids, whose length is ``mark`` if they contain blanked documents, else 0."""

    row_tokens = 1

    def __init__(self, samples: Samples, blanked: Int64s, mark: int) -> None:
        self._samples = samples
        self._mark = mark
        self._begins = blanked
        self._ends = blanked + 1
        # of a sample, and of all
        self._width = 1
        self._size = samples.num_samples
        if isinstance(samples, JoinedRows):
            # Rows are cut from a circular stream of tokens, in which a document is an interval.
            self._width = samples.row_tokens
            self._size = samples.num_offsets
            intervals = np.zeros((2, len(blanked)), np.int64)  # begins and ends
            reader = ShardReader(samples.shards)
            shard_of = samples.shards.shard_of(blanked)
            for number in np.unique(shard_of).tolist():
                here = shard_of == number
                sums = samples.first_token[number] + samples.ends(reader, number)
                place = blanked[here] - samples.shards.first_sample[number]
                intervals[:, here] = sums[place], sums[place + 1]
            reader.close()
            self._begins, self._ends = (np.concatenate([each, each + self._size]) for each in intervals)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)

    def read(self, reader: object, samples: Int64s, offset: int) -> Window:  # noqa: ARG002 - nothing is read
        first = (offset + samples * self._width) % self._size
        end = first + self._width
        if getattr(self._samples, "keeps_tail", False):  # the last row is not full
            end = np.minimum(end, self._size)
        is_marked = np.searchsorted(self._ends, first, "right") < np.searchsorted(self._begins, end, "left")
        return window_of_lengths(is_marked.astype(np.int32) * np.int32(self._mark))


def _steps_with_blanks(run: Run, samples: Mapping[str, Samples], num_steps: int) -> dict[int, Counter[str]]:
    """Count the samples with blanked documents, by step and source, in the steps before ``num_steps``."""
    refuse_missing_sources(run, samples)
    marked: dict[str, Any] = {}
    num_blanked = 0
    for mark, source in enumerate(run.sources, 1):
        of_source = samples[source.name]
        blanked = _blanked_samples(of_source.shards)
        num_blanked += len(blanked)
        marked[source.name] = _MarkedSamples(of_source, blanked, mark)
    if not num_blanked:
        raise NotFound(found="no blanked document in DATA", expected="a data set that 'blank' made")
    reader = RunReader(run, marked, range(run.order.num_slots))
    found: dict[int, Counter[str]] = defaultdict(Counter)

    def first_tick(step: int) -> int:
        return run.tick_of(Position(step))

    end_tick = first_tick(num_steps)
    progress = Progress("searching the order", end_tick, unit="ticks")
    for epoch in range(run.epoch_of(num_steps) + 1):
        at = epoch * run.ticks_per_epoch
        for chunk in reader.chunks(epoch, 0, 1 << 16, endless=False):
            if at >= end_tick:
                break
            for tick, place in np.argwhere(chunk.lengths.T > 0).tolist():
                if at + tick < end_tick:
                    step = bisect_right(range(num_steps), at + tick, key=first_tick) - 1
                    found[step][run.sources[chunk.lengths[place, tick] - 1].name] += 1
            at += chunk.num_ticks
            progress.add(chunk.num_ticks)
    reader.close()
    return found
