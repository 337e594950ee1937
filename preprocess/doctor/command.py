"""``shardprep doctor``: runs the checks that the flags allow, and says the worst by its exit code."""

from __future__ import annotations

import argparse
import json
import os

from preprocess.doctor.findings import Finding, as_json, as_text, exit_code
from preprocess.doctor.folders import input_finding, output_findings
from preprocess.doctor.machine import (
    cpu_finding,
    export_lines,
    memory_finding,
    place_finding,
    thread_findings,
    training_findings,
    version_findings,
)
from preprocess.options import PrepConfig
from preprocess.resources import allowed_cpus
from shardprep.command_line import add_flags_of, given_of
from shardprep.console import print_lines
from shardprep.regular_files import is_folder


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What to look at; without a flag only the machine is."""
    parser.description = (
        "Look at this machine, a tokenizer and the folders before the work begins. Writes nothing but one "
        "block, which it removes. In a job: srun shardprep doctor. Exit code: 0 all good, 1 warnings, else "
        "that of the first error."
    )
    parser.add_argument("--num_shards", type=int, help="as for plan: even shards")
    parser.add_argument(
        "--torch", action=argparse.BooleanOptionalAction, default=True, help="ask torch, too: takes seconds"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="the findings for programs")
    how.add_argument("--export", action="store_true", help="only lines of variables, to be sourced")
    add_flags_of(parser, PrepConfig, show_defaults=False)


def doctor(args: argparse.Namespace) -> int:
    """Print the findings; the exit code is the worst of them."""
    cpus = allowed_cpus(os.environ, os.sched_getaffinity(0), offset=0)
    if args.export:
        ranks = os.environ.get("SLURM_NTASKS_PER_NODE") or os.environ.get("LOCAL_WORLD_SIZE") or "1"
        print_lines(*export_lines(len(cpus), int(ranks) if ranks.isdigit() else 1))
        return 0
    findings = [
        place_finding(os.environ),
        cpu_finding(os.environ, os.sched_getaffinity(0)),
        memory_finding(os.environ),
        *thread_findings(os.environ, len(cpus)),
        *version_findings(),
        *_data_findings(args, len(cpus)),
        *(training_findings() if args.torch else []),
    ]
    print_lines(*(json.dumps(as_json(findings), indent=1).split("\n") if args.json else as_text(findings)))
    return exit_code(findings)


def _data_findings(args: argparse.Namespace, num_cpus: int) -> list[Finding]:
    """Of the tokenizer and the folders that were named."""
    from preprocess.doctor.tokenizer import Planned, check_folder, check_model, check_plan
    from preprocess.planning import Sharding

    given = given_of(args, PrepConfig)
    output_dir, input_dir = given.get("output_dir"), given.get("input_dir")
    planned = Planned(findings=[])
    if output_dir is not None and is_folder(output_dir):
        planned = check_folder(output_dir, num_cpus)
    findings = [] if input_dir is None else [input_finding(input_dir)]
    if not planned.findings and "model_id" in given:
        if findings and findings[0].level == "good":
            planned = check_plan(PrepConfig(**given), Sharding(num_shards=args.num_shards))
        else:
            findings += check_model(PrepConfig(model_id=given["model_id"]))
    findings += planned.findings
    if output_dir is not None:
        num_shards = planned.plan.num_shards if planned.plan else 0
        findings += output_findings(output_dir, planned.cost, num_shards)
    return findings
