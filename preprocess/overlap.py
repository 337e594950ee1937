"""Two stages of one stream at once: the next items are made while this one is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, TypeVar

Item = TypeVar("Item")
Arguments = ParamSpec("Arguments")


def read_ahead(items: Iterator[Item], num_ahead: int) -> Iterator[Item]:
    """Yield the same items, with up to ``num_ahead`` of them made before they are asked for.

    A thread makes them, so the gain is what it does without the interpreter's lock: reading,
    decoding, waiting for a file system. Its errors are raised here, in their place in the stream.
    """
    end = object()
    with ThreadPoolExecutor(1) as pool:
        held: deque[Future[object]] = deque()
        try:
            while True:
                while len(held) <= num_ahead:
                    held.append(pool.submit(next, items, end))
                item = held.popleft().result()
                if item is end:
                    return
                yield item  # type: ignore[misc]
        finally:
            for future in held:
                future.cancel()


class WriteBehind:
    """Makes calls in a thread of its own, in order, with a few of them waiting at most.

    Within ``with``. An error of a call is raised by a later ``put``, or by ``drain``.
    """

    def __init__(self, num_behind: int) -> None:
        self._num_behind = num_behind
        self._pool = ThreadPoolExecutor(1)
        self._held: deque[Future[None]] = deque()

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for future in self._held:
            future.cancel()
        self._pool.shutdown()

    def put(self, call: Callable[Arguments, None], *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        """Queue a call; waits while ``num_behind`` of them wait already."""
        while len(self._held) >= self._num_behind:
            self._held.popleft().result()
        self._held.append(self._pool.submit(call, *args, **kwargs))

    def drain(self) -> None:
        """Wait until every call has ended."""
        while self._held:
            self._held.popleft().result()
