"""``where``: which documents a training step saw, or which steps saw blanked ones, by a checkpoint's state.

A loader is made as the run's was, with ``origins``; ``state_at`` puts it to the step, whose samples it reads.

``blank`` has found the documents of a list, and put BLANK where their ids stood, in the same places. So which
samples held them is read from the shards that were made again, whatever names the list had. The reader of
training then walks through the run, with marks of samples in place of their bytes. The price: 0.3 us of CPU
for each sample so far, 0.6 us of a mixture; of samples of like length, every idx is read.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loader.chunks import Chunk, Ragged, RunReader, Window
from loader.dataloader import TokenLoader, get_llama3_dataloader
from loader.order import Int64s
from loader.reading import ShardReader
from loader.run import STATE_FORMAT, Position, Run
from loader.samples import JoinedRows, Samples
from loader.shards import ShardSet
from shardprep.console import Progress, counted, print_lines, say
from shardprep.errors import BrokenShard, NotFound, UsageError
from shardprep.format.index import ShardSamples
from shardprep.format.names import BLANK, blank_id, ids_of_ranges, load_json
from shardprep.format.plan import need_plan


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Name the documents that a training step saw, with their address for peek, and their file and byte, "
        "by the state that a checkpoint of the run holds; or the steps that saw documents which are blanked."
    )
    text = "as the loader was given; of a mixture NAME=PATH, again for each folder of a source"
    parser.add_argument("input_shards", metavar="DATA", nargs="+", help=text)
    text = "a checkpoint of torch.save, or JSON, that holds a state"
    parser.add_argument("--state", type=Path, required=True, help=text)
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--step", type=int, help="training step, from 0 (default: the last one of --state)")
    text = "name the steps before --state that saw documents which are blanked in DATA (default: one step)"
    asked.add_argument("--blanked", action="store_true", help=text)
    text = "whose tokenizer made tars of other tools (default: the data set's own)"
    parser.add_argument("--model_id", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def where(args: argparse.Namespace) -> int:
    """Print which documents a step saw, and return the exit code."""
    state = find_state(args.state)
    options = {**_named_sources(args.input_shards), **_loader_options(state), "model_id": args.model_id}
    with get_llama3_dataloader(**options) as loader:
        loader.load_state_dict({**state, "num_micro": 0})
        if args.blanked:
            return _print_steps(loader, is_json=args.json)
        end = loader.progress.delivered.step
        step = max(end - 1, 0) if args.step is None else args.step
        if step < 0 or (options["amend"] and step >= end):
            expected = f"from 0 up to {end}, where the state is: what comes then is up to weights and sizes"
            raise UsageError.of_value("--step", step, expected)
        at = loader.state_at(step)
        loader.load_state_dict(at)
        documents = list(_documents(loader, state["layout"]["world_size"]))
    if args.json:
        answer = {"step": step, "epoch": at["epoch"], "step_of_epoch": at["step"], "documents": documents}
        print_lines(json.dumps(answer, default=str))
        return 0
    print_lines(f"step {step}: step {at['step']} of epoch {at['epoch']}, {len(documents)} documents")
    for each in documents:
        source = "" if each["source"] == "all" else f"{each['source']} "
        address = each["address"] or f"{each['tar']} sample {each['sample']}"
        line = f"rank {each['rank']} batch {each['batch']} row {each['row']} token {each['token']}"
        print_lines(f"{line}: {source}{address}{', ' if each['place'] else ''}{each['place']}")
    return 0


def _documents(loader: TokenLoader, world_size: int) -> Iterator[dict[str, Any]]:
    """Yield the documents of the next step, as the ranks had them. The loader reads whole global batches."""
    batch_size = loader.step_batches.batch_size
    of_rank = loader.run.tick_samples // world_size
    for number, batch in enumerate(loader):
        tick, first = divmod(number * batch_size, loader.run.tick_samples)
        for row, token, *numbers in batch["origins"].tolist():
            rank, place = divmod(first + row, of_rank)
            yield {
                "rank": rank,
                "batch": (tick * of_rank + place) // batch_size,
                "row": place % batch_size,
                "token": token,  # of the row, at which the document begins or goes on
                **asdict(loader.origin(*numbers)),
            }
        if loader.ends_step:
            return


def _named_sources(input_shards: list[str]) -> dict[str, Any]:
    """Return what a loader reads. NAME=PATH is a source of a mixture, PATH alone no mixture."""
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
        raise UsageError(found=f"{unnamed[0]} beside sources that are named", expected="NAME=PATH")
    return {"input_shards": named, "weights": dict.fromkeys(named, 1), "weights_in": "samples"}


def find_state(path: Path) -> dict[str, Any]:
    """Return the loader's state in a file, however deep it lies there. Raises NotFound or BrokenShard."""
    if not path.is_file():
        raise NotFound(f"--state {path} is no file", path=path)
    try:
        if path.suffix == ".json":
            content = load_json(path.read_bytes())
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch and pickle raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        found = f"--state that cannot be read: {reason}"
        raise BrokenShard(path=path, found=found, expected="what torch.save wrote, or .json") from None
    parts = [content]
    while parts:
        part = parts.pop(0)
        if isinstance(part, Mapping) and part.get("format") == STATE_FORMAT:
            return dict(part)
        if isinstance(part, (Mapping, list, tuple)):
            parts += part.values() if isinstance(part, Mapping) else part
    expected = "a checkpoint in which loader.state_dict() was saved"
    raise NotFound(path=path, found="no state of a loader", expected=expected)


def _loader_options(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a loader that reads whole global batches of a state's run. Raises BrokenShard."""
    try:
        of_run = state["fingerprint"]
        return {
            **{name: of_run[name] for name in ("seed", "shuffle", "group_by_length")},
            **{name: of_run[name] or None for name in ("seq_len", "max_length", "split")},
            "batch_size": state["layout"]["batch_size"],
            "global_batch_size": state["tick_samples"],
            "amend": len(state["stages"]) > 1 or of_run["is_mixture"],
            "origins": True,
            "rank": 0,
            "world_size": 1,
            "num_workers": 0,
            "pin_memory": False,
        }
    except (LookupError, TypeError):
        raise BrokenShard("the state is damaged: it lacks values; take another checkpoint") from None


# The steps that saw documents which are blanked by now.


def _print_steps(loader: TokenLoader, *, is_json: bool) -> int:
    """Print the steps before the loader's position that saw blanked documents, and return the exit code."""
    run, num_steps = loader.run, loader.progress.delivered.step
    found = sorted(_steps(run, num_steps).items())
    if loader.progress.num_left:
        say("note: the loop left epochs by set_epoch; all steps of these count as seen")
    steps = [{"step": step, "epoch": run.epoch_of(step), "sources": of} for step, of in found]
    if is_json:
        print_lines(json.dumps({"num_steps": num_steps, "steps": steps}))
        return 0
    sums = sum((of for _, of in found), Counter[str]())
    print_lines(f"{len(found):,} of {counted(num_steps, 'step')} saw blanked documents")
    print_lines(*(f"  {name}: {counted(count, 'sample')} with some" for name, count in sums.items()))
    for step, of in found:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(of.items()))
        print_lines(f"step {step}, epoch {run.epoch_of(step)}: {counts}")
    return 0


def _blanked_samples(shards: ShardSet) -> Int64s:
    """Return the stored samples that hold a part of a blanked document, ascending."""
    plans = {data.folder: need_plan(data.folder) for data in shards.datasets if data.has_blanks}
    made_again = {folder: {*ids_of_ranges(plan.options.blanked)} for folder, plan in plans.items()}
    found = [np.zeros(0, np.int64)]
    for number in range(shards.num_shards):
        data, row = shards.locate(number)
        shard_id = int(data.shard_ids[row])
        if shard_id not in made_again.get(data.folder, ()):
            continue
        records, num_tokens = [np.zeros(0, np.int64)], 0
        blanks = [BLANK, blank_id(data.spec.tokenizer.vocab_size)]  # of ids as JSON, and of binary ones
        with ShardSamples(data.folder, data.spec, shard_id) as shard:
            ends = np.cumsum(shard.records["num_tokens"])
            for ids in shard.pieces():
                places = num_tokens + np.flatnonzero(np.isin(ids, blanks))
                records.append(np.searchsorted(ends, places, side="right"))
                num_tokens += len(ids)
        first, end = shards.first_sample[number : number + 2].tolist()
        samples = np.unique(np.concatenate(records)) + first - shards.records_of(first, number)
        found.append(samples[(samples >= first) & (samples < end)])  # else of the other side of a split
    return np.concatenate(found)


class _MarkedSamples:
    """Samples whose chunks hold no ids, and as lengths ``mark`` for blanked documents, else 0."""

    row_tokens = 1

    def __init__(self, of: Samples, blanked: Int64s, mark: int) -> None:
        self._of, self._mark = of, mark
        self._begins, self._ends = blanked, blanked + 1
        self._width, self._size = 1, of.num_samples  # of a sample, and of all
        if isinstance(of, JoinedRows):
            # A document is a stretch of the stream of tokens that rows are cut from, which goes round.
            self._width, self._size = of.row_tokens, of.offsets
            stretches = np.zeros((2, len(blanked)), np.int64)  # where they begin, and end
            reader, shard_of = ShardReader(of.shards), of.shards.shard_of(blanked)
            for number in np.unique(shard_of).tolist():
                here = shard_of == number
                sums = of.first_token[number] + of.ends(reader, number)
                place = blanked[here] - of.shards.first_sample[number]
                stretches[:, here] = sums[place], sums[place + 1]
            reader.close()
            self._begins, self._ends = (np.concatenate([each, each + self._size]) for each in stretches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def read(self, reader: object, samples: Int64s, offset: int) -> Window:  # noqa: ARG002 - nothing is read
        first = (offset + samples * self._width) % self._size
        end = first + self._width
        if getattr(self._of, "keeps_tail", False):  # the last row is not full
            end = np.minimum(end, self._size)
        is_marked = np.searchsorted(self._ends, first, "right") < np.searchsorted(self._begins, end, "left")
        lengths = is_marked.astype(np.int32) * np.int32(self._mark)

        def chunk_of(first: int, end: int) -> Chunk:
            here = lengths[:, first:end]
            return Chunk(lengths=here, ids=Ragged.of_joined(np.zeros(0, np.int32), np.zeros_like(here)))

        return chunk_of


def _steps(run: Run, num_steps: int) -> dict[int, Counter[str]]:
    """Return the steps before ``num_steps`` that saw blanked documents: of each source, how many samples."""
    sources, num_blanked = [], 0
    for mark, source in enumerate(run.sources, 1):
        if source.samples is None:
            raise UsageError(found=f"no {source.name}, which the run had", expected=f"{source.name}=PATH")
        blanked = _blanked_samples(source.samples.shards)
        num_blanked += len(blanked)
        marked: Any = _MarkedSamples(source.samples, blanked, mark)
        sources.append(replace(source, samples=marked))
    if not num_blanked:
        raise NotFound(found="no blanked document in the data", expected="data sets that 'blank' made")
    reader = RunReader(replace(run, sources=tuple(sources)), range(run.order.num_slots))
    found: dict[int, Counter[str]] = defaultdict(Counter)

    def first_tick(step: int) -> int:
        return run.tick_of(Position(step))

    end_tick = first_tick(num_steps)
    progress = Progress("looking through the order", end_tick, unit="ticks")
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
