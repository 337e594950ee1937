"""Makes one shard, by one chain of generators: read -> encode and lay out -> write -> manifest.

Threads share the work: one reads the next batch, some take a batch each, encode it, with the engine's own
threads, and lay it out, and this one writes the batches in their order. All but the encoding is Python and
numpy, which share the interpreter's lock for a part of the time: see benchmarks/results.md.
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
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

import shardprep
from preprocess.make.counting import Counting
from preprocess.make.engines import (
    NO_LOSS,
    Engine,
    TokenBatch,
    equal_fast_engine,
    ids_sha256,
    tokenizers_engine,
)
from preprocess.make.members import Batch, Members, members_of
from preprocess.make.resources import WorkerSettings
from preprocess.make.shard_writer import ShardWriter, remove_leftovers, remove_temporaries_of
from preprocess.read import BATCH_BYTES
from preprocess.read.chat import ROLES, check_chat_versions
from preprocess.read.documents import Documents, load_libraries, read_documents
from preprocess.read.format import MOST_DOCUMENT_BYTES
from preprocess.read.transform import Transform, transform_of
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
from shardprep.format.dataset_spec import BLANK
from shardprep.format.digests import are_for_validation
from shardprep.format.document_names import read_excluded
from shardprep.format.done import done_manifest, read_findings
from shardprep.format.manifest import Manifest
from shardprep.format.names import TOKENIZER_DIR
from shardprep.format.options import EngineName, PlanOptions
from shardprep.format.plan import Plan, PlannedShard
from shardprep.format.tokenizer_files import TOKENIZER_FILE, check_tokenizer_files

_MOST_MAKERS = 4  # threads that encode and lay out; more would wait for the interpreter's lock

Given = TypeVar("Given")
Made = TypeVar("Made")
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
        """Return all of a shard."""
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
    transform: Transform | None = None  # that documents go through

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
        transform_began_s = self.transform.cpu_s if self.transform else 0.0
        options, spec, settings = self.plan.options, self.plan.spec, self.settings
        # Threads that take a batch each: two on two cores, so that one encodes while the other prepares.
        num_makers = min(_MOST_MAKERS, self.num_cpus, max(2, self.num_cpus // 2), settings.most_batches)
        digest = None if shard.sha256 is None else hashlib.sha256()
        documents = documents_of_shard(
            self.plan,
            self.folder,
            shard,
            batch_bytes=settings.batch_bytes,
            digest=digest,
            transform=self.transform,
        )
        if settings.most_documents is not None:
            documents = (part for batch in documents for part in batch.parts(settings.most_documents))
        members = members_of(spec, shard.shard_id, options)
        blanked: BlankedDocuments | None = None
        if shard.shard_id in blanked_shards(options.blanked):
            blanked = read_blanked(self.folder, self.plan.plan_id, shard.shard_id)
        make = functools.partial(self._encode_and_lay_out, members, blanked)
        with (
            ThreadPoolExecutor(1) as reader,
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
            # As many batches as there are makers, and one more, wait to be written.
            for batch in _in_threads(makers, make, _read_ahead(reader, documents), num_makers + 1):
                writer.append(batch)
                num_documents, num_tokens = len(batch.documents.texts), len(batch.tokens.ids)
                progress(Work(batch.documents.num_bytes, num_documents, num_tokens))
                del batch  # a tar's share of it may be 11 MB, which else wait for the next one
            if digest is not None and digest.hexdigest() != shard.sha256:
                raise self._changed_input(shard, digest.hexdigest())
            self._check_bad_fraction(writer, shard.shard_id)
            made_from = None if blanked is None else blanked.made_from
            facts = self._run_facts(began, cpu_began)
            if self.transform is not None:
                facts["transform_cpu_s"] = round(self.transform.cpu_s - transform_began_s, 3)
            return writer.commit(facts, made_from=made_from)

    def _encode_and_lay_out(
        self, members: Members, blanked: BlankedDocuments | None, documents: Documents
    ) -> Batch:
        """Make a batch ready to be written. Runs in a thread: depends on no other batch."""
        plan = self.plan
        tokens = self.engine.encode_documents(
            documents, end_id=plan.end_id, mask_rule=plan.options.chat_mask_rule
        )
        if blanked is not None:
            is_blanked = blanked.are_at(documents.input_number, documents.offsets)
            if is_blanked.any():
                return _blanked_batch(members, documents, tokens, is_blanked, plan)
        return members.lay_out(documents, tokens)

    def _changed_input(self, shard: PlannedShard, found: str) -> Refused:
        paths = sorted({self.plan.inputs[number].path for number in shard.input_numbers})
        names = ", ".join(paths[:3]) + (" ..." if len(paths) > 3 else "")
        return Refused(
            f"the input of shard {shard.shard_id:05d} ({names}) changed since it was planned: sha256 "
            f"{found[:12]}, the plan says {str(shard.sha256)[:12]}; bring the file back, or plan anew into a "
            "new folder"
        )

    def _check_bad_fraction(self, writer: ShardWriter, shard_id: int) -> None:
        given, counting = self.settings.max_bad_fraction, writer.counting
        limit = self.plan.max_bad_fraction if given is None else given
        if counting.bad_fraction <= limit or (quarantine := writer.quarantine()) is None:
            return
        quarantine.sync()
        quarantine.publish()
        raise _too_many_bad(self.plan.options, counting, shard_id, limit, quarantine.path)

    def _run_facts(self, began: float, cpu_began: float) -> dict[str, Any]:
        """Return what may differ between equal shards; for reports, never for decisions."""
        return {
            "engine": f"{self.engine.name} {self.engine.version}",
            "shardprep": shardprep.__version__,
            "python": platform.python_version(),
            "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "slurm": {name: os.environ[name] for name in _SLURM_FACTS if name in os.environ},
            "num_cpus": self.num_cpus,
            "began": round(began, 3),
            "wall_s": round(time.time() - began, 3),
            "cpu_s": round(time.process_time() - cpu_began, 3),
            "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def _too_many_bad(
    options: PlanOptions, counting: Counting, shard_id: int, limit: float, quarantine: Path
) -> BadInput:
    reasons, hint = counting.bad_reasons, ""
    if "undecodable" in reasons:
        hint = "Is it another --encoding? "
    elif reasons & _OTHER_FIELD:
        hint = "Is it another --text_field? "
    first = next((bad.detail for bad in counting.bad if bad.reason == "transform_error"), "")
    if first:
        hint = f"The function failed first so: {first}. "
    return BadInput(
        f"shard {shard_id:05d}: {counted(len(counting.bad), 'document')} ({counting.bad_fraction:.2%}) "
        f"{bad_words(options, reasons)}, the limit is {limit:.2%}; they are named in {quarantine}. "
        f"{hint}Otherwise mend the input and plan anew, or accept them: --max_bad_fraction",
        path=quarantine,
        found=f"{counting.bad_fraction:.2%}",
        expected=f"{limit:.2%}",
        remedy="--max_bad_fraction",
    )


def documents_of_shard(
    plan: Plan,
    folder: Path,
    shard: PlannedShard,
    *,
    batch_bytes: int = BATCH_BYTES,
    digest: hashlib._Hash | None = None,
    transform: Transform | None = None,
) -> Iterator[Documents]:
    """Yield the documents of a shard's input, without those that the plan excludes."""
    excluded = plan.options.excluded
    return read_documents(
        shard.ranges,
        plan.options,
        batch_bytes=batch_bytes,
        digest=digest,
        most_documents=shard.most_documents,
        excluded=_excluded(folder, excluded) if excluded else None,
        transform=transform,
    )


_excluded = functools.lru_cache(maxsize=1)(read_excluded)  # the same for all shards


def _blanked_batch(
    members: Members,
    documents: Documents,
    tokens: TokenBatch,
    is_blanked: npt.NDArray[np.bool_],
    plan: Plan,
) -> Batch:
    """Lay out a batch of which some documents are blanked: as many BLANKs as they have ids, nothing else.

    What is counted is that of the documents, as in the shard that this one is made from.
    """
    columns = dict(documents.columns)
    if "id" in columns:
        ids = zip(columns["id"], is_blanked.tolist(), strict=True)
        columns["id"] = ["" if blank else name for name, blank in ids]
    texts = zip(documents.texts, is_blanked.tolist(), strict=True)
    laid_out = dataclasses.replace(documents, texts=[b"" if blank else text for text, blank in texts])
    blank_ids = np.uint32(BLANK)
    if plan.options.is_chat:  # the loss mask stays as it is
        blank_ids = (tokens.ids & NO_LOSS) | blank_ids
    ids_or_blank = np.where(np.repeat(is_blanked, np.diff(tokens.offsets)), blank_ids, tokens.ids)
    batch = members.lay_out(laid_out, dataclasses.replace(tokens, ids=ids_or_blank))
    digests = batch.digests
    if len(digests):
        digests = documents.digests()
        sides = are_for_validation(digests, plan.spec.validation_fraction)
        digests = np.where(is_blanked, blank_digests(sides), digests)
    return batch._replace(
        documents=dataclasses.replace(documents, columns=columns),
        digests=digests,
        piece=batch.piece and batch.piece._replace(digests=digests),
    )


def bad_words(options: PlanOptions, reasons: set[str]) -> str:
    """Return why documents are left out, as the end of a sentence."""
    what = options.text_template or options.text_field
    words = {
        "undecodable": f"cannot be decoded as {options.encoding}",
        "too_long": f"have more than {MOST_DOCUMENT_BYTES >> 20} MiB",
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
        "transform_error": "make the function of --transform fail",
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
    transform = transform_of(plan.options, settings.transform)
    if plan.options.is_chat:
        check_chat_versions(plan.options.chat_versions)
    engine = load_engine(plan, folder, "tokenizers" if plan.options.is_chat else settings.engine, warn)
    return Worker(
        plan=plan, folder=folder, settings=settings, engine=engine, num_cpus=num_cpus, transform=transform
    )


def load_engine(plan: Plan, folder: Path, wanted: EngineName, warn: Callable[[str], None]) -> Engine:
    """Return the engine of a worker, once it has given the reference's ids for the plan's probe.

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
    found = ids_sha256([engine.encode_texts(plan.probe)])
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
    manifest = done_manifest(folder, shard_id, plan.plan_id)
    if manifest is not None:
        remove_leftovers(folder, shard_id)
    return manifest


def missing_shards(plan: Plan, folder: Path, shard_ids: Collection[int]) -> list[int]:
    """Return those that are not done. What attempts at the others left is removed, by one look at the folder.

    Raises as ``finished_manifest`` does.
    """
    findings = read_findings(folder, plan.plan_id)
    done = [number for number in shard_ids if done_manifest(folder, number, plan.plan_id, findings)]
    if done:
        remove_temporaries_of(done, folder)
    return sorted({*shard_ids} - {*done})


def _read_ahead(pool: ThreadPoolExecutor, items: Iterator[Made]) -> Iterator[Made]:
    """Yield the same items, of which a thread makes the next one meanwhile.

    The gain is what it does without the interpreter's lock: reading, decoding, waiting for a file system. Its
    errors are raised here, in their place in the stream.
    """
    coming = pool.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = pool.submit(next, items, None)
        yield item


def _in_threads(
    pool: ThreadPoolExecutor, make: Callable[[Given], Made], items: Iterable[Given], num_ahead: int
) -> Iterator[Made]:
    """Yield what ``make`` makes of each item, in order; threads are up to ``num_ahead`` items ahead."""
    coming: deque[Future[Made]] = deque()
    for item in items:
        coming.append(pool.submit(make, item))
        if len(coming) > num_ahead:
            yield coming.popleft().result()
    while coming:
        yield coming.popleft().result()
