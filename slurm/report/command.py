"""``shardprep report O``: reads what there is of a data set, and writes it as a page, as text or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from preprocess.plan import Plan, need_plan
from shardprep.atomic_files import publish_bytes
from shardprep.console import Progress, print_lines, say
from shardprep.errors import ShardprepError, UsageError
from shardprep.format.index import DatasetIndex, read_index
from shardprep.format.names import INDEX_NAME, idx_path, manifest_path, tar_path
from shardprep.regular_files import size_of_file
from slurm.dataset_state import DatasetState, done_shards, find_state
from slurm.job_records import has_submissions
from slurm.report.content import report_content
from slurm.report.html_page import html_page
from slurm.report.report_data import Found, report_data
from slurm.report.shard_sums import sum_shards
from slurm.report.text_page import text_page
from slurm.report.words import LANGUAGES, Words

_MOST_EXAMPLES = 100


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Where to, in which form and language."""
    parser.description = (
        "What a data set holds, how it was made and how to make it again: as text, with --output as a page "
        "for a browser, which needs no network. Reads every manifest once, and no shard."
    )
    parser.add_argument("output_dir", type=Path, help="folder of the data set")
    parser.add_argument(
        "--output", type=Path, help="write this file: a page, unless --text or --json is given"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="plain text (the default without --output)")
    form.add_argument("--json", action="store_true", help="for programs: docs/report_json.md")
    parser.add_argument(
        "--lang", choices=LANGUAGES, default="en", help="language of page and text (default en)"
    )
    parser.add_argument(
        "--num_examples",
        type=int,
        default=3,
        help="documents shown of those left out for each reason, with their beginning (default 3; 0: none)",
    )


def report(args: argparse.Namespace) -> int:
    """Make the report; an unfinished data set has one, too."""
    if not 0 <= args.num_examples <= _MOST_EXAMPLES:
        raise UsageError(f"--num_examples is {args.num_examples}, expected 0 to {_MOST_EXAMPLES}")
    folder = args.output_dir
    plan = need_plan(folder)
    done = sorted(done_shards(folder, plan))
    with Progress("reading manifests", len(done), unit="manifests") as progress:
        sums = sum_shards(folder, plan.plan_id, done, progress.add)
    found = Found(
        folder=folder.absolute(),
        plan=plan,
        sums=sums,
        state=_state(folder, plan),
        index=_index(folder, plan),
        without_manifest=_without_manifest(folder, plan, done),
        num_examples=args.num_examples,
    )
    data = report_data(found)
    words = Words(args.lang)
    if args.json:
        lines = [json.dumps(data)]
    elif args.text or args.output is None:
        lines = text_page(report_content(data, words), words("report"))
    else:
        lines = [html_page(report_content(data, words), words("report")).rstrip("\n")]
    if args.output is None:
        print_lines(*lines)
        return 0
    publish_bytes(args.output, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
    say(f"wrote {args.output}")
    return 0


def _index(folder: Path, plan: Plan) -> DatasetIndex | None:
    """index.json, where it is one of this plan; the manifests are read by who reads them all."""
    if size_of_file(folder / INDEX_NAME) is None:
        return None
    try:
        index = read_index(folder)
    except ShardprepError:
        return None
    return index if index.spec.plan_id == plan.plan_id else None


def _without_manifest(folder: Path, plan: Plan, done: Sequence[int]) -> list[int]:
    """Shards whose tar and idx are listed, and no manifest."""
    names = {path.name for path in folder.iterdir()}
    missing = sorted(set(range(plan.num_shards)) - set(done))
    found = [n for n in missing if {tar_path(folder, n).name, idx_path(folder, n).name} <= names]
    return [n for n in found if manifest_path(folder, n).name not in names]


def _state(folder: Path, plan: Plan) -> DatasetState | None:
    """What Slurm and the logs say; nothing is asked where nothing was ever submitted."""
    if not has_submissions(folder):
        return None
    return find_state(folder, plan, if_away=lambda _: None)
