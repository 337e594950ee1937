"""``where``: which documents a training step saw, or which steps saw blanked ones, by a checkpoint's state.

A loader is made as the run's was, with ``origins``; ``state_at`` puts it to the step, whose samples it reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from loader.blanked_steps import print_steps
from loader.dataloader import get_llama3_dataloader
from loader.state import STATE_FORMAT
from loader.token_loader import TokenLoader
from shardprep.console import print_lines
from shardprep.errors import BrokenShard, NotFound, UsageError
from shardprep.format.names import load_json


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
    text = "training step, from 0 (default: the last one of --state)"
    asked.add_argument("--step", type=int, help=text)
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
            return print_steps(loader, is_json=args.json)
        end = loader.progress.delivered.step
        step = max(end - 1, 0) if args.step is None else args.step
        if step < 0:
            raise UsageError.of_value("--step", step, "a step from 0")
        if options["amend"] and step >= end:
            raise UsageError(
                found=f"step {step}, behind the state, which is of step {end}",
                expected="a later checkpoint: what comes then is up to the run's weights and sizes",
            )
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
        line += f": {source}{address}"
        print_lines(f"{line}, {each['place']}" if each["place"] else line)
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
                **dataclasses.asdict(loader.origin(*numbers)),
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
        raise BrokenShard(
            f"--state {path} cannot be read: {reason}; expected torch.save's, or .json", path=path
        ) from None
    for state in _states_in(content):
        return dict(state)
    raise NotFound(
        f"--state {path} holds no state of a loader; save loader.state_dict() with the checkpoint", path=path
    )


def _states_in(content: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(content, Mapping) and content.get("format") == STATE_FORMAT:
        yield content
    parts = content.values() if isinstance(content, Mapping) else content
    for part in parts if isinstance(content, (Mapping, list, tuple)) else ():
        yield from _states_in(part)


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
