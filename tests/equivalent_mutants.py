"""Changes that no test can notice: (file, line as it is, line as it would be, reason)."""

from __future__ import annotations

LIMIT = "a limit of files or of memory that no promise names"
MEMORY = "memory alone"
READS = "samples are read in other parts; what is read stays the same"
SPEED = "time alone"
MESSAGE = "words of a message"

EQUIVALENT: tuple[tuple[str, str, str, str], ...] = (
    ("loader/order.py", "keeps_tail: bool = False", "keeps_tail: bool = True", "every caller says it"),
    (
        "preprocess/make/members.py",
        "for num_digits in range(1, width - 1):",
        "for num_digits in range(1, (width + 1)):",
        "the loop ends at the first length that no id has",
    ),
    (
        "shardprep/format/manifest.py",
        "_MAX_FINDINGS_BYTES = 256 << 20",
        "_MAX_FINDINGS_BYTES = (257) << 20",
        LIMIT,
    ),
    ("loader/reading.py", "_IDX_ROWS = 1 << 16", "_IDX_ROWS = 1 << (17)", LIMIT),
    (
        "preprocess/make/members.py",
        "self._num_held += int(sums[end - 1]) - before",
        "self._num_held += int(sums[end - (2)]) - before",
        MEMORY,
    ),
    (
        "loader/reading.py",
        "if self._used > len(self._buffer):",
        "if (self._used >= len(self._buffer)):",
        MEMORY,
    ),
    (
        "loader/reading.py",
        "self._buffer = np.empty(0, np.uint8)",
        "self._buffer = np.empty((1), np.uint8)",
        MEMORY,
    ),
    (
        "loader/reading.py",
        "is_cut |= offset[1:] - (offset + found.num_bytes)[:-1] > _MOST_GAP_BYTES",
        "is_cut |= (offset[1:] - (offset + found.num_bytes)[:-1] >= _MOST_GAP_BYTES)",
        READS,
    ),
    (
        "loader/reading.py",
        "is_cut |= offset[1:] - (offset + found.num_bytes)[:-1] > _MOST_GAP_BYTES",
        "is_cut |= (offset[1:] + (offset + found.num_bytes)[:-1]) > _MOST_GAP_BYTES",
        READS,
    ),
    (
        "loader/reading.py",
        "is_cut_here = is_cut | (mask_offset[1:] != (mask_offset + sizes)[:-1])",
        "is_cut_here = is_cut | (mask_offset[1:] != ((mask_offset - sizes))[:-1])",
        READS,
    ),
    (
        "loader/reading.py",
        "while len(self._open) >= self.max_open:",
        "while (len(self._open) > self.max_open):",
        READS,
    ),
    (
        "preprocess/check/verify.py",
        'has = "some" if is_there else "no"',
        'has = "some" if (not (is_there)) else "no"',
        MESSAGE,
    ),
    (
        "loader/order.py",
        "filling = block_bytes * num_samples // max(num_bytes, 1)",
        "filling = block_bytes * num_samples // max(num_bytes, (2))",
        "a tar has 1,024 bytes at least",
    ),
    (
        "loader/order.py",
        "blocks, place = np.arange(num_blocks + 1), block",
        "blocks, place = np.arange(num_blocks + (2)), block",
        "one block more is permuted, and none asks for it",
    ),
    (
        "loader/chunks.py",
        "begins = begins[np.diff(begins, prepend=-1) > 0]",
        "begins = begins[np.diff(begins, prepend=-(2)) > 0]",
        "any number below 0 stands before the first begin, which is 0",
    ),
    (
        "loader/rounds.py",
        "if laid_out is None or not laid_out.first <= at < laid_out.end:",
        "if laid_out is None or not (laid_out.first < at < laid_out.end):",
        SPEED,
    ),
    (
        "loader/decode.py",
        "if num_spaces not in (0, num_commas):",
        "if num_spaces not in ((1), num_commas):",
        SPEED,
    ),
    ("preprocess/make/members.py", "break", "pass", "no id has more digits: what follows looks at none"),
)
