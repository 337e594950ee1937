"""``forecast``: what a run will read and deliver, before it is started."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from loader.batch.reads_forecast import ReadsForecast, reads_of, staged_bytes
from loader.dataloader import get_llama3_dataloader
from loader.order.forecast import RunForecast
from loader.order.state import read_state
from loader.token_loader import TokenLoader
from loader.train.forecast_options import ForecastOptions, refuse_without_effect
from loader.train.forecast_picture import PICTURE_BEGINS, picture
from loader.train.proxy import Proxy, proxy_of
from loader.train.where import find_state, named_sources, options_of_state, refuse_missing_sources
from shardprep.console import counted, in_columns, print_exactly, print_lines, short_bytes, short_number
from shardprep.errors import NotFound, UsageError
from shardprep.format.json_files import load_json
from shardprep.option_flags import add_flags_of, given_of
from shardprep.output_folder import claim_file
from shardprep.publishing import publish_bytes

_MINUTE_S = 60


@dataclass(frozen=True, kw_only=True)
class Forecast(RunForecast):
    """What a run delivers and reads. ``--json`` prints its fields."""

    run_bytes: int  # of tars, that all nodes read until the end
    staged_bytes: int  # of a copy by ``stage``
    fits_disk: bool | None  # whether that copy fits --disk; None: not asked
    reads: list[ReadsForecast]  # of the first and the last node
    proxy: Proxy | None  # the arguments of this run, if they were found for --like


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print what a run delivers until a step: samples, epochs and repetitions of each source; and what "
        "ranks read in the first steps. Counts are exact; tokens of documents that are not packed are means. "
        "Flags are named as the loader's arguments."
    )
    text = "the run's input_shards; in a mixture NAME=PATH, once for each folder of a source"
    parser.add_argument("input_shards", metavar="DATA", nargs="+", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    add_flags_of(parser, ForecastOptions)


def forecast(args: argparse.Namespace) -> int:
    """Print a forecast. Returns the exit code."""
    given = given_of(args, ForecastOptions)
    refuse_without_effect(given)
    options = ForecastOptions(**given)
    if options.picture is not None:
        claim_file(options.picture, PICTURE_BEGINS)
    large = None if options.like is None else _read_forecast(options.like)
    found = _forecast_of(options, large)
    if options.picture is not None:
        publish_bytes(options.picture, picture(found).encode("utf-8", "replace"))
    if args.json:
        print_exactly(json.dumps(asdict(found)))
        return 0
    if found.proxy is not None and large is not None:
        print_lines(*_proxy_lines(found, found.proxy, large), "")
    print_lines(*_source_lines(found), "", *_stage_lines(found), "", *_read_lines(found))
    return 0


def _read_forecast(path: Path) -> RunForecast:
    """Return what ``forecast --json`` wrote into a file. Raises NotFound or UsageError."""
    if not path.is_file():
        raise NotFound(f"--like {path} is not a file", path=path)
    try:
        return msgspec.convert(load_json(path.read_bytes()), RunForecast)
    except (OSError, ValueError) as error:
        expected = "a file of 'shardprep forecast ... --json'"
        raise UsageError(path=path, found=f"no forecast ({error})", expected=expected) from None


def _forecast_of(options: ForecastOptions, large: RunForecast | None) -> Forecast:
    """Return the forecast of a run that flags or a checkpoint describe, or of a small one like ``large``."""
    arguments: dict[str, Any] = named_sources([*options.input_shards])
    arguments |= {"model_id": options.model_id, "rank": 0, "num_workers": 0, "pin_memory": False}
    num_steps = options.num_steps
    state = None
    proxy = None
    if options.state is None:
        arguments |= options.of_run()
    else:
        state = find_state(options.state)
        arguments |= _arguments_of_state(state, options.world_size)
    if large is not None:
        # The sizes of shards, for which all data is opened, decide which of them the small run has.
        step_samples = arguments.get("global_batch_size")
        with get_llama3_dataloader(**arguments) as loader:
            proxy = proxy_of(large, loader.samples, scale=options.scale, step_samples=step_samples)
        num_steps = proxy.num_steps
        arguments |= proxy.arguments(is_mixture="weights" in arguments)
    with get_llama3_dataloader(**arguments) as loader:
        if state is not None:
            loader.load_run(state)
            refuse_missing_sources(loader.run, loader.samples)
        run = loader.forecast(num_steps)
        run_bytes = 0
        for source in run.sources:
            samples = loader.samples[source.name]
            run_bytes += source.num_delivered * samples.shards.tar_bytes // samples.num_samples
        num_bytes = staged_bytes(loader.samples)
        reads = _node_reads(loader, options)
    return Forecast(
        **vars(run),
        run_bytes=run_bytes,
        staged_bytes=num_bytes,
        fits_disk=None if options.disk_bytes is None else num_bytes <= options.disk_bytes,
        reads=reads,
        proxy=proxy,
    )


def _arguments_of_state(state: dict[str, Any], world_size: int | None) -> dict[str, Any]:
    """Return the arguments of a loader of a checkpoint's run, on as many ranks as it had or as are given."""
    saved = read_state(state)
    if world_size is None:
        world_size = saved.layout["world_size"]
    if saved.tick_samples % world_size:
        expected = f"a divisor of {saved.tick_samples}, the samples that the run's order takes at a time"
        raise UsageError.of_value("--world_size", world_size, expected)
    return {**options_of_state(state), "batch_size": 1, "world_size": world_size}


def _node_reads(loader: TokenLoader, options: ForecastOptions) -> list[ReadsForecast]:
    """Return what the first and the last node read in the first minute."""
    world_size = loader.process_rank.world_size
    first_ranks = range(0, world_size, options.ranks_per_node)
    reads = []
    for first in sorted({first_ranks[0], first_ranks[-1]}):
        node = reads_of(
            loader.run,
            loader.samples,
            ranks=range(world_size)[first : first + options.ranks_per_node],
            world_size=world_size,
            num_workers=options.num_workers,
            num_steps=math.ceil(_MINUTE_S / options.step_s),
        )
        reads.append(node)
    return reads


# The table, in 80 columns.


def _proxy_lines(found: Forecast, proxy: Proxy, large: RunForecast) -> Iterator[str]:
    yield f"a proxy of {counted(found.num_steps, 'step')} with the epochs of --like:"
    epochs = {source.name: source.epochs for source in large.sources}
    for source in found.sources:
        yield f"  {source.name}: {source.epochs:.3f} epochs, in --like {epochs[source.name]:.3f}"
        for path in proxy.input_shards[source.name]:
            yield f"    {path}"


def _source_lines(found: Forecast) -> Iterator[str]:
    num_samples = sum(source.num_delivered for source in found.sources)
    num_tokens = sum(source.num_tokens for source in found.sources)
    amounts = f"{counted(num_samples, 'sample')}, {short_number(num_tokens)} tokens"
    yield f"{counted(found.num_steps, 'step')}: {amounts}"
    yield ""
    yield f"{'source':20} {'samples':>14} {'tokens':>8} {'epochs':>9} {'second epoch':>15}"
    for source in found.sources:
        step = "-" if source.second_epoch_step is None else f"step {source.second_epoch_step:,}"
        tokens = short_number(source.num_tokens)
        counts = f"{source.num_delivered:>14,} {tokens:>8} {source.epochs:>9.3f} {step:>15}"
        yield f"{in_columns(source.name, 20)} {counts}"
        seen = [f"{count:,} {times}x" for times, count in enumerate(source.times_seen) if count]
        yield f"  of {source.num_samples:,} seen: {', '.join(seen)}"


def _stage_lines(found: Forecast) -> Iterator[str]:
    for stage in found.stages:
        yield f"{stage.text}; {short_number(stage.num_tokens)} tokens before it"
        if len(stage.given) > 1:
            for name, share in stage.given.items():
                yield f"  {name}: asked {stage.asked[name]:.4%}, given {share:.4%}"


def _read_lines(found: Forecast) -> Iterator[str]:
    def line(name: str, cells: Iterable[str]) -> str:
        return f"{name:40}" + "".join(f"{cell:>20}" for cell in cells)

    nodes = found.reads
    first = nodes[0]
    workers = f"{counted(first.num_workers, 'worker')} a rank"
    yield f"a node with {workers}, in the first {counted(first.num_steps, 'step')}:"
    ranks = [f"{node.first_rank} to {node.first_rank + node.num_ranks - 1}" for node in nodes]
    yield line("  ranks", ranks)
    yield line("  shards opened", (f"{node.num_opened:,}" for node in nodes))
    yield line("  shards opened in a step, at most", (f"{node.most_opened:,}" for node in nodes))
    yield line("  files open after these steps", (f"{node.num_files:,}" for node in nodes))
    yield line("  bytes read a step", (short_bytes(node.step_bytes) for node in nodes))
    yield line("  memory of windows", (short_bytes(node.window_bytes) for node in nodes))
    yield line("  memory of idx", (short_bytes(node.idx_bytes) for node in nodes))
    yield f"all nodes, in the whole run: {short_bytes(found.run_bytes)} read"
    fits = ""
    if found.fits_disk is not None:
        fits = ", which fits --disk" if found.fits_disk else ", which does not fit --disk"
    yield f"a copy by 'stage': {short_bytes(found.staged_bytes)} on each node{fits}"
