"""``python -m loader stage DATA --to DIR``: copies of the shards on this node's own disk."""

from __future__ import annotations

import argparse
import os
import socket
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loader.reading.open_shard import Turn
from loader.staging.shards_to_stage import NodeRanks, ShardsToStage, choose_shards
from loader.staging.stage_shards import Staged, size_text, stage_shards
from shardprep.command_line import parse_size
from shardprep.console import Progress, print_lines, raise_on_stop_signals
from shardprep.errors import ReadWriteError, UsageError
from shardprep.format.names import ids_of_ranges

_NUM_PLACES = 1 << 16  # in the list, for processes that Slurm did not number


def stage(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code, 0 where every shard chosen is staged.

    Raises ShardprepErrors, and Stopped on TERM, USR1 and INT, which leaves no temporary file.
    """
    raise_on_stop_signals("what is staged is whole")
    node_ranks = _node_ranks(args, os.environ)
    try:
        chosen = choose_shards(
            tuple(args.input_shards),
            args.to,
            exclude_shards=tuple(int(name) if name.isdecimal() else name for name in args.exclude_shards),
            node_ranks=node_ranks,
            limit_bytes=_limit_bytes(args),
            turn=turn_of(os.environ),
        )
    except OSError as error:
        raise ReadWriteError(f"{' '.join(args.input_shards)} cannot be looked at: {error}") from None
    print_lines(*_choice_lines(chosen, node_ranks))
    with Progress("staging", sum(shard.num_bytes for shard in chosen.chosen)) as progress:
        try:
            staged = stage_shards(
                chosen.chosen, Path(args.to), recheck=args.recheck, progress=progress.add, say=progress.say
            )
        except OSError as error:  # of looking around in it; copying has its own
            raise ReadWriteError(f"{args.to} cannot be staged to: {error}") from None
    print_lines(_end_line(staged, len(chosen.chosen), args.to))
    return staged.failures[0].exit_code if staged.failures else 0


def turn_of(environ: Mapping[str, str]) -> Turn:
    """Where in the list this process begins.

    Of Slurm's tasks: those of a node far apart, those of other nodes between them. Else by host and pid.
    """
    local, node = environ.get("SLURM_LOCALID", ""), environ.get("SLURM_NODEID", "")
    if not (local.isdecimal() and node.isdecimal()):
        place = zlib.crc32(f"{socket.gethostname()}:{os.getpid()}".encode()) % _NUM_PLACES
        return Turn(number=place, count=_NUM_PLACES)
    num_nodes = _count(environ, "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", at_least=int(node) + 1)
    num_tasks = _count(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", at_least=1)
    num_local = max(-(-num_tasks // num_nodes), int(local) + 1)
    return Turn(number=int(local) * num_nodes + int(node), count=num_local * num_nodes)


def _count(environ: Mapping[str, str], *names: str, at_least: int) -> int:
    found = next((environ[name] for name in names if environ.get(name, "").isdecimal()), "1")
    return max(int(found), at_least)


def _node_ranks(args: argparse.Namespace, environ: Mapping[str, str]) -> NodeRanks | None:
    """The ranks of this node, where a world is given, with all that fixes their order."""
    given = {name: getattr(args, name) for name in _ORDER_FLAGS if hasattr(args, name)}
    if args.world_size is None:
        if given or args.ranks or args.ranks_per_node is not None:
            flags = ", ".join(f"--{name}" for name in (*given, *(["ranks"] if args.ranks else [])))
            raise UsageError(f"{flags or '--ranks_per_node'} choose shards for ranks; add --world_size")
        return None
    if bool(args.ranks) == (args.ranks_per_node is not None):
        raise UsageError(
            "--world_size needs either --ranks or --ranks_per_node, to know which are this node's"
        )
    if "batch_size" not in given:
        raise UsageError(
            "--world_size needs --batch_size: it fixes which rank reads what, as does all below it"
        )
    if args.ranks:
        ranks = _parse_ranks(args.ranks)
    else:
        node = environ.get("SLURM_NODEID", "")
        if not node.isdecimal():
            raise UsageError("--ranks_per_node needs SLURM_NODEID: start this with srun, or pass --ranks")
        first = int(node) * args.ranks_per_node
        ranks = tuple(range(first, first + args.ranks_per_node))
    return NodeRanks(world_size=args.world_size, ranks=ranks, **given)


def _parse_ranks(text: str) -> tuple[int, ...]:
    """``8-15,20`` -> numbers."""
    try:
        return tuple(ids_of_ranges(text))
    except ValueError:
        raise UsageError(f"--ranks is {text!r}, expected numbers such as 8-15 or 0,4") from None


def _limit_bytes(args: argparse.Namespace) -> int | None:
    if args.limit_bytes is None:
        return None
    return parse_size(args.limit_bytes, "--limit_bytes", such_as="800M or 500G")


def _choice_lines(choice: ShardsToStage, node: NodeRanks | None) -> list[str]:
    """What was chosen, and why."""
    lines = []
    if node is not None:
        last = "" if node.num_steps is None else f", {node.num_steps} steps"
        epochs = f", {node.num_epochs} epoch(s)" if node.num_steps is None else ""
        all_read = node.shuffle and choice.num_read == choice.num_shards
        why = ": all of them, as shuffled ranks read blocks of every shard" if all_read else ""
        lines.append(
            f"{choice.num_read} of {choice.num_shards} shards, {size_text(choice.read_bytes)} of "
            f"{size_text(choice.num_bytes)}, are read by {len(set(node.ranks))} of {node.world_size} ranks "
            f"from step {node.first_step}{last}{epochs}{why}"
        )
    chosen_bytes = sum(shard.num_bytes for shard in choice.chosen)
    lines.append(f"to stage: {len(choice.chosen)} shards of {size_text(chosen_bytes)}")
    left = choice.num_read - len(choice.chosen)
    if left:
        over = size_text(choice.read_bytes - chosen_bytes)
        lines.append(f"{left} shards of {over} are over --limit_bytes and will be read where they are")
    return lines


def _end_line(staged: Staged, num_chosen: int, to: str) -> str:
    failed = f", {len(staged.failures)} failed" if staged.failures else ""
    return (
        f"staged {num_chosen - len(staged.failures)} of {num_chosen} shards: {staged.num_copied} copied, "
        f"{staged.num_found} there before or copied by others{failed}; load them with staged_dir={to!r}"
    )


_ORDER_FLAGS = {
    "batch_size": "samples per batch on each rank",
    "global_batch_size": "samples of an optimizer's step (default batch_size x world_size)",
    "seed": "of the shuffle (default 0)",
    "seq_len": "tokens of rows that documents are packed into at load",
    "max_length": "tokens at which documents are cut",
    "long_documents": "what happens to longer ones (default truncate)",
    "group_by_length": "documents of like length side by side, in groups of so many (default batch_size)",
    "first_step": "global batch from which on, counted through all epochs (default 0)",
    "num_steps": "global batches (default: to the end of --num_epochs)",
    "num_epochs": "epochs, that of --first_step included (default 1)",
    "shuffle": "as the loader is told",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the command; ``stage`` takes what the parser makes of them."""
    parser.description = (
        "Copy shards to a disk of this node, verified, for the loader's staged_dir. Any "
        "number of processes may do so at once; each begins elsewhere and skips what is there."
    )
    parser.add_argument(
        "input_shards", nargs="+", help="as the loader takes them; data sets of shardprep only"
    )
    parser.add_argument(
        "--to", required=True, metavar="DIR", help="folder on this node; made if it is missing"
    )
    parser.add_argument(
        "--limit_bytes", help="stage as many shards as fit, such as 500G; those read most first"
    )
    parser.add_argument(
        "--recheck", action="store_true", help="read what is staged, too, and mend what differs"
    )
    parser.add_argument("--exclude_shards", nargs="+", default=[], help="as the loader's exclude_shards")
    world = parser.add_argument_group(
        "only what this node's ranks will read", "the numbers that get_llama3_dataloader is given"
    )
    world.add_argument("--world_size", type=int, help="ranks of data parallelism, of all nodes")
    world.add_argument("--ranks", help="those of this node, such as 8-15")
    world.add_argument("--ranks_per_node", type=int, help="instead of --ranks: by SLURM_NODEID, in its order")
    for name, text in _ORDER_FLAGS.items():
        settings: dict[str, Any] = {"type": int}
        if name == "shuffle":
            settings = {"action": argparse.BooleanOptionalAction}
        elif name == "long_documents":
            settings = {"choices": ("truncate", "split", "error")}
        elif name == "group_by_length":
            settings = {"type": int, "nargs": "?", "const": True}
        world.add_argument(f"--{name}", help=text, default=argparse.SUPPRESS, **settings)
