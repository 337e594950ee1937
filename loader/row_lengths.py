"""``seq_len_schedule``: packed rows that come shorter in the first steps of a run.

A row of 4,096 tokens comes as four of 1,024, side by side in the same batch. Nothing is lost or comes twice,
a batch has the same tokens in every stage, and the order knows nothing of it. With ``targets="shifted"``
every target stays. A model that shifts labels itself learns no first token of a row, also of shorter ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loader.chunks import Edges
from loader.run_steps import Ramp, RunSteps, check_ramp
from shardprep.errors import UsageError


def check_row_lengths(schedule: Ramp | None, row_tokens: int, *, is_validation: bool) -> Ramp:
    """The lengths that rows of ``row_tokens`` are cut to, by step. Raises UsageError where they cannot be."""
    if schedule is None:
        return RunSteps.row_lengths
    check_ramp("seq_len_schedule", schedule)
    if is_validation:
        raise UsageError("seq_len_schedule is for training; leave it out with split='validation'")
    if not row_tokens:
        raise UsageError(
            "seq_len_schedule cuts packed rows into shorter ones, and these samples are documents: a shorter "
            "max_length would lose their ends; pass seq_len= to pack them"
        )
    wrong = [length for _, length in schedule if row_tokens % length]
    if wrong:
        fitting = [length for length in range(1, row_tokens + 1) if row_tokens % length == 0]
        raise UsageError(
            f"rows of {row_tokens} tokens cannot be cut into equal ones of {wrong[0]}; seq_len_schedule can "
            f"have {', '.join(map(str, fitting[-8:]))}"
        )
    return tuple((first, 0 if length == row_tokens else length) for first, length in schedule)


def cut_rows(fields: dict[str, Any], width: int) -> None:
    """Cut the rows of a batch's tensors, [batch, seq] -> [batch x seq / width, width].

    The mask of a row that is padding alone has its first place: attention over nothing may give NaN.
    """
    for name in ("input_ids", "attention_mask", "labels"):
        fields[name] = fields[name].reshape(-1, width)
    mask = fields["attention_mask"]
    mask[mask[:, 0] == 0, 0] = 1


def cut_lengths(lengths: npt.NDArray[Any], old_width: int, width: int) -> npt.NDArray[Any]:
    """Tokens of each shorter row, of rows with so many tokens: [batch] -> [batch x old_width / width]."""
    left = lengths[:, None] - np.arange(0, old_width, width)
    cut: npt.NDArray[Any] = left.clip(0, width).reshape(-1)
    return cut


def cut_edges(edges: Edges, width: int) -> Edges:
    """The edges of the shorter rows: each begins one."""
    num_places = edges.shape[0] * edges.shape[1]
    begins = np.union1d(edges.begins, np.arange(0, num_places, width))
    sizes = np.diff(begins, append=num_places)
    return Edges(begins=begins, sizes=sizes, longest=int(sizes.max()), shape=(num_places // width, width))
