"""``forecast``: what a run will read and deliver, before it is started."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loader.batch.reads_forecast import ReadsForecast, reads_of, staged_bytes
from loader.dataloader import get_llama3_dataloader
from loader.order.forecast import RunForecast
from loader.token_loader import TokenLoader
from loader.train.forecast_picture import PICTURE_BEGINS, picture
from loader.train.proxy import Proxy, proxy_of
from loader.train.where import find_state, named_sources, options_of_state
from shardprep.console import counted, print_lines, short_bytes
from shardprep.errors import NotFound, UsageError
from shardprep.format.json_files import load_json
from shardprep.option_flags import parse_size
from shardprep.output_folder import claim_file
from shardprep.publishing import publish_bytes

_FOLLOWED_NODES = 2
_MINUTE_S = 60


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print what a run delivers until a step: samples, epochs and repetitions of each source; and what "
        "ranks read in the first steps. Counts are exact; tokens of documents that are not packed are means. "
        "Flags are named as the loader's arguments."
    )
    text = "the run's input_shards; in a mixture NAME=PATH, once for each folder of a source"
    parser.add_argument("input_shards", metavar="DATA", nargs="+", help=text)
    parser.add_argument("--num_steps", type=int, help="training steps, from 0 (default: those of --like)")
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
    text = "ranks of a node (default: 8)"
    parser.add_argument("--ranks_per_node", type=int, default=8, help=text)
    text = "seconds of a step; a node's reads are those of the first minute (default: 1)"
    parser.add_argument("--step_s", type=float, default=1.0, help=text)
    text = "say whether a copy by stage fits a disk of this size, such as 2T (default: not)"
    parser.add_argument("--disk", metavar="SIZE", help=text)
    text = "find shards and steps with the same epochs as RUN: a file of forecast --json (default: none)"
    parser.add_argument("--like", type=Path, metavar="RUN", help=text)
    text = "size of the small run, relative to RUN (default: 0.1)"
    parser.add_argument("--scale", type=float, default=0.1, help=text)
    text = "draw the epochs of sources over steps as an SVG (default: no picture)"
    parser.add_argument("--picture", type=Path, metavar="FILE", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None


def forecast(args: argparse.Namespace) -> int:
    """Print a forecast. Returns the exit code."""
    for name in ("num_workers", "ranks_per_node", "world_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError.of_value(f"--{name}", value, "at least 1")
    if not 0 < args.step_s < math.inf:
        raise UsageError.of_value("--step_s", args.step_s, "seconds above 0")
    disk_bytes = None if args.disk is None else parse_size(args.disk, "--disk", such_as="960G or 2T")
    if args.picture is not None:
        claim_file(args.picture, PICTURE_BEGINS)
    state = None if args.state is None else find_state(args.state)
    world_size = args.world_size or 1
    proxy = None
    large = None
    num_steps = args.num_steps
    if args.like is not None:
        large = _large_run(args)
        proxy = _proxy(args, large)
        num_steps = proxy.num_steps
        options = _proxy_options(args, proxy, world_size)
    elif state is not None:
        options = {**named_sources(args.input_shards), **options_of_state(state), "model_id": args.model_id}
        world_size = args.world_size or int(state["layout"]["world_size"])
    else:
        options = _options_of(args, world_size)
    if num_steps is None or num_steps < 1:
        raise UsageError.of_value("--num_steps", num_steps, "at least 1")
    with get_llama3_dataloader(**options) as loader:
        if state is not None:
            loader.load_run(state)
        run = loader.forecast(num_steps)
        reads = _node_reads(args, loader, world_size)
        num_bytes = staged_bytes(loader.samples)
        run_bytes = 0
        for source in run.sources:
            samples = loader.samples[source.name]
            run_bytes += source.num_delivered * samples.shards.tar_bytes // samples.num_samples
        if args.picture is not None:
            publish_bytes(args.picture, picture(run).encode("utf-8", "replace"))
    if args.json:
        answer = {**asdict(run), "run_bytes": run_bytes, "staged_bytes": num_bytes}
        answer["reads"] = [asdict(each) for each in reads]
        if disk_bytes is not None:
            answer["fits_disk"] = num_bytes <= disk_bytes
        if proxy is not None:
            answer["proxy"] = asdict(proxy)
        print_lines(json.dumps(answer))
        return 0
    if proxy is not None and large is not None:
        print_lines(*_proxy_lines(proxy, run, large))
    print_lines(*_table(run), *_reads(reads, run_bytes, num_bytes, disk_bytes))
    return 0


def _node_reads(args: argparse.Namespace, loader: TokenLoader, world_size: int) -> list[ReadsForecast]:
    """Return what the first and the last node read in the first minute."""
    num_steps = math.ceil(_MINUTE_S / args.step_s)
    num_nodes = -(-world_size // args.ranks_per_node)
    reads = []
    for node in sorted({*np.linspace(0, num_nodes - 1, _FOLLOWED_NODES).astype(int).tolist()}):
        first = node * args.ranks_per_node
        ranks = range(first, min(first + args.ranks_per_node, world_size))
        sizes = {"world_size": world_size, "num_workers": args.num_workers, "num_steps": num_steps}
        reads.append(reads_of(loader.run, loader.samples, ranks=ranks, **sizes))
    return reads


def _large_run(args: argparse.Namespace) -> RunForecast:
    """Return what ``forecast --json`` wrote into the file of --like. Raises UsageError or NotFound."""
    for name in ("state", "num_steps", "weights"):
        if getattr(args, name) is not None:
            raise UsageError(found=f"--{name} with --like", expected="no such flag: RUN has it")
    if not 0 < args.scale <= 1:
        raise UsageError.of_value("--scale", args.scale, "a number above 0, at most 1")
    if not args.like.is_file():
        raise NotFound(f"--like {args.like} is not a file", path=args.like)
    try:
        return msgspec.convert(load_json(args.like.read_bytes()), RunForecast)
    except (OSError, ValueError) as error:
        expected = "a file of 'shardprep forecast ... --json'"
        raise UsageError(path=args.like, found=f"no forecast ({error})", expected=expected) from None


def _proxy(args: argparse.Namespace, large: RunForecast) -> Proxy:
    """Return the proxy of a run. Opens the data once, as the shards' sizes decide which are taken."""
    given = args.global_batch_size
    if given is not None and not isinstance(given, int):
        raise UsageError.of_value("--global_batch_size", given, "one number with --like")
    names = ("seq_len", "max_length", "model_id")
    options = {**named_sources(args.input_shards), **{name: getattr(args, name) for name in names}}
    options |= {"batch_size": 1, "rank": 0, "world_size": 1, "num_workers": 0, "pin_memory": False}
    with get_llama3_dataloader(**options) as loader:
        return proxy_of(large, loader.samples, scale=args.scale, step_samples=given)


def _proxy_options(args: argparse.Namespace, proxy: Proxy, world_size: int) -> dict[str, Any]:
    """Return the arguments of the proxy's loader."""
    sizes = [list(pair) for pair in proxy.global_batch_size]
    args.global_batch_size = sizes if len({size for _, size in sizes}) > 1 else sizes[0][1]
    options = _options_of(args, world_size)
    if len(proxy.input_shards) == 1 and "weights" not in options:
        (options["input_shards"],) = proxy.input_shards.values()
        return options
    return options | {"input_shards": proxy.input_shards, "weights": proxy.weights, "weights_in": "samples"}


def _proxy_lines(proxy: Proxy, run: RunForecast, large: RunForecast) -> list[str]:
    lines = [f"a proxy of {counted(proxy.num_steps, 'step')} with the epochs of --like:"]
    epochs = {each.name: each.epochs for each in large.sources}
    for source in run.sources:
        lines.append(f"  {source.name}: {source.epochs:.3f} epochs, in --like {epochs[source.name]:.3f}")
        lines += [f"    {path}" for path in proxy.input_shards[source.name]]
    return [*lines, ""]


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


def _reads(reads: list[ReadsForecast], run_bytes: int, num_bytes: int, disk_bytes: int | None) -> list[str]:
    first = reads[0]
    most: dict[str, Any] = {}
    for each in reads:
        for name, value in asdict(each).items():
            most[name] = max(value, most.get(name, 0))
    nodes = " and ".join(f"{each.first_rank} to {each.first_rank + each.num_ranks - 1}" for each in reads)
    of_node = f"{counted(first.num_ranks, 'rank')} with {counted(first.num_workers, 'worker')} each"
    step_bytes = short_bytes(int(most["step_bytes"]))
    windows = short_bytes(most["window_bytes"])
    lines = [
        "",
        f"a node of {of_node} (the most of ranks {nodes}),",
        f"in the first {counted(first.num_steps, 'step')}:",
        f"  shards opened: {most['num_opened']:,}, at most {most['most_opened']:,} in a step",
        f"  files open after them: {most['num_files']:,}",
        f"  bytes read: {step_bytes} a step",
        f"  memory: windows {windows}, idx {short_bytes(most['idx_bytes'])}",
        f"all nodes, in the whole run: {short_bytes(run_bytes)} read",
        f"a copy by 'stage': {short_bytes(num_bytes)} on each node",
    ]
    if disk_bytes is not None:
        fits = "fits" if num_bytes <= disk_bytes else "does not fit"
        lines[-1] += f", which {fits} {short_bytes(disk_bytes)}"
    return lines
