"""Changes that no test can notice: (file, line as it is, line as it would be, reason)."""

from __future__ import annotations

READS = "samples are read in other parts; what is read stays the same"
MEMORY = "memory alone"

EQUIVALENT: tuple[tuple[str, str, str, str], ...] = (
    (
        "loader/reading.py",
        "gap_bytes = offset[1:] - (offset + found.num_bytes)[:-1]",
        "gap_bytes = (offset[1:] + (offset + found.num_bytes)[:-1])",
        READS,
    ),
    (
        "loader/chunks.py",
        "begins = begins[np.diff(begins, prepend=-1) > 0]",
        "begins = begins[np.diff(begins, prepend=-(2)) > 0]",
        "any number below 0 stands before the first begin, which is 0",
    ),
)
