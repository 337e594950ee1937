"""``shardprep export O --to TOOL --output_dir E``: the shards that are missing, then what names them all."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

from preprocess.export.layouts import EXPORTERS, STREAMS, ShardTokens
from preprocess.plan import Plan, need_plan
from preprocess.shard_samples import ShardSamples
from shardprep.atomic_files import TEMPORARY_NAME, publish_bytes, remove_tree
from shardprep.console import Progress, print_lines
from shardprep.errors import CannotWrite, Refused, UsageError
from shardprep.format.manifest import check_shard
from shardprep.regular_files import NOT_THERE, read_regular

_SETTINGS = "export.json"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the token ids of a data set in the layout of another tool. Run it again after it was stopped: "
        "it goes on with the shards that are missing."
    )
    parser.add_argument("data_dir", type=Path, help="folder of the data set, complete")
    parser.add_argument("--to", required=True, choices=tuple(EXPORTERS), help="whose layout")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the export")
    parser.add_argument(
        "--put_eos",
        action=argparse.BooleanOptionalAction,
        help="EOS behind documents that lack it (default for megatron and nanogpt)",
    )


def export(args: argparse.Namespace) -> int:
    """``export O``: write what is missing. Raises Refused where the folder has another export."""
    folder: Path = args.output_dir
    plan = need_plan(args.data_dir)
    if plan.options.is_chat:
        raise UsageError(
            f"{args.data_dir} holds conversations, and no other tool's layout keeps their loss mask: their "
            "users' words would be trained on; read them with the loader"
        )
    put_eos = _eos_to_put(plan, args)
    counts = [
        check_shard(args.data_dir, shard_id, plan.plan_id).counts for shard_id in range(plan.num_shards)
    ]
    ends = itertools.accumulate(
        c.num_tokens + (c.num_documents if put_eos is not None else 0) for c in counts
    )
    exporter = EXPORTERS[args.to](
        folder=folder,
        vocab_size=plan.tokenizer.vocab_size,
        num_shards=plan.num_shards,
        first_token=[0, *ends],
    )
    exporter.check_folder()
    _claim(folder, {"to": args.to, "plan_id": plan.plan_id, "put_eos": put_eos})
    todo = [shard_id for shard_id in range(plan.num_shards) if not exporter.is_done(shard_id)]
    with Progress("exporting", len(todo), unit="shards") as progress:
        for shard_id in todo:
            with ShardSamples(args.data_dir, plan.spec, shard_id) as samples:
                whole = plan.options.pack == "best_fit"
                exporter.write(ShardTokens(samples=samples, rows_hold_wholes=whole, put_eos=put_eos))
            progress.add(1)
    opened_by = exporter.finish()
    _remove_temporaries(folder)
    print_lines(f"{plan.num_shards} shards, {exporter.first_token[-1]} tokens in {folder}; {opened_by}")
    return 0


def _remove_temporaries(folder: Path) -> None:
    """What attempts left that died; whatever one that lives would write is there."""
    with contextlib.suppress(OSError):
        for path in [item for item in folder.iterdir() if TEMPORARY_NAME.fullmatch(item.name)]:
            remove_tree(path)


def _eos_to_put(plan: Plan, args: argparse.Namespace) -> int | None:
    wanted = args.to in STREAMS if args.put_eos is None else args.put_eos
    if not wanted or plan.options.append_eos:
        return None
    if plan.spec.has_rows:
        if args.put_eos:
            raise UsageError("--put_eos is for documents; these rows were packed with --no-append_eos")
        return None
    eos = plan.tokenizer.eos_token_id
    if eos is None:
        raise UsageError("the tokenizer names no EOS to put behind documents; add --no-put_eos")
    return eos


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Say whose export the folder is, once. Raises Refused where it is another's, CannotWrite."""
    path = folder / _SETTINGS
    try:
        found = json.loads(read_regular(path, max_bytes=1 << 20))
    except NOT_THERE:
        found = None
    except ValueError:
        found = {}
    if found is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            others = [name for item in folder.iterdir() if not TEMPORARY_NAME.fullmatch(name := item.name)]
        except OSError as error:
            raise CannotWrite(f"--output_dir {folder} cannot be made: {error.strerror}") from None
        if others:
            raise Refused(
                f"--output_dir {folder} holds {others[0]} and no {_SETTINGS}; choose a fresh folder"
            )
        publish_bytes(path, json.dumps(settings).encode())
    elif found != settings:
        there = found if isinstance(found, dict) else {}
        differing = [name for name in settings if there.get(name) != settings[name]]
        names = ", ".join(differing)
        raise Refused(f"--output_dir {folder} holds another export: {names} differ; choose a fresh folder")
