"""What accelerate does with the loop that reads a loader, if it is in use."""

from __future__ import annotations

import inspect
import logging
import sys
import traceback

logger = logging.getLogger(__name__)


def batch_size_of_accelerate() -> int | None:
    """Return the batch size of accelerate's find_executable_batch_size, if it has called this loop."""
    memory = sys.modules.get("accelerate.utils.memory")  # not imported: not in use
    if memory is None:
        return None
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        if frame.f_globals is vars(memory) and isinstance(frame.f_locals.get("batch_size"), int):
            batch_size: int = frame.f_locals["batch_size"]
            return batch_size
    return None


def warn_of_accumulation(num_batches: int) -> None:
    """Log a warning if accelerate accumulates another number of batches than a step has."""
    accelerate = sys.modules.get("accelerate.state")  # not imported: not in use
    # GradientState() would create the state.
    if accelerate is None or not accelerate.GradientState._shared_state:  # noqa: SLF001
        return
    num_steps = accelerate.GradientState().num_steps
    if num_steps not in (1, num_batches):
        problem = f"accelerate accumulates {num_steps} batches, but a global batch has {num_batches} per rank"
        logger.warning(f"{problem}; pass global_batch_size=batch_size x ranks x {num_steps}")
