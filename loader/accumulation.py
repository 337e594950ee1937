"""Whether accelerate accumulates as many batches as a global batch has."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger(__name__)


def warn_of_accumulation(micro_batches: int) -> None:
    """Log a warning where accelerate is in use with another number of batches an optimizer's step.

    ``micro_batches`` is that of a global batch on each rank. HF's Trainer counts for itself, and hides its
    number from accelerate.
    """
    accelerate = sys.modules.get("accelerate.state")  # never imported here: not in use then
    if accelerate is None or not accelerate.GradientState._shared_state:  # noqa: SLF001  asking would start it
        return
    num_steps = accelerate.GradientState().num_steps
    if num_steps not in (1, micro_batches):
        logger.warning(
            "accelerate accumulates %d batches, but a global batch is %d of each rank; pass "
            "global_batch_size=batch_size x ranks x %d, so that a step is the same samples on any number of "
            "ranks, and set accelerator.step = 0 after a load_state that changes the number",
            num_steps,
            micro_batches,
            num_steps,
        )
