"""Flags of every command, made from PrepConfig's fields, and what a user gave of them."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from pathlib import Path
from typing import Any, get_type_hints

from preprocess.options import (
    CHOICES,
    PrepConfig,
    WorkerSettings,
    environment_number,
)
from preprocess.resources import PROCESS_BYTES, memory_limit_gb
from shardprep.command_line import check_command, parse_command, underscored
from shardprep.errors import UsageError

_TYPES: dict[Any, type] = {
    Path: Path,
    Path | None: Path,
    int | None: int,
    float: float,
    float | None: float,
}
COMMANDS = ("plan", "run", "verify", "train_tokenizer")


def parse(argv: list[str]) -> argparse.Namespace:
    """The parsed command line; ``command`` is one of COMMANDS, or ``shard``.

    Option flags are absent from the namespace unless given, so that a plan's own can be told from
    a user's. Raises UsageError for an unknown command.
    """
    argv = [underscored(item) for item in argv]
    if argv and not argv[0].startswith("-"):
        if argv[0] != "shard":  # the name of the form without a command: `shard --help` shows its flags
            check_command(argv[0], COMMANDS)
    elif argv[:1] not in (["-h"], ["--help"]):
        argv = ["shard", *argv]
    return parse_command(*_parser(), argv)


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of PrepConfig that the user gave."""
    names = {item.name for item in dataclasses.fields(PrepConfig)}
    return {name: value for name, value in vars(args).items() if name in names}


def worker_settings(args: argparse.Namespace) -> WorkerSettings:
    """The worker's options: given, or of DATASET_[WRITER_]BATCH_SIZE, or the defaults."""
    settings: dict[str, Any] = {
        "batch_size": environment_number(os.environ, "DATASET_BATCH_SIZE"),
        "writer_batch_size": environment_number(os.environ, "DATASET_WRITER_BATCH_SIZE"),
        "memory_gb": memory_limit_gb(os.environ),
    }
    names = {item.name for item in dataclasses.fields(WorkerSettings)}
    return WorkerSettings(**settings | {name: value for name, value in vars(args).items() if name in names})


def parse_ids(text: str, num_shards: int) -> list[int]:
    """``0-9,12`` -> shard ids in order. Raises UsageError."""
    ids: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match or int(match[2] or match[1]) >= num_shards:
            raise UsageError(f"--shards is {text!r}, expected ids of 0 to {num_shards - 1}, such as 0-9,12")
        ids.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(ids)


def num_processes(args: argparse.Namespace, num_cpus: int, memory_gb: float) -> int:
    """--num_proc, else DATASET_NUM_PROC, else one a CPU as far as the memory goes. Raises UsageError."""
    given = environment_number(os.environ, "DATASET_NUM_PROC") if args.num_proc is None else args.num_proc
    if given is None:
        fitting = int(memory_gb * 2**30) // (PROCESS_BYTES + (100 << 20))
        return max(1, min(num_cpus, fitting))
    if given < 1:
        raise UsageError(f"--num_proc is {given}, expected 1 or more")
    return int(given)


def _parser() -> tuple[argparse.ArgumentParser, argparse._SubParsersAction[argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="python -m preprocess",
        description="Raw text -> token shards. Without a command it makes one shard: --shard_id N.",
        epilog="python -m preprocess --shard_id N [...] makes shard N: of the plan in --output_dir, or "
        "without one of the N-th .txt file in --input_dir.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}")
    shard = commands.add_parser("shard", prog="python -m preprocess", description="Make one shard.")
    shard.add_argument("--shard_id", type=int, required=True, help="which shard, from 0")
    _add_options(shard, PrepConfig)
    _add_options(shard, WorkerSettings)
    plan = commands.add_parser("plan", help="decide which bytes are shard N, and freeze it as plan.json")
    number = plan.add_mutually_exclusive_group()
    number.add_argument("--num_shards", type=int, help="even shards (default: one input file, one shard)")
    number.add_argument("--shard_bytes", help="even shards of about this much input, such as 512M")
    plan.add_argument("--dry_run", action="store_true", help="print what would be planned, write nothing")
    plan.add_argument(
        "--stripe",
        default="auto",
        help="Lustre stripes of a fresh output folder: auto (leave it), none, or N",
    )
    _add_options(plan, PrepConfig)
    run = commands.add_parser("run", help="make the missing shards on this machine")
    run.add_argument("output_dir", type=Path, help="folder of the data set")
    run.add_argument("--shards", help="only these, such as 0-9,12")
    run.add_argument("--num_proc", type=int, help="processes (default: DATASET_NUM_PROC, or one a CPU)")
    _add_options(run, WorkerSettings)
    verify = commands.add_parser("verify", help="prove the shards whole and write index.json")
    verify.add_argument("output_dir", type=Path, help="folder of the data set")
    verify.add_argument("--fast", action="store_true", help="manifests, sizes and coverage; read no shard")
    _add_train_tokenizer(commands.add_parser("train_tokenizer", help="train a byte-level BPE like Llama 3's"))
    return parser, commands


def _add_train_tokenizer(parser: argparse.ArgumentParser) -> None:
    from preprocess import train_tokenizer

    train_tokenizer.add_arguments(parser)


def _add_options(parser: argparse.ArgumentParser, options: type[PrepConfig] | type[WorkerSettings]) -> None:
    """A flag a field, but for those that the parser has already."""
    hints = get_type_hints(options)
    for item in dataclasses.fields(options):
        if f"--{item.name}" in parser._option_string_actions:  # noqa: SLF001 - argparse has no other way to ask
            continue
        hint, default = hints[item.name], item.default
        shown = "" if default is None or isinstance(default, bool) else f" (default {default})"
        settings: dict[str, Any] = {"help": item.metadata["help"] + shown, "default": argparse.SUPPRESS}
        if hint in (bool, bool | None):
            settings["action"] = argparse.BooleanOptionalAction
        elif item.name in CHOICES:
            settings["choices"] = CHOICES[item.name]
        else:
            settings["type"] = _TYPES.get(hint, str)
        parser.add_argument(f"--{item.name}", **settings)
