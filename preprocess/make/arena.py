"""Memory that a process shares with its parent, for arrays that are too large for a pipe.

It is an anonymous map, made before the fork: it needs no /dev/shm, and ends with the processes. The child
takes parts of it in turn, and the parent frees them in the same order.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any

_ALIGNED_BYTES = 4096  # also bounds the number of places, so that a pipe has room for a byte of each


class Arena:
    """A ring of bytes. One process calls ``pack``, the other one ``unpack`` and ``free``."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes)
        self._num_bytes = num_bytes
        self._taken: deque[tuple[int, int]] = deque()  # (byte, end), the oldest first
        self._freed, self._free = os.pipe()

    def pack(self, value: object) -> tuple[bytes, Sequence[tuple[int, int]] | None]:
        """Return a pickle, and the places of the arena that have its arrays, or None if the pickle has them.

        Waits for the other process to free older places. Raises EOFError if that has ended.
        """
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        raw = [buffer.raw() for buffer in buffers]
        sizes = [-(-len(each) // 64) * 64 for each in raw]
        begin = self._take(sum(sizes))
        if begin is None:
            return pickle.dumps(value, protocol=5), None
        places = []
        with memoryview(self._memory) as memory:
            for each, size in zip(raw, sizes, strict=True):
                memory[begin : begin + len(each)] = each
                places.append((begin, begin + len(each)))
                begin += size
        return pickled, places

    def unpack(self, pickled: bytes, places: Sequence[tuple[int, int]] | None) -> Any:
        """Return the value. Its arrays are views of the arena until ``free`` is called."""
        if places is None:
            return pickle.loads(pickled)  # noqa: S301  from a process of ours
        memory = memoryview(self._memory)
        buffers = [memory[begin:end] for begin, end in places]
        return pickle.loads(pickled, buffers=buffers)  # noqa: S301  from a process of ours

    def free(self) -> None:
        """Free the oldest part."""
        os.write(self._free, b"f")

    def keep_child_end(self) -> None:
        """Close the end of the other process, so that its end is noticed."""
        os.close(self._free)

    def close(self) -> None:
        """Close the parent's ends."""
        os.close(self._free)
        os.close(self._freed)

    def _take(self, num_bytes: int) -> int | None:
        num_bytes = max(-(-num_bytes // _ALIGNED_BYTES), 1) * _ALIGNED_BYTES
        if num_bytes > self._num_bytes:
            return None
        while True:
            begin = self._place(num_bytes)
            if begin is not None:
                self._taken.append((begin, begin + num_bytes))
                return begin
            if not os.read(self._freed, 1):
                raise EOFError
            self._taken.popleft()

    def _place(self, num_bytes: int) -> int | None:
        """Return where there is room for some bytes, or None."""
        if not self._taken:
            return 0
        first, last = self._taken[0][0], self._taken[-1][1]
        if last <= first:  # the ring has wrapped around
            return last if last + num_bytes <= first else None
        if last + num_bytes <= self._num_bytes:
            return last
        return 0 if num_bytes <= first else None
