"""The documents of an evaluation: of files, as ``plan`` reads them, or of a data set that ``plan`` made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from preprocess.overlap.documents import ShardDocuments, TokenTexts
from preprocess.plan.inputs import find_inputs, stamp_inputs
from preprocess.read.documents import read_documents
from shardprep.console import Progress, say
from shardprep.errors import BadInput, NotFound, UsageError
from shardprep.files import is_folder, size_of_file
from shardprep.format.index import ShardSamples
from shardprep.format.manifest import check_done, read_findings
from shardprep.format.options import PlanOptions
from shardprep.format.plan import ByteRange, Plan, read_plan

# The options of plan that say how files are read.
READ_OPTIONS = ("recursive", "doc", "encoding", "text_field", "text_template")


class EvalDocument(NamedTuple):
    """A document of an evaluation."""

    text: str
    name: str  # FILE:BYTE, or of a data set its address for peek
    place: dict[str, Any] | None  # its file and byte; None where it is not known


def read_evals(path: Path, options: dict[str, Any]) -> list[EvalDocument]:
    """Read an evaluation into memory. ``options``: those of READ_OPTIONS that were given.

    Raises NotFound, UsageError, BadInput where it has no document, and what reading raises.
    """
    if size_of_file(path) is None:
        raise NotFound(path=path, found="no such file or folder", expected="the documents of an evaluation")
    plan = read_plan(path) if is_folder(path) else None
    if plan is not None and options:
        expected = "no such flag, as this is a data set, whose plan says how its input is read"
        raise UsageError(path=path, found=f"--{min(options)}", expected=expected)
    bad = Counter[str]()
    found = _of_files(path, PlanOptions(**options), bad) if plan is None else _of_data_set(path, plan)
    evals = list(found)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in bad.most_common()) or "no document"
    if not evals:
        expected = "the documents of an evaluation; the field of their text is named by --text_field"
        raise BadInput(path=path, found=reasons, expected=expected)
    if bad:
        say(f"warning: {bad.total():,} documents of the evaluation cannot be read ({reasons})")
    return evals


def _of_files(path: Path, options: PlanOptions, bad: Counter[str]) -> Iterator[EvalDocument]:
    folder, paths = path.parent, [path]
    if is_folder(path):
        folder, paths = path, find_inputs(path, options).paths
    inputs = [item.file for item in stamp_inputs(folder, paths, options)]
    progress = Progress("reading the evaluation", sum(item.num_bytes for item in inputs))
    for number, item in enumerate(inputs):
        whole = ByteRange(input_number=number, path=folder / item.path, start=0, end=item.num_bytes)
        for documents in read_documents([whole], options):
            bad.update(one.reason for one in documents.bad)
            for text, offset in zip(documents.texts, documents.offsets.tolist(), strict=True):
                yield EvalDocument(
                    text.decode(), f"{item.path}:{offset}", {"file": item.path, "byte": offset}
                )
            progress.add(documents.num_bytes)


def _of_data_set(folder: Path, plan: Plan) -> Iterator[EvalDocument]:
    token_texts, findings = TokenTexts(folder, plan), read_findings(folder, plan.plan_id)
    progress = Progress("reading the evaluation", plan.num_shards, unit="shards")
    for shard_id in range(plan.num_shards):
        manifest = check_done(folder, shard_id, plan.plan_id, findings)
        with ShardSamples(folder, plan.spec, shard_id) as samples:
            documents = ShardDocuments(folder, plan, manifest, samples)
            for block in documents.blocks():
                for turn, text in enumerate(token_texts.texts(block.ids, block.offsets), block.first):
                    names = documents.names(turn)
                    yield EvalDocument(text, names["document"], names["place"])
        progress.add(1)
