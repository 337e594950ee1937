"""``shardprep where``: which documents a step of a training run saw, and in which steps one was seen."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardprep.console import print_lines, say
from shardprep.errors import BrokenShard, NotFound, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from loader.seen_documents import DocumentPart, Sighting
    from loader.token_loader import TokenLoader

_MAX_FOUND = 20  # stored samples that --find takes
_READ_SAMPLES = 256  # at once, of a search for a text
_OF_LOADER = (
    "model_id", "batch_size", "global_batch_size", "world_size", "seed", "shuffle", "seq_len", "max_length",
    "long_documents", "group_by_length", "exclude_shards",
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Name the documents of a training step, with file and byte, given the loader's settings or the state "
        "that a checkpoint holds; or with --find the steps that see a document."
    )
    parser.add_argument("input_shards", nargs="+", help="as the loader was given")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--step", type=int, help="of training, from 0 (default: the last one of --state)")
    what.add_argument("--find", help="a text, or FILE:BYTE of an input: in which steps its document is seen")
    parser.add_argument("--state", type=Path, help="a checkpoint of torch.save, or JSON, that holds a state")
    parser.add_argument("--rank", type=int, help="only what this rank saw")
    parser.add_argument("--epochs", type=int, default=1, help="how many --find looks through (default 1)")
    parser.add_argument("--json", action="store_true", help="for programs")
    loader = parser.add_argument_group("the loader's settings, where no --state has them")
    loader.add_argument("--model_id", help="whose tokenizer made tars that shardprep did not write")
    for name in ("batch_size", "global_batch_size", "world_size", "seed", "seq_len", "max_length"):
        loader.add_argument(f"--{name}", type=int)
    loader.add_argument("--shuffle", action=argparse.BooleanOptionalAction)
    loader.add_argument("--long_documents", choices=("truncate", "split", "error"))
    loader.add_argument("--group_by_length", type=int, help="samples of a group")
    loader.add_argument("--exclude_shards", nargs="+", help="numbers or tars")


def where(args: argparse.Namespace) -> int:
    """``where DATA``: print what a step saw, or where a document is seen."""
    from loader.dataloader import get_llama3_dataloader
    from loader.seen_documents import SeenDocuments
    from loader.state import SkippedSteps

    state = None if args.state is None else find_state(args.state)
    if args.step is None and args.find is None and state is None:
        raise UsageError("nothing is asked: give --step, --find or --state")
    if args.epochs < 1 or (args.step is not None and args.step < 0):
        raise UsageError(f"--step {args.step} --epochs {args.epochs}: expected a step from 0, epochs from 1")
    with (
        _only_errors_logged(),
        get_llama3_dataloader(args.input_shards, **loader_options(vars(args), state)) as loader,
    ):
        skipped = SkippedSteps()
        if state is not None:
            loader.load_state_dict({**state, "num_micro": 0})
            skipped = SkippedSteps.of_text(state.get("skipped", ""))
        if args.rank is not None and not 0 <= args.rank < loader.process_rank.world_size:
            raise UsageError(
                f"--rank is {args.rank}, the ranks are 0 to {loader.process_rank.world_size - 1}"
            )
        with SeenDocuments(loader) as seen:
            if args.find is not None:
                stored = _stored(loader, seen, args.find)
                _tell_steps(args, loader, seen.steps_of(stored, range(args.epochs)), len(stored), skipped)
            else:
                step = args.step if args.step is not None else _last_step(state or {}, loader, skipped)
                _tell_documents(args, loader, seen, step, skipped.order_step(step))
    return 0


@contextlib.contextmanager
def _only_errors_logged() -> Iterator[None]:
    """Leave out what the loader says of itself: this one reads no sample."""
    logger = logging.getLogger("loader")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def find_state(path: Path) -> dict[str, Any]:
    """The loader's state in a file, however deep it lies there. Raises NotFound or BrokenShard."""
    import torch

    if not path.is_file():
        raise NotFound(f"--state {path} is no file")
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_bytes())
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch and pickle raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BrokenShard(
            f"--state {path} cannot be read: {reason}; expected torch.save's, or .json"
        ) from None
    state = next(_states_in(content), None)
    if state is None:
        raise NotFound(
            f"--state {path} holds no state of a loader; save loader.state_dict() with the checkpoint"
        )
    return dict(state)


def _states_in(content: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(content, Mapping):
        if content.get("format") == "shardprep-loader-state":
            yield content
        for value in content.values():
            yield from _states_in(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from _states_in(value)


def loader_options(given: Mapping[str, Any], state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of a loader as the run's was: the state's, and what the flags say. Raises UsageError."""
    options: dict[str, Any] = {"world_size": 1}
    if state is not None:
        of_run = state.get("fingerprint", {})
        names = ("seed", "shuffle", "global_batch_size", "group_by_length", "long_documents")
        options |= {name: of_run[name] for name in names if name in of_run}
        options |= {name: of_run.get(name) or None for name in ("seq_len", "max_length")}
        options |= dict(state.get("layout", {}))
    options |= {name: given[name] for name in _OF_LOADER if given.get(name) is not None}
    if "batch_size" not in options:
        if "global_batch_size" not in options:
            raise UsageError("the run's --global_batch_size is needed, or its --batch_size and --world_size")
        options["batch_size"] = max(1, options["global_batch_size"] // options["world_size"])
    return {**options, "rank": 0, "num_workers": 0, "pin_memory": False}


def _last_step(state: Mapping[str, Any], loader: TokenLoader, skipped: Any) -> int:
    """The last step that was trained when a state was saved, from 0."""
    at = state["epoch"] * loader.order.steps_per_epoch + state["step"]
    trained = at - sum(min(end, at) - first for first, end in skipped.ranges if first < at)
    return max(0, int(trained) - 1)


def _tell_documents(
    args: argparse.Namespace, loader: TokenLoader, seen: Any, step: int, order_step: int
) -> None:
    epoch, in_epoch = divmod(order_step, loader.order.steps_per_epoch)
    samples = [each for each in seen.of_step(order_step) if args.rank in (None, each.rank)]
    if args.json:
        answer = {"step": step, "epoch": epoch, "step_of_epoch": in_epoch}
        parts = [dataclasses.asdict(each) for each in samples]
        print_lines(json.dumps({**answer, "samples": parts}, default=str))
        return
    of_epoch = f"step {in_epoch} of {loader.order.steps_per_epoch}"
    print_lines(f"step {step}: epoch {epoch}, {of_epoch}, {len(samples)} samples")
    for each in samples:
        for part in each.parts:
            print_lines(f"rank {each.rank} batch {each.batch} row {each.row}: {_part_text(part)}")


def _part_text(part: DocumentPart) -> str:
    tokens = f"tokens {part.first_token} to {part.first_token + part.num_tokens}"
    if part.is_row:
        begin = f"{part.num_documents} documents begin in it, its first token is of the one at {part.place}"
        return f"{part.tar.name} row {part.number}, {tokens}: {begin}"
    return f"{part.place}, {tokens} ({part.tar.name} document {part.number})"


def _stored(loader: TokenLoader, seen: Any, text: str) -> npt.NDArray[np.int64]:
    """The stored samples that --find names. Raises NotFound."""
    name, colon, offset = text.rpartition(":")
    if colon and offset.isdigit() and name:
        stored = seen.stored_at(name, int(offset))
    else:
        stored = _with_text(loader, text)
    if not len(stored):
        raise NotFound(f"--find {text!r}: no document has it")
    return stored


def _with_text(loader: TokenLoader, text: str) -> npt.NDArray[np.int64]:
    """The first stored samples whose decoded ids hold a text; reads the whole data set until then."""
    import numpy as np

    from loader.samples.whole_samples import WholeSamples

    shards = loader.chunks.samples.shards  # type: ignore[attr-defined]  # not of a mixture: SeenDocuments refused it
    reader, found = WholeSamples(shards=shards).open(), []
    for first in range(0, shards.num_samples, _READ_SAMPLES):
        numbers = np.arange(first, min(first + _READ_SAMPLES, shards.num_samples))
        chunk = reader.read(numbers[None], 0).chunk(0, len(numbers))
        ends = np.cumsum(chunk.lengths[0])
        for place, number in enumerate(numbers.tolist()):
            end, length = int(ends[place]), int(chunk.lengths[0, place])
            is_flat = isinstance(chunk.ids, np.ndarray)
            ids: Any = chunk.ids[end - length : end] if is_flat else chunk.ids[0, place][:length]
            if text in loader.tokenizer.decode(ids):
                found.append(number)
        if len(found) >= _MAX_FOUND:
            say(f"note: the first {_MAX_FOUND} samples with this text are taken")
            break
    reader.close()
    return np.array(found[:_MAX_FOUND], np.int64)


def _tell_steps(
    args: argparse.Namespace, loader: TokenLoader, sightings: list[Sighting], num_stored: int, skipped: Any
) -> None:
    shown = [each for each in sightings if args.rank in (None, each.rank)]
    lines = [{**dataclasses.asdict(each), "step": _trained(each.order_step, skipped)} for each in shown]
    if args.json:
        print_lines(json.dumps({"num_samples": num_stored, "epochs": args.epochs, "seen": lines}))
        return
    print_lines(f"{num_stored} stored samples, seen {len(lines)} times in {args.epochs} epochs:")
    for line in lines:
        epoch, step = divmod(int(line["order_step"] or 0), loader.order.steps_per_epoch)
        trained = "left out by skip" if line["step"] is None else f"step {line['step']}"
        place = f"rank {line['rank']} batch {line['batch']} row {line['row']}"
        print_lines(f"{trained} (epoch {epoch}, step {step}): {place}")


def _trained(order_step: int, skipped: Any) -> int | None:
    """The step of training that a step of the order is; None where it was skipped."""
    if any(first <= order_step < end for first, end in skipped.ranges):
        return None
    return order_step - sum(end - first for first, end in skipped.ranges if end <= order_step)
