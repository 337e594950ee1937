"""The documents of an evaluation: of files, as ``plan`` reads them, or of a data set that ``plan`` made."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

from preprocess.overlap.documents import ShardDocuments, TokenTexts
from preprocess.plan.divide import stamp_inputs
from preprocess.plan.listing import find_inputs
from preprocess.read.documents import read_documents
from shardprep.console import Progress, say
from shardprep.errors import BadInput, NotFound, UsageError
from shardprep.files import is_folder, size_of_file
from shardprep.format.idx import ShardSamples
from shardprep.format.manifest import check_done, read_findings
from shardprep.format.options import PlanOptions
from shardprep.format.plan import ByteRange, Plan, read_plan

# The options of plan that say how files are read.
READ_OPTIONS = ("recursive", "doc", "encoding", "text_field", "text_template")


class Evals:
    """The texts, their names, and the place of each: its file and byte, None where it is not known."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.names: list[str] = []
        self.places: list[dict[str, Any] | None] = []

    def add(self, text: str, name: str, place: dict[str, Any] | None) -> None:
        self.texts.append(text)
        self.names.append(name)
        self.places.append(place)

    def sha256(self) -> str:
        """Return a hash of all texts and names."""
        digest = hashlib.sha256()
        for name, text in zip(self.names, self.texts, strict=True):
            digest.update(f"{len(name)} {len(text)} {name}{text}".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def read_evals(path: Path, options: dict[str, Any]) -> Evals:
    """Read an evaluation into memory. ``options``: those of READ_OPTIONS that were given.

    Raises NotFound, UsageError, BadInput where it has no document, and what reading raises.
    """
    if size_of_file(path) is None:
        raise NotFound(path=path, found="no such file or folder", expected="the documents of an evaluation")
    if (plan := read_plan(path) if is_folder(path) else None) is None:
        evals = _of_files(path, PlanOptions(**options))
    elif options:
        expected = "no such flag, as this is a data set, whose plan says how its input is read"
        raise UsageError(path=path, found=f"--{min(options)}", expected=expected)
    else:
        evals = _of_data_set(path, plan)
    if not evals.texts:
        raise BadInput(path=path, found="no document", expected="the documents of an evaluation")
    return evals


def _of_files(path: Path, options: PlanOptions) -> Evals:
    folder, paths = path.parent, [path]
    if is_folder(path):
        folder, paths = path, find_inputs(path, options).paths
    inputs, _ = stamp_inputs(folder, paths, options)
    evals, bad = Evals(), Counter[str]()
    progress = Progress("reading the evaluation", sum(item.num_bytes for item in inputs))
    for number, item in enumerate(inputs):
        whole = ByteRange(input_number=number, path=folder / item.path, start=0, end=item.num_bytes)
        for documents in read_documents([whole], options):
            bad.update(one.reason for one in documents.bad)
            for text, offset in zip(documents.texts, documents.offsets.tolist(), strict=True):
                evals.add(text.decode(), f"{item.path}:{offset}", {"file": item.path, "byte": offset})
            progress.add(documents.num_bytes)
    if bad:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in bad.most_common())
        found = f"{bad.total():,} documents of the evaluation cannot be read ({reasons})"
        if not evals.texts:
            remedy = "--text_field"
            raise BadInput(
                f"{found}: name the field of the text by {remedy}", path=path, found=reasons, remedy=remedy
            )
        say(f"warning: {found}")
    return evals


def _of_data_set(folder: Path, plan: Plan) -> Evals:
    evals, token_texts = Evals(), TokenTexts(folder, plan)
    findings = read_findings(folder, plan.plan_id)
    progress = Progress("reading the evaluation", plan.num_shards, unit="shards")
    for shard_id in range(plan.num_shards):
        manifest = check_done(folder, shard_id, plan.plan_id, findings)
        with ShardSamples(folder, plan.spec, shard_id) as samples:
            documents = ShardDocuments(folder, plan, manifest, samples)
            for block in documents.blocks():
                for number, text in enumerate(token_texts.texts(block.ids, block.offsets), block.first):
                    names = documents.names(number)
                    evals.add(text, names["document"], names["place"])
        progress.add(1)
    return evals
