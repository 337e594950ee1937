"""Make one shard: open the plan, load the engine, make the shard, report the result.

``make_shard`` calls ``Worker.run_shard``, which calls ``Worker.make_in``. One thread reads the next batch of
documents, a few threads encode batches and lay out their members, and the main thread writes them in order.

``run_shards`` makes several shards on this machine. Each process loads the tokenizer once, and makes one
shard after the other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

import shardprep
from preprocess.make import resources
from preprocess.make.attempt import finished_manifest
from preprocess.make.chosen_engine import load_engine
from preprocess.make.in_order import in_order
from preprocess.make.log_lines import done_line, input_line
from preprocess.make.pieces import EncodedBatch
from preprocess.make.resources import WorkerSettings
from preprocess.make.token_ids import NO_LOSS
from preprocess.make.writer import ShardWriter
from preprocess.read.documents import DocumentBatch, DocumentReader, advice_about
from preprocess.read.formats import BATCH_BYTES, Texts
from shardprep.console import Progress, counted, quoted, say
from shardprep.errors import BadInput, CannotWrite, ReadWriteError
from shardprep.format import names
from shardprep.format.data_folder import DataFolder
from shardprep.format.documents import BlankedDocuments, are_for_validation, blank_digests, read_blanked
from shardprep.format.inputs import place_text
from shardprep.format.manifest import Manifest, RunFacts
from shardprep.format.plan import Plan, PlannedShard, need_plan
from shardprep.format.plan_options import EngineName
from shardprep.format.spec import BLANK

if TYPE_CHECKING:  # a task of one shard does without them
    pass

_MAX_ENCODERS = 4  # threads that encode and lay out batches; more would wait for the interpreter's lock
_SLURM_VARIABLES = [
    f"SLURM_{name}" for name in ("JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID", "RESTART_COUNT", "CPUS_PER_TASK")
]
OnBatch = Callable[[int, dict[str, int]], None]  # is called with bytes of input, and counts by noun


def make_shard(
    folder: DataFolder, shard_id: int, settings: WorkerSettings, num_cpus: int, memory_note: str | None
) -> int:
    """Make one shard of a folder's plan on the CPUs of this process. Return the exit code."""
    # Open the plan. If the shard is done, nothing else is loaded.
    plan = need_plan(folder).at(settings.input_dir)
    shard = plan.shard(shard_id)
    if finished_manifest(folder, plan.plan_id, shard_id) and not settings.again:
        say(f"shard {shard_id:05d} is done already")
        return 0
    say(input_line(plan, shard))
    if memory_note:
        say(f"note: {memory_note}")
    # Load the engine. This checks the tokenizer's files and ids against the plan.
    worker = Worker(plan, folder, settings, num_cpus=num_cpus, warn=say)
    say(worker.resources_line())
    progress = Progress(f"shard {shard_id:05d}", shard.num_bytes)
    manifest = worker.run_shard(shard, progress.add)
    say(done_line(manifest, folder))
    return 0


class Worker:
    """Makes shards of one plan, with an engine that is loaded once."""

    def __init__(
        self,
        plan: Plan,
        folder: DataFolder,
        settings: WorkerSettings,
        *,
        num_cpus: int,
        warn: Callable[[str], None],
    ) -> None:
        """Load the plan's tokenizer. Raises OtherTokenizer if it changed."""
        self.plan, self.folder, self.settings, self.num_cpus = plan, folder, settings, num_cpus
        self._reader = DocumentReader.open_for_plan(folder, plan.options, settings.transform)
        if plan.options.is_chat:
            from preprocess.read.chat import check_chat_versions

            check_chat_versions(plan.options.chat_versions)
        wanted: EngineName = "tokenizers" if plan.options.is_chat else settings.engine
        self.engine = load_engine(plan, folder, wanted, warn)
        # With little memory, batches are smaller and fewer threads encode: three batches take 0.6 GB.
        memory_bytes = math.inf if settings.memory_gb is None else settings.memory_gb * 2**30
        text_bytes = (memory_bytes - resources.PROCESS_BYTES) / resources.MEMORY_PER_BATCH_BYTE
        self._batch_bytes = int(min(BATCH_BYTES, max(resources.SMALLEST_BATCH_BYTES, text_bytes)))
        # Each thread has a batch. Even two cores get two threads: one encodes while the other lays out.
        num_encoders = min(_MAX_ENCODERS, num_cpus, max(2, num_cpus // 2))
        self._num_encoders = int(max(1, min(num_encoders, text_bytes / BATCH_BYTES)))

    def resources_line(self) -> str:
        """Return a log line with the engine, CPUs, batch size and memory limit."""
        engine, memory_gb = self.engine, self.settings.memory_gb
        memory = "no memory limit" if memory_gb is None else f"memory limit {memory_gb:.2f} GiB"
        slower = "" if engine.name == "gigatoken" or self.plan.options.is_chat else ", the slower engine"
        batches = f"batches of {self._batch_bytes >> 10} KiB of text"
        cpus = counted(self.num_cpus, "CPU")
        return f"{engine.name} {engine.version}{slower}, {cpus}, {batches}, {memory}"

    def run_shard(self, shard: PlannedShard, progress: OnBatch) -> Manifest:
        """Make a shard of the plan, and report each batch to ``progress``.

        If another attempt finished the shard first, which removes this attempt's files, return its manifest.
        Raises BadInput for too many unusable documents, and the errors of reading and writing.
        """
        try:
            return self.make_in(self.folder, shard, progress)
        except (ReadWriteError, CannotWrite):
            manifest = finished_manifest(self.folder, self.plan.plan_id, shard.shard_id)
            # With --again the manifest may be the one that this attempt should replace.
            if manifest is None or self.settings.again:
                raise
            return manifest

    def make_in(
        self, folder: DataFolder, shard: PlannedShard, progress: OnBatch = lambda *_: None
    ) -> Manifest:
        """Make a shard in ``folder``: the plan's, or a temporary one, as ``verify --deep`` does."""
        began, wall_began, cpu_began = time.time(), time.monotonic(), time.process_time()
        plan, options, transform = self.plan, self.plan.options, self._reader.transform
        transform_began_s = transform.cpu_s if transform else 0.0
        render_began_s = self._render_cpu_s()
        batches = self._reader.read_shard(shard, self._batch_bytes)
        if (most := self.settings.max_batch_documents) is not None:
            batches = itertools.chain.from_iterable(batch.parts(most) for batch in batches)
        writer = ShardWriter(folder, plan.spec, options, shard.shard_id)
        blanked = None
        if options.blanked and shard.shard_id in names.ids_of_ranges(options.blanked):
            blanked = read_blanked(self.folder, plan.plan_id, shard.shard_id)
        encode = functools.partial(self._encode_and_lay_out, writer, blanked)
        with contextlib.closing(in_order(encode, batches, self._num_encoders)) as encoded, writer:
            for batch in encoded:
                writer.append(batch)
                num_documents, num_tokens = len(batch.documents.lines), len(batch.tokens.ids)
                progress(batch.documents.num_bytes, {"documents": num_documents, "tokens": num_tokens})
                del batch  # free its part of the tar, up to 11 MB, before the next batch
            self._check_bad_fraction(writer, shard.shard_id)
            render_cpu_s = self._render_cpu_s() - render_began_s
            facts = RunFacts(
                engine=f"{self.engine.name} {self.engine.version}",
                shardprep=shardprep.__version__,
                python=platform.python_version(),
                host=os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
                slurm={name: os.environ[name] for name in _SLURM_VARIABLES if name in os.environ},
                num_cpus=self.num_cpus,
                began=round(began, 3),
                wall_s=round(time.monotonic() - wall_began, 3),
                cpu_s=round(time.process_time() - cpu_began + render_cpu_s, 3),
                max_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                transform_cpu_s=round(transform.cpu_s - transform_began_s, 3) if transform else 0.0,
                libraries=transform.versions() if transform else {},
                render_cpu_s=round(render_cpu_s, 3),
            )
            return writer.commit(
                facts, unblanked_sha256=None if blanked is None else blanked.unblanked_sha256
            )

    def _render_cpu_s(self) -> float:
        """Return the CPU time that rendering conversations has taken so far, in a process of its own."""
        if not self.plan.options.is_chat:
            return 0.0
        from preprocess.read import chat

        return chat.cpu_s()

    def _encode_and_lay_out(
        self, writer: ShardWriter, blanked: BlankedDocuments | None, documents: DocumentBatch
    ) -> EncodedBatch:
        """Encode a batch and lay out its members. Runs in a thread: depends on no other batch."""
        plan, mask_rule = self.plan, self.plan.options.chat_mask_rule
        tokens = self.engine.encode_documents(documents, end_id=plan.end_id, mask_rule=mask_rule)
        if blanked is None:
            return writer.lay_out(documents, tokens)
        # The token ids of a blanked document become BLANK; its text, id and digest are removed. All documents
        # are counted as before, so the counts equal those of the shard that this one replaces.
        is_blanked = blanked.are_at(documents.input_number, documents.offsets)
        blank_ids = np.uint32(BLANK)
        if plan.options.is_chat:  # keep the loss mask
            blank_ids = (tokens.ids & NO_LOSS) | blank_ids
        ids = np.where(np.repeat(is_blanked, np.diff(tokens.offsets)), blank_ids, tokens.ids)
        digests = None
        if plan.options.digests:
            digests = documents.digests()
            sides = are_for_validation(digests, plan.spec.validation_fraction)
            digests = np.where(is_blanked, blank_digests(sides), digests)
        columns = dict(documents.columns)
        if "id" in columns:
            ids_of = zip(columns["id"], is_blanked, strict=True)
            columns["id"] = ["" if blank else name for name, blank in ids_of]
        texts = [b"" if blank else text for text, blank in zip(documents.texts, is_blanked, strict=True)]
        batch = writer.lay_out(replace(documents, texts=Texts(texts)), replace(tokens, ids=ids), digests)
        return batch._replace(documents=replace(documents, columns=columns))

    def _check_bad_fraction(self, writer: ShardWriter, shard_id: int) -> None:
        """Raise BadInput if too many documents were left out; the quarantine file lists them."""
        limit, counting = self.settings.max_bad_fraction, writer.counting
        limit = self.plan.max_bad_fraction if limit is None else limit
        quarantine = writer.quarantine() if counting.bad_fraction > limit else None
        if quarantine is None:
            return
        quarantine.sync()
        quarantine.publish()
        bad = [each for each in counting.bad if not names.is_chosen(each.reason)]
        found, expected = f"{counting.bad_fraction:.2%}", f"{limit:.2%}"
        # First how to look at them, then how to mend them, and last how to accept the loss.
        remedy = f"head -n 3 {quoted(quarantine.path)}"
        advice = " ".join(advice_about(bad, self.plan.options))
        if counting.bad_fraction < 1:
            enough = min(int(counting.bad_fraction * 100) + 1, 100) / 100
            advice += f" To accept the loss: --max_bad_fraction {enough:g}"
        message = (
            f"shard {shard_id:05d}: {counted(len(counting.bad), 'document')} ({found}) left out "
            f"({', '.join(sorted(counting.bad_reasons))}), the limit is {expected}. The first is "
            f"{place_text(bad[0].input, bad[0].input_offset)}: {bad[0].detail}. To see them, run: "
            f"{remedy}. {advice}"
        )
        fields = {"found": found, "expected": expected, "advice": advice, "remedy": remedy}
        raise BadInput(message, path=quarantine.path, **fields)
