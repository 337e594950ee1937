"""Which files are disturbed at which stage, and by which commands they are then read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardprep.errors import BrokenShard
from shardprep.format.done import publish_findings
from shardprep.format.plan import need_plan
from tests.faults.judging import undisturbed, verdict
from tests.faults.outcomes import Outcome
from tests.faults.small_data_sets import SmallDataSet, Stage, make_external_tar

HEADER_BYTES = 512


@dataclass(frozen=True, kw_only=True)
class DisturbedFile:
    """A file of a data set, and the commands that read it."""

    name: str  # below data/
    stage: Stage
    commands: tuple[str, ...]
    is_json: bool = False
    free_text: str = ""  # JSON path of a name outside of all hashes: another text there is another name
    headers_only: bool = False  # of a tar: the bytes of its members cannot be checked without a manifest
    sizes_alone: bool = False  # is all that the commands look at: another shard's may have the same
    prepare: Callable[[Path], None] = lambda data: None


def keep_tars_only(data: Path) -> None:
    """Our tars as somebody got them who took nothing else."""
    for path in data.iterdir():
        if path.is_file() and path.suffix != ".tar":
            path.unlink()


def put_external_tars(data: Path) -> None:
    keep_tars_only(data)
    for path in data.glob("*.tar"):
        make_external_tar(path)


def find_wrong(data: Path) -> None:
    """A bit of a token id flips, and verify finds it."""
    tar = data / "shard-00001.tar"
    content = bytearray(tar.read_bytes())
    content[HEADER_BYTES + 200] ^= 1
    tar.write_bytes(content)
    error = BrokenShard(f"{tar} has another sha256 than its manifest says")
    publish_findings(data, need_plan(data).plan_id, [(1, error)])


FILES = (
    DisturbedFile(
        name="plan.json", stage="planned", commands=("shard",), is_json=True, free_text="tokenizer.model_id"
    ),
    DisturbedFile(
        name="plan.json",
        stage="verified",
        commands=("verify", "verify --fast", "status"),
        is_json=True,
        free_text="tokenizer.model_id",
    ),
    DisturbedFile(name="tokenizer/tokenizer.json", stage="planned", commands=("shard",)),
    DisturbedFile(name="tokenizer/tokenizer.json", stage="verified", commands=("verify", "load")),
    DisturbedFile(name="tokenizer/tokenizer_config.json", stage="planned", commands=("shard",), is_json=True),
    DisturbedFile(
        name="tokenizer/tokenizer_config.json", stage="verified", commands=("verify", "load"), is_json=True
    ),
    DisturbedFile(name="index.json", stage="verified", commands=("load", "stage", "verify"), is_json=True),
    DisturbedFile(
        name="shard-00000.json",
        stage="made",
        commands=("load", "verify", "shard", "status"),
        is_json=True,
        free_text="spec.tokenizer.model_id",
    ),
    DisturbedFile(name="shard-00000.idx", stage="verified", commands=("load", "stage", "verify")),
    DisturbedFile(name="shard-00000.tar", stage="verified", commands=("stage", "verify")),
    DisturbedFile(
        name="shard-00000.tar",
        stage="verified",
        commands=("load tars",),
        headers_only=True,
        prepare=keep_tars_only,
    ),
    DisturbedFile(
        name="shard-00001.tar",
        stage="verified",
        commands=("load tars",),
        headers_only=True,
        prepare=put_external_tars,
    ),
    DisturbedFile(name="quarantine/shard-00001.jsonl", stage="verified", commands=("verify",)),
    DisturbedFile(name="jobs/0000.json", stage="made", commands=("status",), is_json=True),
    # No JSON of bad values with right hashes: findings that were forged away are no findings.
    DisturbedFile(name="findings.json", stage="verified", commands=("shard 1",), prepare=find_wrong),
)

Fault = tuple[str, Callable[[Path], None]]  # in words, and what it does to the file


def disturb(
    campaign: str, data_set: SmallDataSet, file: DisturbedFile, faults: Callable[[bytes], Iterator[Fault]]
) -> Iterator[Outcome]:
    """Every fault of a file, each put through every command that reads it."""
    data = data_set.place / "data"
    path = Path(os.path.normpath(data / file.name))  # an input lies beside the data set

    def prepare() -> None:
        file.prepare(data)

    for name in file.commands:
        expected = undisturbed(data_set, file.stage, name, prepare)
        data_set.reset(file.stage)
        prepare()
        if not path.exists():
            continue
        for words, apply in faults(path.read_bytes() if path.is_file() else b""):
            data_set.reset(file.stage)
            prepare()
            apply(path)
            ended = data_set.run(name)
            rewritten = name.startswith("verify") and file.name == "index.json"
            kind, what = verdict(data_set, name, ended, expected, None if rewritten else f"data/{file.name}")
            yield Outcome(
                campaign=campaign,
                form=data_set.form,
                file=file.name,
                command=name,
                fault=words,
                kind=kind,
                what=what,
            )


def spread(size: int, number: int) -> list[int]:
    """Up to ``number`` of ``range(size)``, evenly."""
    number = min(size, number)
    return [place * size // number for place in range(number)]
