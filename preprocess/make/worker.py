"""Make one shard: open the plan, load the engine, make the shard, report the result.

``make_shard`` calls ``Worker.run_shard``, which calls ``Worker.make_in``. One thread reads the next batch of
documents, a few threads encode batches and lay out their members, and the main thread writes them in order.
With helpers (``helpers``), processes do the work of these threads. ``many`` makes several shards.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import resource
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, NamedTuple

import shardprep
from preprocess.make import shared_work
from preprocess.make.attempt import clean_if_done
from preprocess.make.chosen_engine import load_engine
from preprocess.make.encoding import BatchEncoder, read_blanked_of
from preprocess.make.in_order import in_order
from preprocess.make.layout import BatchLayout
from preprocess.make.log_lines import done_line, input_line
from preprocess.make.pieces import EncodedBatch
from preprocess.make.settings import WorkerSettings
from preprocess.make.stretches import jobs_of
from preprocess.make.writer import ShardWriter
from preprocess.read.documents import DocumentReader, advice_about
from shardprep.console import Progress, counted, quoted, say
from shardprep.errors import BadInput, CannotWrite, ReadWriteError
from shardprep.format.data_folder import DataFolder
from shardprep.format.inputs import place_text
from shardprep.format.manifest import Manifest, RunFacts
from shardprep.format.plan import Plan, PlannedShard, need_plan
from shardprep.format.plan_options import EngineName

if TYPE_CHECKING:
    from typing_extensions import Self

    from preprocess.make.helper_server import HelperFacts
    from preprocess.make.helpers import Helpers

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
    if clean_if_done(folder, plan.plan_id, shard_id) and not settings.again:
        say(f"shard {shard_id:05d} is done already")
        return 0
    say(input_line(plan, shard))
    if memory_note:
        say(f"note: {memory_note}")
    # Load the engine. This checks the tokenizer's files and ids against the plan.
    with Worker(plan, folder, settings, num_cpus=num_cpus, warn=say, first_shard=shard) as worker:
        say(worker.resources_line())
        progress = Progress(f"shard {shard_id:05d}", shard.num_bytes)
        manifest = worker.run_shard(shard, progress.add)
    say(done_line(manifest, folder))
    return 0


class _Begin(NamedTuple):
    """The clocks when a shard was begun."""

    at: float  # seconds since 1970
    wall_s: float
    cpu_s: float  # of this process
    render_cpu_s: float  # of the process that renders conversations
    transform_cpu_s: float  # of the user's function, if it runs in this process


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
        first_shard: PlannedShard | None = None,
    ) -> None:
        """Load the plan's tokenizer. Raises OtherTokenizer if it changed.

        ``first_shard``: the first one to make. If it is large enough, and there are several CPUs, helper
        processes share the work on each shard.
        """
        self.plan = plan
        self.folder = folder
        self.settings = settings
        self.num_cpus = num_cpus
        num_helpers = 0
        if first_shard is not None:
            num_helpers = shared_work.num_helpers(plan, first_shard, settings, num_cpus)
        # Helpers read the input themselves, each with a reader of its own.
        self._reader: DocumentReader | None = None
        if not num_helpers:
            self._reader = DocumentReader.open_for_plan(folder, plan.options, settings.transform)
        if plan.options.is_chat:
            from preprocess.read import chat

            chat.check_chat_versions(plan.options.chat_versions)
            chat.use_processes(shared_work.num_renderers(settings, num_cpus))
        wanted: EngineName = "tokenizers" if plan.options.is_chat else settings.engine
        self.engine = load_engine(plan, folder, wanted, warn)
        self._num_encoders, self._batch_bytes = shared_work.encoders_and_batch_bytes(plan, settings, num_cpus)
        self._helpers: Helpers | None = None
        if num_helpers and self.engine.can_fork:
            from preprocess.make.helpers import Helpers  # with multiprocessing, 20 ms that most tasks save

            self._helpers = Helpers(
                plan, folder, settings, self.engine, num_helpers=num_helpers, batch_bytes=self._batch_bytes
            )
        elif num_helpers:
            self._reader = DocumentReader.open_for_plan(folder, plan.options, settings.transform)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._helpers is not None:
            self._helpers.end()

    @property
    def has_helpers(self) -> bool:
        return self._helpers is not None

    def resources_line(self) -> str:
        """Return a log line with the engine, CPUs, batch size and memory limit."""
        engine = self.engine
        memory_gb = self.settings.memory_gb
        memory = "no memory limit" if memory_gb is None else f"memory limit {memory_gb:.2f} GiB"
        slower = "" if engine.name == "gigatoken" or self.plan.options.is_chat else ", the slower engine"
        batches = f"batches of {self._batch_bytes >> 10} KiB of text"
        cpus = counted(self.num_cpus, "CPU")
        if self._helpers is not None:
            cpus += f" with {counted(self._helpers.number, 'helper')}"
        return f"{engine.name} {engine.version}{slower}, {cpus}, {batches}, {memory}"

    def run_shard(self, shard: PlannedShard, progress: OnBatch) -> Manifest:
        """Make a shard of the plan, and report each batch to ``progress``.

        If another attempt finished the shard first, which removes this attempt's files, return its manifest.
        Raises BadInput for too many unusable documents, and the errors of reading and writing.
        """
        try:
            return self.make_in(self.folder, shard, progress)
        except (ReadWriteError, CannotWrite):
            manifest = clean_if_done(self.folder, self.plan.plan_id, shard.shard_id)
            # With --again the manifest may be the one that this attempt should replace.
            if manifest is None or self.settings.again:
                raise
            return manifest

    def make_in(
        self, folder: DataFolder, shard: PlannedShard, progress: OnBatch = lambda *_: None
    ) -> Manifest:
        """Make a shard in ``folder``: the plan's, or a temporary one, as ``verify --deep`` does."""
        begin = self._begin()
        plan = self.plan
        writer = ShardWriter(folder, plan.spec, plan.options, shard.shard_id, writes_behind=self.has_helpers)
        layout = BatchLayout(plan.spec, plan.options, shard.shard_id)
        blanked = read_blanked_of(plan, self.folder, shard.shard_id)
        encoder = BatchEncoder(plan=plan, engine=self.engine, layout=layout, blanked=blanked)
        with contextlib.closing(self._encoded(shard, encoder)) as encoded, writer:
            for batch in encoded:
                writer.append(batch)
                counts = batch.counts
                amounts = {"documents": counts.num_documents, "tokens": counts.num_tokens}
                progress(counts.num_bytes, amounts)
                del batch  # free its bytes of the tar, up to 11 MB, before the next batch
            self._check_bad_fraction(writer, shard.shard_id)
            return writer.commit(self._facts_since(begin), blanked=blanked)

    def _begin(self) -> _Begin:
        """Return the clocks as they stand now."""
        transform_cpu_s = 0.0
        if self._reader is not None and self._reader.transform is not None:
            transform_cpu_s = self._reader.transform.cpu_s
        return _Begin(
            at=time.time(),
            wall_s=time.monotonic(),
            cpu_s=time.process_time(),
            render_cpu_s=self._render_cpu_s(),
            transform_cpu_s=transform_cpu_s,
        )

    def _facts_since(self, begin: _Begin) -> RunFacts:
        """Return how the shard was made, and what that took in all processes since it was begun."""
        used = self._used(begin.transform_cpu_s)
        render_cpu_s = self._render_cpu_s() - begin.render_cpu_s
        helpers_cpu_s = sum(each.cpu_s for each in used)
        own_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        libraries: dict[str, str] = {}  # of the user's function
        for each in used:
            libraries.update(each.libraries)
        return RunFacts(
            engine=f"{self.engine.name} {self.engine.version}",
            shardprep=shardprep.__version__,
            python=platform.python_version(),
            host=os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
            slurm={name: os.environ[name] for name in _SLURM_VARIABLES if name in os.environ},
            num_cpus=self.num_cpus,
            began=round(begin.at, 3),
            wall_s=round(time.monotonic() - begin.wall_s, 3),
            cpu_s=round(time.process_time() - begin.cpu_s + render_cpu_s + helpers_cpu_s, 3),
            max_rss_bytes=own_rss_bytes + sum(each.grown_bytes for each in used),
            transform_cpu_s=round(sum((each.transform_cpu_s for each in used), 0.0), 3),
            libraries=libraries,
            render_cpu_s=round(render_cpu_s, 3),
        )

    def _render_cpu_s(self) -> float:
        """Return the CPU time that rendering conversations has taken so far, in a process of its own."""
        if not self.plan.options.is_chat:
            return 0.0
        from preprocess.read import chat

        return chat.cpu_s()

    def _encoded(self, shard: PlannedShard, encoder: BatchEncoder) -> Generator[EncodedBatch, None, None]:
        """Yield the encoded batches of a shard in order, from helpers or from threads of this process."""
        if self._helpers is not None:
            size = shared_work.stretch_bytes(self.plan, self.settings)
            jobs = jobs_of(shard, self.plan.options, size, self._batch_bytes)
            return self._helpers.encoded(shard.shard_id, jobs)
        assert self._reader is not None  # it has one if it has no helpers
        batches = self._reader.read_shard(shard, self._batch_bytes)
        most = self.settings.max_batch_documents
        if most is not None:
            batches = itertools.chain.from_iterable(batch.split(most) for batch in batches)
        return in_order(encoder.encode, batches, self._num_encoders)

    def _used(self, transform_began_s: float) -> list[HelperFacts]:
        """Return what helpers, and the user's function in this process, used for a shard."""
        if self._helpers is not None:
            return self._helpers.facts()
        if self._reader is None or self._reader.transform is None:
            return []
        transform = self._reader.transform
        from preprocess.make.helper_server import HelperFacts

        used_s = transform.cpu_s - transform_began_s
        return [HelperFacts(cpu_s=0, grown_bytes=0, transform_cpu_s=used_s, libraries=transform.versions())]

    def _check_bad_fraction(self, writer: ShardWriter, shard_id: int) -> None:
        """Raise BadInput if too many documents were left out. The quarantine file lists them."""
        counting = writer.counting
        limit = self.settings.max_bad_fraction
        if limit is None:
            limit = self.plan.max_bad_fraction
        if not counting.bad or counting.bad_fraction <= limit:
            return
        quarantine = writer.publish_quarantine()
        bad = counting.unusable
        found = f"{counting.bad_fraction:.2%}"
        expected = f"{limit:.2%}"
        # First how to look at them, then how to mend them, and last how to accept the loss.
        remedy = f"head -n 3 {quoted(quarantine)}"
        advice = " ".join(advice_about(bad, self.plan.options))
        if counting.bad_fraction < 1:
            enough = min(int(counting.bad_fraction * 100) + 1, 100) / 100
            advice += f" To accept the loss: --max_bad_fraction {enough:g}"
        message = (
            f"shard {shard_id:05d}: {counted(len(bad), 'document')} ({found}) left out "
            f"({', '.join(sorted(counting.bad_reasons))}), the limit is {expected}. The first is "
            f"{place_text(bad[0].input, bad[0].input_offset)}: {bad[0].detail}. To see them, run: "
            f"{remedy}. {advice}"
        )
        fields = {"found": found, "expected": expected, "advice": advice, "remedy": remedy}
        raise BadInput(message, path=quarantine, **fields)
