"""The documents of an evaluation: of files, as ``plan`` reads them, or of a data set of this package."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preprocess.overlap.shard_documents import ShardDocuments
from preprocess.overlap.token_texts import TokenTexts
from preprocess.plan.divide import stamp_inputs
from preprocess.plan.listing import find_inputs
from preprocess.read.documents import read_documents
from shardprep.console import Progress, say
from shardprep.errors import BadInput, NotFound, UsageError
from shardprep.files import is_folder, size_of_file
from shardprep.format.idx import ShardSamples
from shardprep.format.input_formats import place_text
from shardprep.format.manifest import check_done, read_findings
from shardprep.format.options import PlanOptions
from shardprep.format.plan import ByteRange, need_plan, read_plan

# The flags of plan that say how files are read.
READ_OPTIONS = ("recursive", "doc", "encoding", "text_field", "text_template")


@dataclass
class Evals:
    """Texts of an evaluation, and where each lies."""

    texts: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # FILE:BYTE, or of a data set SHARD:SAMPLE
    places: list[tuple[str, int] | None] = field(default_factory=list)

    def sha256(self) -> str:
        """Return a hash of all texts and names."""
        digest = hashlib.sha256()
        for name, text in zip(self.names, self.texts, strict=True):
            digest.update(f"{name}\0{len(text)}\0{text}".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def read_evals(path: Path, options: dict[str, Any]) -> Evals:
    """Read an evaluation into memory. ``options``: those of READ_OPTIONS that were given.

    Raises NotFound, BadInput where no document can be read, UsageError, and what reading raises.
    """
    if size_of_file(path) is None:
        raise NotFound(path=path, found="no such file or folder", expected="the documents of an evaluation")
    if is_folder(path) and read_plan(path) is not None:
        if options:
            raise UsageError(
                found=f"--{min(options)}",
                expected=f"none, as {path} is a data set, which was planned with it",
            )
        evals = _of_data_set(path)
    else:
        evals = _of_files(path, PlanOptions(**options))
    if not evals.texts:
        raise BadInput(path=path, found="no document", expected="the documents of an evaluation")
    return evals


def _of_files(path: Path, options: PlanOptions) -> Evals:
    folder, paths = path.parent, [path]
    if is_folder(path):
        folder = path
        try:
            paths = find_inputs(path, recursive=options.recursive).paths
        except NotFound as error:
            raise NotFound(
                str(error).replace("--input_dir", "--against"), path=path, expected=error.expected
            ) from None
    inputs, _ = stamp_inputs(folder, paths, options)
    evals, bad, first_bad = Evals(), Counter[str](), ""
    progress = Progress("reading the evaluation", sum(item.num_bytes for item in inputs))
    for number, item in enumerate(inputs):
        whole = ByteRange(input_number=number, path=folder / item.path, start=0, end=item.num_bytes)
        for documents in read_documents([whole], options):
            for one in documents.bad:
                bad[one.reason] += 1
                first_bad = first_bad or place_text(str(folder / item.path), one.source_offset)
            for text, offset in zip(documents.texts, documents.offsets.tolist(), strict=True):
                evals.texts.append(text.decode())
                evals.names.append(f"{item.path}:{offset}")
                evals.places.append((item.path, offset))
            progress.add(documents.num_bytes)
    if bad:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in bad.most_common())
        message = f"{bad.total():,} evaluation documents cannot be read ({reasons}), the first at {first_bad}"
        if not evals.texts:
            raise BadInput(f"{message}; name the field of the text: --text_field, --text_template", path=path)
        say(f"warning: {message}")
    return evals


def _of_data_set(folder: Path) -> Evals:
    evals, plan = Evals(), need_plan(folder)
    token_texts, findings = TokenTexts(folder, plan), read_findings(folder, plan.plan_id)
    progress = Progress("reading the evaluation", plan.num_shards, unit="shards")
    for shard_id in range(plan.num_shards):
        manifest = check_done(folder, shard_id, plan.plan_id, findings)
        with ShardSamples(folder, plan.spec, shard_id) as samples:
            documents = ShardDocuments(folder, plan, manifest, samples)
            for block in documents.blocks():
                texts = token_texts.texts(block.ids, block.offsets)
                for number, text in zip(block.numbers.tolist(), texts, strict=True):
                    if number >= 0:
                        evals.texts.append(text)
                        evals.names.append(documents.address(number)[1])
                        evals.places.append(documents.place(number))
        progress.add(1)
    return evals
