"""How many processes share the work on a shard, and how much of it each gets at once."""

from __future__ import annotations

import math

from preprocess.make.resources import MEMORY_PER_BATCH_BYTE, PROCESS_BYTES, SMALLEST_BATCH_BYTES
from preprocess.make.settings import WorkerSettings
from preprocess.read.formats import BATCH_BYTES
from shardprep.format.plan import Plan, PlannedShard

_MAX_ENCODERS = 4  # threads that encode and lay out batches; more would wait for the interpreter's lock
_MOST_RENDERERS = 8
_RENDERER_BYTES = 250 << 20  # of a process that renders, with transformers
# Input that a helper reads at once. The batches of a stretch must fit into its shared memory: short
# documents take 22 times their text in a tar.
_DOCUMENT_STRETCH_BYTES = 1 << 20
_ROW_STRETCH_BYTES = 4 << 20
_HELPER_BYTES = 160 << 20  # of memory
# Text in a batch of packed rows: 3 to 8 % less CPU than 512 KiB, and up to 25 MB more memory. 2 MiB take less
# CPU still for long documents, but more for short ones. Documents would take more memory: their blocks of a
# tar are up to 22 times the text.
_ROW_BATCH_BYTES = 1 << 20
# Two helpers are as fast as threads for some 100 MB and faster for more, while three are faster at once:
# benchmarks/results.md#cores-of-a-task.
_LEAST_BYTES_OF_TWO = 128 << 20
_FEWEST_HELPERS = 2
_LEAST_HELPER_SHARE = 8  # stretches per helper; for fewer, the helpers' start is too long


def stretch_bytes(plan: Plan, settings: WorkerSettings) -> int:
    """Return how much of a shard a helper gets at once."""
    if settings.stretch_bytes is not None:
        return settings.stretch_bytes
    return _ROW_STRETCH_BYTES if plan.options.has_rows else _DOCUMENT_STRETCH_BYTES


def encoders_and_batch_bytes(plan: Plan, settings: WorkerSettings, num_cpus: int) -> tuple[int, int]:
    """Return how many threads encode, and how much text a batch has: three take 0.6 GB of documents.

    With little memory, fewer threads encode and batches are smaller.
    """
    memory_bytes = math.inf if settings.memory_gb is None else settings.memory_gb * 2**30
    text_bytes = (memory_bytes - PROCESS_BYTES) / MEMORY_PER_BATCH_BYTE
    # Each thread has a batch. Even two cores get two threads: one encodes while the other lays out.
    wanted = min(_MAX_ENCODERS, num_cpus, max(2, num_cpus // 2))
    num_encoders = int(max(1, min(wanted, text_bytes / BATCH_BYTES)))
    most = _ROW_BATCH_BYTES if plan.options.record == "packed" else BATCH_BYTES
    return num_encoders, int(min(most, max(SMALLEST_BATCH_BYTES, text_bytes / num_encoders)))


def num_renderers(settings: WorkerSettings, num_cpus: int) -> int:
    """Return how many processes should render conversations: one for two CPUs, as the others encode.

    Rendering takes some 40 % of the work on conversations. Each further process takes 2.5 s to start.
    """
    number = min(num_cpus // 2, _MOST_RENDERERS)
    if settings.memory_gb is not None:
        number = min(number, (int(settings.memory_gb * 2**30) - PROCESS_BYTES) // _RENDERER_BYTES)
    return max(number, 1)


def num_helpers(plan: Plan, shard: PlannedShard, settings: WorkerSettings, num_cpus: int) -> int:
    """Return how many helpers should share the work on a shard: one per CPU, or 0 if threads are as fast.

    For small shards helpers take too long to start. A limit of documents is counted in order, and
    conversations are rendered by a process of their own, so such shards have none.
    """
    if num_cpus < _FEWEST_HELPERS or shard.max_documents is not None or plan.options.is_chat:
        return 0
    number = min(num_cpus, shard.num_bytes // (_LEAST_HELPER_SHARE * stretch_bytes(plan, settings)))
    if settings.memory_gb is not None:
        spare_bytes = int(settings.memory_gb * 2**30) - PROCESS_BYTES
        number = min(number, spare_bytes // _HELPER_BYTES)
    if number == _FEWEST_HELPERS and shard.num_bytes < _LEAST_BYTES_OF_TWO:
        return 0
    return number if number >= _FEWEST_HELPERS else 0
