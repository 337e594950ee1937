"""What a helper of a task does, and the messages between the two.

A helper gets a job and says how many lines it has. Once those of all earlier jobs are known, it is told the
number of its first line, which names of members contain. Then it sends the batches.
"""

from __future__ import annotations

import os
import pickle
import resource
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from preprocess.make.arena import Arena
from preprocess.make.encoding import BatchEncoder, read_blanked_of
from preprocess.make.engine import Engine
from preprocess.make.fast import FastTokenizer
from preprocess.make.layout import BatchLayout
from preprocess.make.settings import WorkerSettings
from preprocess.make.stretches import Job
from preprocess.read.documents import DocumentBatch, DocumentReader
from shardprep.errors import ShardprepError, Stopped
from shardprep.format.data_folder import DataFolder
from shardprep.format.plan import Plan

_GROWTH_BYTES = 64 << 20  # of gigatoken's cache of words, in each helper


@dataclass(frozen=True, kw_only=True)
class HelperFacts:
    """What a helper used for a shard."""

    cpu_s: float
    grown_bytes: int  # of memory, since it began
    transform_cpu_s: float = 0.0
    libraries: dict[str, str] = field(default_factory=dict)  # of the user's function


@dataclass(frozen=True)
class NumLines:
    number: int


@dataclass(frozen=True)
class SentBatch:
    pickled: bytes
    places: Any  # of its arrays in the arena; None if they are in the pickle


class Done:
    """A job is done."""


class EndOfShard:
    """Ask for HelperFacts."""


@dataclass(frozen=True)
class HelperServer:
    """What a helper does."""

    plan: Plan
    folder: DataFolder
    settings: WorkerSettings
    engine: Engine
    batch_bytes: int

    def serve(self, pipe: Connection, arena: Arena) -> None:
        """Do the jobs that come through the pipe, until it ends or one fails."""
        FastTokenizer.uses_threads = False
        FastTokenizer.max_growth_bytes = _GROWTH_BYTES
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        began_bytes = _peak_bytes()
        try:
            reader = DocumentReader.open_for_plan(self.folder, self.plan.options, self.settings.transform)
            encoder = None
            shard_id = -1
            cpu_began_s = time.process_time()
            transform_began_s = 0.0
            while True:
                message = pipe.recv()
                if isinstance(message, EndOfShard):
                    facts = HelperFacts(
                        cpu_s=time.process_time() - cpu_began_s, grown_bytes=_peak_bytes() - began_bytes
                    )
                    cpu_began_s = time.process_time()
                    transform = reader.transform
                    if transform is not None:
                        transform.files.check_unchanged()
                        used_s = transform.cpu_s - transform_began_s
                        transform_began_s = transform.cpu_s
                        facts = replace(facts, transform_cpu_s=used_s, libraries=transform.versions())
                    pipe.send(facts)
                    continue
                shard_of_job, job = message
                if encoder is None or shard_of_job != shard_id:
                    shard_id = shard_of_job
                    encoder = self._encoder(shard_id)
                documents = self._read(reader, job)
                pipe.send(NumLines(sum(each.num_lines for each in documents)))
                num_lines: int = pipe.recv() - documents[0].first_line if documents else pipe.recv()
                for each in documents:
                    pipe.send(SentBatch(*arena.pack(encoder.encode(each.moved(num_lines)))))
                pipe.send(Done())
        except (Stopped, EOFError, BrokenPipeError):
            raise
        except BaseException as error:
            pipe.send(_as_sent(error))
            pipe.recv()  # until the parent ends it

    def _encoder(self, shard_id: int) -> BatchEncoder:
        layout = BatchLayout(self.plan.spec, self.plan.options, shard_id)
        blanked = read_blanked_of(self.plan, self.folder, shard_id)
        return BatchEncoder(plan=self.plan, engine=self.engine, layout=layout, blanked=blanked)

    def _read(self, reader: DocumentReader, job: Job) -> list[DocumentBatch]:
        """Return the documents of a job, with lines that are numbered from any number."""
        if isinstance(job, DocumentBatch):
            documents = [reader.prepare(job, None)]
        else:
            read = reader.read_ranges(job, self.batch_bytes, keeps_reasons=True)
            documents = list(read)
        most = self.settings.max_batch_documents
        if most is None:
            return documents
        smaller: list[DocumentBatch] = []
        for each in documents:
            smaller += each.split(most)
        return smaller


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _as_sent(error: BaseException) -> BaseException:
    """Return an error that the parent can raise."""
    if isinstance(error, ShardprepError):
        return error
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  our own
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
