"""Encode batches in threads, and yield the results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from preprocess.make.pieces import EncodedBatch
from preprocess.read.documents import DocumentBatch


def in_order(
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
