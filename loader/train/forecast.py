"""``forecast``: what a run will read and deliver, before it is started."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from loader.batch.reads_forecast import ReadsForecast, reads_of
from loader.dataloader import get_llama3_dataloader
from loader.order.forecast import RunForecast
from loader.train.where import find_state, named_sources, options_of_state
from shardprep.console import counted, print_lines, short_bytes
from shardprep.errors import UsageError

_FOLLOWED_RANKS = 4


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print what a run delivers until a step: samples, epochs and repetitions of each source; and what "
        "ranks read in the first steps. Counts are exact; tokens of documents that are not packed are means. "
        "Flags are named as the loader's arguments."
    )
    text = "the run's input_shards; in a mixture NAME=PATH, once for each folder of a source"
    parser.add_argument("input_shards", metavar="DATA", nargs="+", help=text)
    parser.add_argument("--num_steps", type=int, required=True, help="training steps, from 0")
    text = "checkpoint whose run is meant (default: the run of the other flags)"
    parser.add_argument("--state", type=Path, help=text)
    text = 'as JSON: {"web": 0.7, "code": 0.3}, or by step (default: one source without a name)'
    parser.add_argument("--weights", type=_json, help=text)
    text = "unit of the weights (default: tokens)"
    parser.add_argument("--weights_in", choices=("tokens", "samples"), default="tokens", help=text)
    text = "samples of a step, or as JSON [[0, 256], [1000, 512]] (default: batch_size x world_size)"
    parser.add_argument("--global_batch_size", type=_json, help=text)
    text = "samples of a rank's batch (default: global_batch_size / world_size)"
    parser.add_argument("--batch_size", type=int, help=text)
    for name in ("seq_len", "max_length", "group_by_length"):
        parser.add_argument(f"--{name}", type=int, help="as of the loader (default: none)")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle (default: 0)")
    text = "model whose tokenizer made tars of other tools (default: the data set's own tokenizer)"
    parser.add_argument("--model_id", help=text)
    parser.add_argument("--world_size", type=int, help="data-parallel ranks (default: the state's, else 1)")
    parser.add_argument("--num_workers", type=int, default=4, help="of a rank (default: 4)")
    text = "steps that are followed for what a rank reads (default: 100)"
    parser.add_argument("--first_steps", type=int, default=100, help=text)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None


def forecast(args: argparse.Namespace) -> int:
    """Print a forecast. Returns the exit code."""
    for name in ("num_steps", "first_steps", "num_workers"):
        if getattr(args, name) < 1:
            raise UsageError.of_value(f"--{name}", getattr(args, name), "at least 1")
    state = None if args.state is None else find_state(args.state)
    world_size = args.world_size or 1
    if state is not None:
        options = {**named_sources(args.input_shards), **options_of_state(state), "model_id": args.model_id}
        world_size = args.world_size or int(state["layout"]["world_size"])
    else:
        options = _options_of(args, world_size)
    with get_llama3_dataloader(**options) as loader:
        if state is not None:
            loader.load_run(state)
        run = loader.forecast(args.num_steps)
        ranks = sorted({*np.linspace(0, world_size - 1, _FOLLOWED_RANKS).astype(int).tolist()})
        sizes = {"world_size": world_size, "num_workers": args.num_workers, "num_steps": args.first_steps}
        reads = [reads_of(loader.run, loader.samples, rank=rank, **sizes) for rank in ranks]
        tar_bytes = sum(samples.shards.tar_bytes for samples in loader.samples.values())
    if args.json:
        answer = {**asdict(run), "tar_bytes": tar_bytes, "reads": [asdict(each) for each in reads]}
        print_lines(json.dumps(answer))
        return 0
    print_lines(*_table(run), *_reads(reads, tar_bytes))
    return 0


def _options_of(args: argparse.Namespace, world_size: int) -> dict[str, Any]:
    """Return the arguments of a loader of rank 0, which reads nothing but what counts need."""
    names = ("global_batch_size", "seq_len", "max_length", "seed", "model_id")
    options = {**named_sources(args.input_shards), **{name: getattr(args, name) for name in names}}
    if args.weights is not None:
        options |= {"weights": args.weights, "weights_in": args.weights_in}
    first = args.global_batch_size
    if isinstance(first, list) and first and isinstance(first[0], list):
        first = first[0][-1]
    if not isinstance(first, int):  # none; the loader refuses a wrong one
        first = world_size
    options["batch_size"] = args.batch_size or max(first // world_size, 1)
    options["group_by_length"] = args.group_by_length or False
    return options | {"rank": 0, "world_size": world_size, "num_workers": 0, "pin_memory": False}


def _table(run: RunForecast) -> list[str]:
    num_samples = sum(source.num_delivered for source in run.sources)
    num_tokens = sum(source.num_tokens for source in run.sources)
    end = f"{counted(num_samples, 'sample')}, {num_tokens:.4g} tokens"
    lines = [f"{counted(run.num_steps, 'step')}: {end}", ""]
    lines.append(f"{'source':20} {'samples':>17} {'tokens':>10} {'epochs':>9} {'second epoch':>18}")
    for source in run.sources:
        second = source.second_epoch_step
        step = "-" if second is None else f"step {second:,}"
        counts = f"{source.num_delivered:>17,} {source.num_tokens:>10.4g} {source.epochs:>9.3f} {step:>18}"
        lines.append(f"{source.name:20.20} {counts}")
        seen = [f"{count:,} {times}x" for times, count in enumerate(source.times_seen) if count]
        lines.append(f"  of {source.num_samples:,} seen: {', '.join(seen)}")
    lines.append("")
    for stage in run.stages:
        lines.append(f"{stage.text}; {stage.num_tokens:.4g} tokens before it")
        shares = {name: share for name, share in stage.given.items() if share or stage.asked[name]}
        if len(shares) > 1:
            lines += [f"  {name}: asked {stage.asked[name]:.4%}, given {shares[name]:.4%}" for name in shares]
    return lines


def _reads(reads: list[ReadsForecast], tar_bytes: int) -> list[str]:
    first = reads[0]
    names = ", ".join(str(each.rank) for each in reads)
    most = {
        name: max(getattr(each, name) for each in reads)
        for name in ("num_opened", "most_opened", "num_held", "step_bytes", "window_bytes")
    }
    workers = counted(first.num_workers, "worker")
    opened = f"{most['num_opened']:,}, at most {most['most_opened']:,} in a step"
    step_bytes = short_bytes(int(most["step_bytes"]))
    return [
        "",
        f"a rank of {workers} (the most of {names}), in the first {counted(first.num_steps, 'step')}",
        f"  shards opened: {opened}; {most['num_held']:,} stay open",
        f"  bytes read: {step_bytes} a step; windows in memory: {short_bytes(most['window_bytes'])}",
        f"all tars: {short_bytes(tar_bytes)}, which a disk for 'stage' must hold",
    ]
