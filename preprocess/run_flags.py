"""The flags of ``run``, apart from its work, so that its help imports no large library."""

from __future__ import annotations

import argparse
from pathlib import Path

from preprocess.make.settings import WorkerSettings
from shardprep.option_flags import add_flags_of


def run_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make the missing shards. Under srun or mpirun each process makes a share of them, and then those "
        "that no other process has begun; it ends when all shards are made."
    )
    add = parser.add_argument
    add("output_dir", metavar="DATA", type=Path, help="folder of the data set")
    add("--shards", metavar="IDS", help="make only these, such as 0-9,12 (default: all)")
    text = "be process I of N, from 0, that share the shards (default: as srun or mpirun say; 0/1: alone)"
    add("--part", metavar="I/N", help=text)
    text = "share the shards with the other tasks of this Slurm job array, too"
    add("--array", action="store_true", help=text)
    add("--json", action="store_true", help="print one line of JSON on standard output")
    making_flags(parser)


def making_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "number of processes (default: DATASET_NUM_PROC, or one per CPU, fewer if memory is short)"
    add("--num_proc", metavar="N", type=int, help=text)
    add("-v", "--verbose", action="store_true", help="print a line for each shard")
    add_flags_of(parser, WorkerSettings)
