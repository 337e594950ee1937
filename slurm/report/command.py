"""``shardprep report O``: reads what there is of a data set, and writes it as a page, as text or as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from preprocess.done_shards import read_findings
from preprocess.plan.plan_file import need_plan
from shardprep.console import Progress, print_lines, say
from shardprep.errors import UsageError
from shardprep.files import publish_bytes
from shardprep.format.manifest import manifest_ids
from slurm.report.report_data import report_data, sum_manifests
from slurm.report.words import LANGUAGES, Words

_MAX_EXAMPLES = 100


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Where to, in which form and language."""
    parser.description = (
        "What a data set holds, how it was made and how to make it again: as text, with --output as a page "
        "for a browser, which needs no network. Reads every manifest once, and no shard."
    )
    parser.add_argument("output_dir", type=Path, help="folder of the data set")
    parser.add_argument(
        "--output",
        type=Path,
        help="write this file: a page, unless --text or --json is given (default: print)",
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
    if not 0 <= args.num_examples <= _MAX_EXAMPLES:
        raise UsageError(f"--num_examples is {args.num_examples}, expected 0 to {_MAX_EXAMPLES}")
    folder = args.output_dir.absolute()
    plan = need_plan(folder)
    wrong = read_findings(folder, plan.plan_id)
    made = [each for each in manifest_ids(folder) if each < plan.num_shards and each not in wrong]
    with Progress("reading manifests", len(made), unit="manifests") as progress:
        sums = sum_manifests(folder, plan.plan_id, made, progress.add)
    data = report_data(folder, plan, sums, num_examples=args.num_examples)
    if args.json:
        lines = [json.dumps(data)]
    else:
        from slurm.report.rendering import page_lines, text_lines  # jinja2, which JSON does not need

        draw = text_lines if args.text or args.output is None else page_lines
        lines = draw(data, Words(args.lang))
    if args.output is None:
        print_lines(*lines)
        return 0
    publish_bytes(args.output, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
    say(f"wrote {args.output}")
    return 0
