"""Which failed reads are tried again, and after how long."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from shardprep.errors import BrokenShard, ReadWriteError

T = TypeVar("T")
logger = logging.getLogger(__name__)

RETRY_DELAYS_S = (0.5, 1, 2, 4, 8, 16)  # a client that Lustre evicted is back in seconds
# What file systems over a network say while a server or the connection to it is gone.
RETRIED = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN})


def with_retries(what: str, attempt: Callable[[], T]) -> T:
    """``attempt()``, again after each error that may go away; ``what`` failed, as messages have it.

    Raises ReadWriteError, or what ``attempt`` raises for another reason.
    """
    for delay_s in (*RETRY_DELAYS_S, None):
        try:
            return attempt()
        except (OSError, BrokenShard, ReadWriteError) as error:
            wait_to_retry(what, error, delay_s)
    raise AssertionError("the last attempt returns or raises")


def wait_to_retry(what: str, error: Exception, delay_s: float | None) -> None:
    """Sleep before another attempt, or raise where the error stays or will not go away.

    ``what`` failed, as messages have it; ``delay_s``: None after the last attempt. Raises ``error``, or
    ReadWriteError for an OSError.
    """
    cause = error if isinstance(error, OSError) else error.__context__
    if not isinstance(cause, OSError):
        raise error
    if cause.errno not in RETRIED or delay_s is None:
        tries = "" if delay_s is not None else f" in {len(RETRY_DELAYS_S) + 1} attempts"
        raise (
            error if not isinstance(error, OSError) else ReadWriteError(f"{what}{tries}: {cause}")
        ) from error
    logger.warning("%s (%s); trying again in %s s", what, cause, delay_s)
    time.sleep(delay_s)
