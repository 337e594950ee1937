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
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

import shardprep
from preprocess.make import engines, resources
from preprocess.make.engines import Engine
from preprocess.make.resources import WorkerSettings
from preprocess.make.shard_writer import EncodedBatch, ShardWriter, finished_manifest
from preprocess.read.documents import DocumentBatch, DocumentReader, advice_about
from preprocess.read.formats import BATCH_BYTES, Texts
from shardprep.console import Progress, counted, guard_streams, quoted, say, short_bytes, short_number
from shardprep.errors import BadInput, CannotWrite, OtherTokenizer, ReadWriteError, ShardprepError, UsageError
from shardprep.format import names
from shardprep.format.data_folder import DataFolder
from shardprep.format.documents import BlankedDocuments, are_for_validation, blank_digests, read_blanked
from shardprep.format.manifest import Manifest, RunFacts
from shardprep.format.plan import (
    EngineName,
    Plan,
    PlannedShard,
    check_tokenizer_files,
    need_plan,
)

if TYPE_CHECKING:  # a task of one shard does without them
    from shardprep.format.jobs import Failure

_MAX_ENCODERS = 4  # threads that encode and lay out batches; more would wait for the interpreter's lock
_MAX_NAMED_INPUTS = 3  # of a shard, in the log
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


def input_line(plan: Plan, shard: PlannedShard) -> str:
    """Return a log line with the input files of a shard, and the byte range of each one that is not whole."""
    inputs = []
    for byte_range in shard.ranges:
        item = plan.inputs[byte_range.input_number]
        line = item.path
        if (byte_range.start, byte_range.end) != (0, item.num_bytes):
            # "file bytes": here the offsets of documents are rows, or bytes of the decompressed text.
            unit = "bytes" if byte_range.kind.is_in_bytes else "file bytes"
            line += f" {unit} {byte_range.start} to {byte_range.end}"
        inputs.append(line)
    if len(inputs) > _MAX_NAMED_INPUTS:
        inputs = [*inputs[: _MAX_NAMED_INPUTS - 1], "...", f"{inputs[-1]} ({len(inputs)} files)"]
    amount = f"{short_bytes(shard.num_bytes)} of {plan.input_dir}: {', '.join(inputs)}"
    return f"shard {shard.shard_id:05d} of {plan.num_shards}: {amount if inputs else 'no input'}"


def done_line(manifest: Manifest, folder: DataFolder) -> str:
    """Return a log line with the counts of a finished shard, its speed and its cost."""
    run, counts, shard_id = manifest.run, manifest.counts, manifest.shard_id
    facts = [amounts_line(counts.input_bytes, counts.num_documents, counts.num_tokens, run.wall_s)]
    if left_out := sum(counts.quarantined.values()):
        facts.append(
            f"{counted(left_out, 'document')} left out: {folder.path_of(names.quarantine_name(shard_id))}"
        )
    facts.append(f"{run.cpu_s:.1f} s of CPU")
    if run.transform_cpu_s:
        facts.append(f"{run.transform_cpu_s:.1f} of them in --transform")
    facts.append(f"{short_bytes(run.max_rss_bytes)} of memory")
    facts.append(f"a tar of {short_bytes(manifest.tar.num_bytes)}")
    return f"shard {shard_id:05d} is done: {', '.join(facts)}"


def amounts_line(num_bytes: int, num_documents: int, num_tokens: int, wall_s: float) -> str:
    """Return documents and tokens with their time, and the rates of input bytes and tokens per second."""
    amounts = f"{counted(num_documents, 'document')}, {counted(num_tokens, 'token')} in {wall_s:.1f} s"
    wall_s = max(wall_s, 1e-3)
    return f"{amounts} ({short_bytes(num_bytes / wall_s)}/s, {short_number(num_tokens / wall_s)} tokens/s)"


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
        batches = self._reader.read_shard(shard, self._batch_bytes)
        if (most := self.settings.max_batch_documents) is not None:
            batches = itertools.chain.from_iterable(batch.parts(most) for batch in batches)
        writer = ShardWriter(folder, plan.spec, options, shard.shard_id)
        blanked = None
        if options.blanked and shard.shard_id in names.ids_of_ranges(options.blanked):
            blanked = read_blanked(self.folder, plan.plan_id, shard.shard_id)
        encode = functools.partial(self._encode_and_lay_out, writer, blanked)
        with contextlib.closing(_in_order(encode, batches, self._num_encoders)) as encoded, writer:
            for batch in encoded:
                writer.append(batch)
                num_documents, num_tokens = len(batch.documents.lines), len(batch.tokens.ids)
                progress(batch.documents.num_bytes, {"documents": num_documents, "tokens": num_tokens})
                del batch  # free its part of the tar, up to 11 MB, before the next batch
            self._check_bad_fraction(writer, shard.shard_id)
            facts = RunFacts(
                engine=f"{self.engine.name} {self.engine.version}",
                shardprep=shardprep.__version__,
                python=platform.python_version(),
                host=os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
                slurm={name: os.environ[name] for name in _SLURM_VARIABLES if name in os.environ},
                num_cpus=self.num_cpus,
                began=round(began, 3),
                wall_s=round(time.monotonic() - wall_began, 3),
                cpu_s=round(time.process_time() - cpu_began, 3),
                max_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                transform_cpu_s=round(transform.cpu_s - transform_began_s, 3) if transform else 0.0,
                libraries=transform.versions() if transform else {},
            )
            return writer.commit(
                facts, unblanked_sha256=None if blanked is None else blanked.unblanked_sha256
            )

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
        blank_ids = np.uint32(names.BLANK)
        if plan.options.is_chat:  # keep the loss mask
            blank_ids = (tokens.ids & engines.NO_LOSS) | blank_ids
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
            f"{names.place_text(bad[0].input, bad[0].input_offset)}: {bad[0].detail}. To see them, run: "
            f"{remedy}. {advice}"
        )
        fields = {"found": found, "expected": expected, "advice": advice, "remedy": remedy}
        raise BadInput(message, path=quarantine.path, **fields)


def load_engine(plan: Plan, folder: DataFolder, wanted: EngineName, warn: Callable[[str], None]) -> Engine:
    """Return an engine that gives the planned ids for the plan's probe.

    Raises OtherTokenizer if the tokenizer's files changed, or if even the reference gives other ids.
    Raises UsageError if ``wanted`` cannot be used.
    """
    path = folder.path_of(f"{names.TOKENIZER_DIR}/{names.TOKENIZER_FILE}")
    options, probe, expected = plan.options, Texts.of_strings(plan.probe), plan.probe_sha256
    allow = options.encodes_control_tokens
    if wanted == "gigatoken" or (wanted == "auto" and plan.fast_engine_is_equal):
        has_fast_file = names.FAST_TOKENIZER_FILE in plan.tokenizer_files
        name = names.FAST_TOKENIZER_FILE if has_fast_file else names.TOKENIZER_FILE
        content = check_tokenizer_files(folder, plan.tokenizer_files, name)
        fast = engines.equal_fast_engine(content, path, probe, expected, allow_special_tokens=allow)
        if isinstance(fast, Engine):
            return fast if options.add_special_tokens else fast.bare()
        if wanted == "gigatoken":
            raise UsageError(f"--engine {wanted} fails for {path}: {fast}; use --engine auto")
        warn(f"gigatoken cannot be used for this tokenizer ({fast}); using tokenizers, which is slower")
    content = check_tokenizer_files(folder, plan.tokenizer_files, names.TOKENIZER_FILE)
    tokenizer = engines.load_tokenizer(path, content)
    engine = engines.reference_engine(tokenizer, allow_special_tokens=allow, name=str(path))
    found = engines.ids_sha256([engine.encode(probe)])
    if found != expected:
        ids = f"other ids ({found[:12]}, expected {expected[:12]}) than at planning"
        what = f"tokenizers {engine.version} encodes the plan's probe to {ids}"
        raise OtherTokenizer(f"{what}; install the version that planned, or plan again")
    return engine if options.add_special_tokens else engine.bare()


def _in_order(
    encode: Callable[[DocumentBatch], EncodedBatch], batches: Iterator[DocumentBatch], num_encoders: int
) -> Generator[EncodedBatch, None, None]:
    """Call ``encode`` on each batch in threads, and yield the results in order.

    Another thread reads the next batch: file reads and decompression release the interpreter's lock. At most
    ``num_encoders`` + 2 batches are submitted and not yet yielded, which bounds the memory.
    """
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(num_encoders) as encoders:
        pending: deque[Future[EncodedBatch]] = deque()
        next_batch = reader.submit(next, batches, None)
        while (documents := next_batch.result()) is not None:
            next_batch = reader.submit(next, batches, None)
            pending.append(encoders.submit(encode, documents))
            if len(pending) > num_encoders + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# Several shards on this machine. -------------------------------------------------------------------------


class _Process:
    """A worker process, and the shard that it is making."""

    shard_id = -1
    pipe: Any = None
    _child: Any = None

    def __init__(self, *args: Any) -> None:
        self._args = args  # of _serve

    def send(self, shard_id: int) -> None:
        """Send a shard to the process, which is started if needed."""
        from multiprocessing import Pipe

        from shardprep.child_process import start_child

        self.shard_id = shard_id
        if self._child is None:
            self.pipe, theirs = Pipe()
            self._child = start_child(_serve, *self._args, theirs)
            theirs.close()
        with contextlib.suppress(BrokenPipeError):  # it died while idle: ``receive`` reports that
            self.pipe.send(shard_id)

    def receive(self) -> Any:
        """Return the next event: arguments of OnBatch, a Manifest, a Failure, or a line to print."""
        from shardprep.format.jobs import Failure

        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            code = self.end()
            how = f"killed by signal {-code} (out of memory?)" if code < 0 else f"ended with exit code {code}"
            return Failure.of(self.shard_id, ReadWriteError(f"its process was {how}"))

    def end(self, *, at_once: bool = False) -> int:
        """Let the process end, by SIGTERM if ``at_once``, and return its exit code."""
        child, self._child = self._child, None
        if child is None:
            return 0
        if at_once:
            child.terminate()
        self.pipe.close()
        child.join()
        return child.exitcode or 0


def run_shards(
    folder: DataFolder,
    settings: WorkerSettings,
    shard_ids: Iterable[int],
    cpus_of: list[list[int]],
    progress: Progress,
    *,
    is_verbose: bool,
) -> tuple[list[Manifest], list[Failure]]:
    """Make shards in several processes; ``cpus_of`` has the CPUs of each. Return manifests and failures.

    A failure does not stop the other shards. It is printed, and added to the attempt's record for ``status``.
    If a process dies, its shard has failed, and a new process makes the next one. On Stopped the processes
    are stopped, too, and clean up.
    """
    from multiprocessing.connection import wait

    from shardprep.format.jobs import Failure, append_failure

    todo = deque(shard_ids)
    failures: list[Failure] = []
    made: list[Manifest] = []
    notes: set[str] = set()
    processes = [_Process(folder, settings, cpus, is_verbose) for cpus in cpus_of[: len(todo)]]
    try:
        for process in processes:
            process.send(todo.popleft())
        busy = {process.pipe: process for process in processes}
        while busy:
            for pipe in wait(list(busy)):
                process = busy[pipe]
                event = process.receive()
                if isinstance(event, tuple):
                    progress.add(*event)
                    continue
                if isinstance(event, str):
                    if event not in notes:  # each process sends it
                        say(event)
                    notes.add(event)
                    continue
                if isinstance(event, Failure):
                    failures.append(event)
                    say(f"shard {event.shard_id:05d} failed ({event.exit_code}): {event.reason}")
                    append_failure(event)
                else:
                    made.append(event)
                    if is_verbose:
                        say(done_line(event, folder))
                del busy[pipe]
                if todo:
                    process.send(todo.popleft())
                    busy[process.pipe] = process
                else:
                    process.end()
    finally:
        for process in processes:
            process.end(at_once=True)
    return made, sorted(failures, key=lambda failure: failure.shard_id)


def _serve(
    folder: DataFolder, settings: WorkerSettings, cpus: list[int], is_verbose: bool, pipe: Any
) -> None:
    """Make the shards whose ids come through the pipe, and send events back. Runs in a worker process."""
    from shardprep.format.jobs import Failure

    worker, shard_id = None, -1
    with contextlib.suppress(EOFError, BrokenPipeError):
        guard_streams()
        resources.bind_to(cpus)
        while True:
            shard_id = pipe.recv()
            try:
                if worker is None:
                    plan = need_plan(folder).at(settings.input_dir)
                    worker = Worker(plan, folder, settings, num_cpus=len(cpus), warn=pipe.send)
                    if is_verbose:
                        pipe.send(worker.resources_line())
                pipe.send(worker.run_shard(worker.plan.shard(shard_id), lambda *work: pipe.send(work)))
            except ShardprepError as error:
                pipe.send(Failure.of(shard_id, error))
