"""Makes one shard: read_documents -> encode -> members -> tar and idx -> manifest.

Threads share the work: one reads and decodes the next batch, some take a batch each, encode it, with the
engine's own threads, and lay it out, and this one writes the batches in their order. All but the encoding is
Python and numpy, which share the interpreter's lock for a part of the time: see benchmarks/results.md.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import platform
import resource
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import preprocess
from preprocess.make.engines import (
    NO_LOSS,
    Engine,
    TokenBatch,
    equal_fast_engine,
    ids_sha256,
    tokenizers_engine,
)
from preprocess.make.members import Digests, DocumentMembers, Members, RowMembers
from preprocess.make.resources import WorkerSettings
from preprocess.make.shard_writer import ShardWriter, remove_leftovers, remove_temporaries_of
from preprocess.read.chat import ROLES, check_chat_versions
from preprocess.read.documents import load_libraries, read_documents
from preprocess.read.format import DocumentBatch, Reading, reading_of
from preprocess.read.inputs import BadDocument
from preprocess.read.long_documents import MOST_HELD_BYTES, LongDocument
from preprocess.read.text_changes import check_text_versions
from shardprep.console import counted
from shardprep.errors import (
    BadInput,
    CannotWrite,
    NotFound,
    OtherTokenizer,
    ReadWriteError,
    Refused,
    UsageError,
)
from shardprep.files import size_of_file
from shardprep.format.blanked import BlankedDocuments, blank_digests, blanked_shards, read_blanked
from shardprep.format.dataset_spec import BLANK, DatasetSpec
from shardprep.format.digests import DIGEST, DIGEST_BYTES, are_for_validation
from shardprep.format.document_names import read_excluded
from shardprep.format.done import done_manifest, read_findings
from shardprep.format.manifest import Manifest
from shardprep.format.names import TOKENIZER_DIR
from shardprep.format.options import EngineName, PlanOptions
from shardprep.format.plan import Plan, PlannedShard
from shardprep.format.tokenizer_files import TOKENIZER_FILE, check_tokenizer_files

_MOST_MAKERS = 4  # threads that encode and lay out; more would wait for the interpreter's lock

_Item = DocumentBatch | LongDocument
_Append = Callable[[ShardWriter], None]
_SLURM_FACTS = (
    "SLURM_JOB_ID",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_CPUS_PER_TASK",
)
_OTHER_FIELD = {"no_field", "null_field", "wrong_type"}  # reasons: the field may be another one


class Work(NamedTuple):
    """What was done since the last time it was told."""

    num_bytes: int  # of input
    num_documents: int
    num_tokens: int

    @staticmethod
    def of(manifest: Manifest) -> Work:
        """All of a shard."""
        counts = manifest.counts
        return Work(counts.input_bytes, counts.num_documents, counts.num_tokens)

    @property
    def counts(self) -> dict[str, int]:
        """What Progress counts beside the bytes."""
        return {"documents": self.num_documents, "tokens": self.num_tokens}


@dataclass(frozen=True, kw_only=True)
class Worker:
    """What a process needs to make shards of one plan: the plan, its folder, a loaded engine."""

    plan: Plan
    folder: Path
    settings: WorkerSettings
    engine: Engine
    num_cpus: int

    @property
    def reading(self) -> Reading:
        return reading_of(self.plan.options, self.settings.batch_bytes)

    def run_shard(self, shard: PlannedShard, progress: Callable[[Work], None]) -> Manifest:
        """Make a shard of ``plan``; ``progress`` is told the work of each batch.

        Raises BadInput where too many documents are undecodable, and what reading and writing raise.
        A failure leaves nothing that counts; equal plans give equal bytes. Where another attempt made the
        shard meanwhile, and so removed this one's files, the shard is done, and its manifest is returned.
        """
        try:
            return self._make_shard(shard, progress, self.folder)
        except (ReadWriteError, CannotWrite):
            if (manifest := finished_manifest(self.plan, self.folder, shard.shard_id)) is None:
                raise
            return manifest

    def make_into(self, folder: Path, shard: PlannedShard) -> Manifest:
        """Make a shard in another folder, where it counts for nothing: to compare it with what is there."""
        return self._make_shard(shard, lambda _: None, folder)

    def _make_shard(self, shard: PlannedShard, progress: Callable[[Work], None], folder: Path) -> Manifest:
        began, cpu_began = time.time(), time.process_time()
        options, spec = self.plan.options, self.plan.spec
        # Threads that take a batch each: two on two cores, so that one encodes while the other prepares.
        num_makers = min(_MOST_MAKERS, self.num_cpus, max(2, self.num_cpus // 2), self.settings.most_batches)
        digest = None if shard.sha256 is None else hashlib.sha256()
        documents = documents_of_shard(self.plan, self.folder, shard, self.reading, digest)
        blanked: BlankedDocuments | None = None
        if shard.shard_id in blanked_shards(options.blanked):
            blanked = read_blanked(self.folder, self.plan.plan_id, shard.shard_id)
        members = members_of(
            spec,
            shard.shard_id,
            options,
            batch_size=self.settings.writer_batch_size,
            has_blanks=blanked is not None,
        )
        with (
            ThreadPoolExecutor(num_makers) as makers,
            ShardWriter(
                folder,
                spec,
                shard.shard_id,
                members,
                input_paths={number: self.plan.inputs[number].path for number in shard.input_numbers},
                side_files=options.side_files(),
            ) as writer,
        ):
            behind: deque[tuple[int, Future[_Append]]] = deque()  # bytes of input, and what appends them
            for item in _read_ahead(documents):
                behind.append((item.num_bytes, makers.submit(self._made, members, item, blanked)))
                if len(behind) > num_makers + 1:  # that many wait to be written
                    progress(_append(writer, *behind.popleft()))
            for made in behind:
                progress(_append(writer, *made))
            if digest is not None and digest.hexdigest() != shard.sha256:
                raise self._changed_input(shard, digest.hexdigest())
            self._check_bad_fraction(writer, shard.shard_id)
            facts = self._run_facts(began, cpu_began)
            return writer.commit(facts, made_from=None if blanked is None else blanked.made_from)

    def _changed_input(self, shard: PlannedShard, found: str) -> Refused:
        paths = sorted({self.plan.inputs[number].path for number in shard.input_numbers})
        names = ", ".join(paths[:3]) + (" ..." if len(paths) > 3 else "")
        return Refused(
            f"the input of shard {shard.shard_id:05d} ({names}) changed since it was planned: sha256 "
            f"{found[:12]}, the plan says {str(shard.sha256)[:12]}; bring the file back, or plan anew into a "
            "new folder"
        )

    def _made(self, members: Members, item: _Item, blanked: BlankedDocuments | None) -> _Append:
        """Encode documents and lay them out as far as can be before their turn; the result appends them.

        A long document is read twice or thrice: to check it, and in pieces for its ids and its text.
        """
        plan = self.plan
        end_id, can_be_cut, keeps_digests = plan.end_id, plan.can_be_cut, plan.options.digests
        if isinstance(item, DocumentBatch):
            tokens = self.engine.encode_documents(
                item.texts,
                batch_size=self.settings.batch_size,
                end_id=end_id,
                spans=item.spans,
                mask_rule=plan.options.chat_mask_rule,
            )
            digests = [item.digests()] if keeps_digests else []
            texts = item.source_texts()
            documents = item
            if blanked is not None:
                documents, tokens, digests = _blank(plan, item, tokens, digests, blanked)
            prepared = members.prepare(documents, tokens, *digests)
            return lambda writer: writer.append(documents, tokens, texts, prepared)
        text_hash = hashlib.sha256() if keeps_digests else None
        found = item.text_bytes(can_be_cut=can_be_cut, digest=text_hash)
        if isinstance(found, BadDocument):
            return lambda writer: writer.leave_out(item, found)
        num_chars = 0

        def pieces() -> Iterator[str]:
            nonlocal num_chars
            for piece in item.text():
                num_chars += len(piece)
                yield piece

        ids = np.empty(0, np.uint32)
        if found:
            ids = self.engine.encode_long(pieces(), can_be_cut=can_be_cut, end_id=end_id)
        digest = np.frombuffer(b"" if text_hash is None else text_hash.digest()[:DIGEST_BYTES], DIGEST)
        place, document = item.place, item
        if blanked is not None and blanked.are_at(place.input_number, np.array([place.start])).any():
            told = item.told._replace(ids=[""] if item.told.ids else None)
            document = dataclasses.replace(item, held=" " * found, told=told)
            ids = np.full_like(ids, BLANK)
            digest = blank_digests(are_for_validation(digest, plan.spec.validation_fraction))
        return lambda writer: writer.append_long(document, found, num_chars, ids, digest)

    def _check_bad_fraction(self, writer: ShardWriter, shard_id: int) -> None:
        given = self.settings.max_bad_fraction
        limit = self.plan.max_bad_fraction if given is None else given
        if writer.bad_fraction <= limit or (quarantine := writer.quarantine()) is None:
            return
        quarantine.sync()
        quarantine.publish()
        options, reasons, hint = self.plan.options, writer.bad_reasons, ""
        if "undecodable" in reasons:
            hint = "Is it another --encoding? "
        elif reasons & _OTHER_FIELD:
            hint = f"Is it another --{'messages' if options.is_chat else 'text'}_field? "
        raise BadInput(
            f"shard {shard_id:05d}: {counted(len(writer.bad), 'document')} ({writer.bad_fraction:.2%}) "
            f"{bad_words(options, reasons)}, the limit is {limit:.2%}; they are named in {quarantine.path}. "
            f"{hint}Otherwise mend the input and plan anew, or accept them: --max_bad_fraction",
            path=quarantine.path,
            found=f"{writer.bad_fraction:.2%}",
            expected=f"{limit:.2%}",
            remedy="--max_bad_fraction",
        )

    def _run_facts(self, began: float, cpu_began: float) -> dict[str, Any]:
        """What may differ between equal shards; for reports, never for decisions."""
        return {
            "engine": f"{self.engine.name} {self.engine.version}",
            "shardprep": preprocess.__version__,
            "python": platform.python_version(),
            "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "slurm": {name: os.environ[name] for name in _SLURM_FACTS if name in os.environ},
            "num_cpus": self.num_cpus,
            "began": round(began, 3),
            "wall_s": round(time.time() - began, 3),
            "cpu_s": round(time.process_time() - cpu_began, 3),
            "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def documents_of_shard(
    plan: Plan, folder: Path, shard: PlannedShard, reading: Reading, digest: hashlib._Hash | None
) -> Iterator[_Item]:
    """Yield the documents of a shard's input, without those that the plan excludes."""
    if plan.options.excluded:
        reading = dataclasses.replace(reading, excluded=_excluded(folder, plan.options.excluded))
    return read_documents(shard.ranges, reading, digest=digest, most_documents=shard.most_documents)


_excluded = functools.lru_cache(maxsize=1)(read_excluded)  # the same for all shards


def _blank(
    plan: Plan,
    documents: DocumentBatch,
    tokens: TokenBatch,
    digests: list[Digests],
    blanked: BlankedDocuments,
) -> tuple[DocumentBatch, TokenBatch, list[Digests]]:
    """Blank the documents of a batch that are blanked: as many BLANKs as they have ids, and nothing else."""
    is_blanked = blanked.are_at(documents.input_number, documents.input_offsets)
    if not is_blanked.any():
        return documents, tokens, digests
    numbers = np.flatnonzero(is_blanked).tolist()
    texts, names = [*documents.texts], [*(documents.ids or [])]
    for number in numbers:
        texts[number] = ""
        if documents.ids:
            names[number] = ""
    blank = np.uint32(BLANK)
    if plan.options.is_chat:  # the loss mask stays as it is
        blank = (tokens.ids & NO_LOSS) | blank
    ids = np.where(np.repeat(is_blanked, np.diff(tokens.offsets)), blank, tokens.ids)
    if digests:
        sides = are_for_validation(digests[0], plan.spec.validation_fraction)
        digests = [np.where(is_blanked, blank_digests(sides), digests[0])]
    blanked_documents = dataclasses.replace(documents, texts=texts, ids=names if documents.ids else None)
    return blanked_documents, dataclasses.replace(tokens, ids=ids), digests


def _append(writer: ShardWriter, num_bytes: int, made: Future[_Append]) -> Work:
    """Write what was made, once it is; returns the work."""
    num_documents, num_tokens = writer.num_documents, writer.num_tokens
    made.result()(writer)
    return Work(num_bytes, writer.num_documents - num_documents, writer.num_tokens - num_tokens)


def members_of(
    spec: DatasetSpec,
    shard_id: int,
    options: PlanOptions,
    *,
    batch_size: int | None = None,
    has_blanks: bool = False,
) -> Members:
    """The layout that the options ask for: a sample per document, or packed rows.

    ``batch_size``: most documents laid out at once, None for all of a batch.
    """
    if spec.has_rows:
        return RowMembers(spec, shard_id, options.pack)
    return DocumentMembers(
        spec, shard_id, keep_text=options.keep_text, batch_size=batch_size, has_blanks=has_blanks
    )


def bad_words(options: PlanOptions, reasons: set[str]) -> str:
    """Why documents are left out, as the end of a sentence."""
    what = options.text_template or options.text_field or options.messages_field
    words = {
        "undecodable": f"cannot be decoded as {options.encoding}",
        "uncuttable": "are too long for this tokenizer to be encoded in pieces",
        "too_long": f"have more than {MOST_HELD_BYTES >> 20} MiB",
        "bad_json": "are not JSON",
        "surrogate": "hold half of a surrogate pair",
        "no_field": f"have no field for {what!r}",
        "null_field": f"have a null for {what!r}",
        "wrong_type": f"have what is no {'list of messages' if options.is_chat else 'string'} for {what!r}",
        "no_messages": "have no messages",
        "wrong_role": f"have a message whose role is none of {', '.join(ROLES)}",
        "no_assistant": "have nothing that the assistant wrote",
        "control_token": "hold a control token in a message (--allow_special_tokens lets it be one)",
        "template_error": "make the chat template fail",
        "too_many_answers": "have so many answers that rendering takes too long",
        "no_beginning": "read otherwise as parts than as a whole, and the template has no {% generation %}",
        "mojibake": "were read in a wrong encoding and cannot be restored",
    }
    return " or ".join(text for reason, text in words.items() if reason in reasons)


def load_worker(
    plan: Plan,
    folder: Path,
    settings: WorkerSettings,
    *,
    num_cpus: int,
    warn: Callable[[str], None],
    shard: PlannedShard | None = None,
) -> Worker:
    """Load the plan's tokenizer from its folder, for one shard, or for any of them.

    Raises OtherTokenizer where its files or its ids changed.
    """
    plan = plan.at(settings.input_dir)
    load_libraries(
        [item.path for item in plan.inputs] if shard is None else [part.path.name for part in shard.ranges]
    )
    check_tokenizer_files(folder, plan.tokenizer_files)
    if plan.options.changes_text:
        check_text_versions(plan.options)
    if plan.options.is_chat:
        check_chat_versions(plan.options.chat_versions, plan.options.chat_mask_rule)
    engine = load_engine(plan, folder, "tokenizers" if plan.options.is_chat else settings.engine, warn)
    return Worker(plan=plan, folder=folder, settings=settings, engine=engine, num_cpus=num_cpus)


def load_engine(plan: Plan, folder: Path, wanted: EngineName, warn: Callable[[str], None]) -> Engine:
    """The engine of a worker, once it has given the reference's ids for the plan's probe.

    Raises OtherTokenizer where even the reference gives other ids, UsageError where an engine
    that was asked for by name cannot be had.
    """
    path = folder / TOKENIZER_DIR / TOKENIZER_FILE
    if size_of_file(path) is None:
        raise NotFound(f"{path} is missing; run the plan command again, it writes it anew")
    allow, as_planned = plan.options.encodes_control_tokens, plan.options.add_special_tokens
    if wanted != "tokenizers" and (wanted != "auto" or plan.fast_engine_is_equal):
        fast = equal_fast_engine(
            path, allow_special_tokens=allow, texts=plan.probe, expected_sha256=plan.probe_sha256
        )
        if isinstance(fast, Engine):
            return fast if as_planned else fast.bare()
        if wanted != "auto":
            raise UsageError(f"--engine {wanted} fails for {path}: {fast}; use --engine auto")
        warn(f"gigatoken cannot be used for this tokenizer ({fast}); going on with tokenizers, slower")
    engine = tokenizers_engine(path, allow_special_tokens=allow)
    found = ids_sha256([engine.encode(plan.probe)])
    if found != plan.probe_sha256:
        raise OtherTokenizer(
            f"tokenizers {engine.version} encodes the plan's probe to other ids than at planning "
            f"({found[:12]}, expected {plan.probe_sha256[:12]}); install the version that planned, or plan "
            "anew"
        )
    return engine if as_planned else engine.bare()


def finished_manifest(plan: Plan, folder: Path, shard_id: int) -> Manifest | None:
    """Return the manifest of a shard that is done, else None; what attempts at it left is removed.

    Raises OtherPlan where another plan's shard is in the way, BrokenShard for findings that cannot be read.
    """
    manifest = done_manifest(folder, shard_id, plan.plan_id, read_findings(folder, plan.plan_id))
    if manifest is not None:
        remove_leftovers(folder, shard_id)
    return manifest


def missing_shards(plan: Plan, folder: Path, shard_ids: Collection[int]) -> list[int]:
    """Those that are not done. What attempts at the others left is removed, by one look at the folder.

    Raises as ``finished_manifest`` does.
    """
    findings = read_findings(folder, plan.plan_id)
    done = [number for number in shard_ids if done_manifest(folder, number, plan.plan_id, findings)]
    if done:
        remove_temporaries_of(done, folder)
    return sorted({*shard_ids} - {*done})


def _read_ahead(items: Iterator[_Item]) -> Iterator[_Item]:
    """Yield the same items, of which a thread makes the next one meanwhile.

    The gain is what it does without the interpreter's lock: reading, decoding, waiting for a file system. Its
    errors are raised here, in their place in the stream.
    """
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item
