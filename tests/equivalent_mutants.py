"""Changes that no test can notice: file -> (text of a line, replacement, reason)."""

from __future__ import annotations

LIMIT = "changes a limit of files or memory that is not a promise"
MEMORY = "changes only the use of memory"
READS = "changes how reads are divided, but not what is read"
SPEED = "changes only the speed"
MESSAGE = "changes only a message"
CHOICE = "a run stores its choice in its state and keeps it"
BORDER = "a round begins there anyway"

_DIGITS = "1 <= int(digits.min()) <= int(digits.max()) <= _MAX_DIGITS"

EQUIVALENT: dict[str, list[tuple[str, str, str]]] = {
    "loader/order/order.py": [
        ("keeps_tail: bool = False", "keeps_tail: bool = True", "every caller passes it"),
        ("per_block = block_bytes * num_samples // max(num_bytes, 1)",
         "per_block = block_bytes * num_samples // max(num_bytes, (2))", "a tar has at least 1,024 bytes"),
        ("GROUPED_BYTES = 64", "GROUPED_BYTES = (65)", CHOICE),
        ("BLOCK_BYTES[0]", "BLOCK_BYTES[(1)]", CHOICE),
        ("BLOCKS_PER_SLOT = 16", "BLOCKS_PER_SLOT = (17)", CHOICE),
        ("MOST_BLOCK_BYTES = 1 << 20", "MOST_BLOCK_BYTES = 1 << (21)", CHOICE),
    ],
    "loader/order/mixture.py": [
        ("_NEVER = 1 << 62", "_NEVER = 1 << (63)", LIMIT),
        ("np.cumsum(counts) - counts,", "(np.cumsum(counts) + counts),", "moves all places equally"),
    ],
    "loader/order/amendment.py": [
        ("stage.step == step and stage.begins_round", "(stage.step == step or stage.begins_round)", BORDER),
        ("round_ended and is_border", "(round_ended or is_border)", BORDER),
    ],
    "loader/read/chunks.py": [
        ("prepend=-1) >", "prepend=-(2)) >", "any negative number is below the first begin, which is 0"),
    ],
    "loader/read/json_ids.py": [
        ("0 <= ids.min() <= ids.max() < vocab_size", "(0 <= ids.min() < ids.max() < vocab_size)", SPEED),
        ("0 <= ids.min() <= ids.max() < vocab_size", "(0 < ids.min() <= ids.max() < vocab_size)", SPEED),
        ("not in (0, num_commas)", "not in ((1), num_commas)", SPEED),
        ("num_spaces else 1", "num_spaces else (2)", SPEED),
        ("_PAD = bytes(8)", "_PAD = bytes((9))", MEMORY),
        ("ends + 1) == _SPACE", "ends + (2)) == _SPACE", SPEED),
        ("ends_number[ends - 1]", "ends_number[(ends + 1)]", SPEED),
        (_DIGITS, "(1 < int(digits.min()) <= int(digits.max()) <= _MAX_DIGITS)", SPEED),
        ("has_numbers = sizes > 2", "has_numbers = sizes > (3)", SPEED),
        ("0x0F0F0F0F0F0F0F0F", "(1085102592571150096)", "no vocabulary has ids of eight digits"),
        ("sizes.min() < 2 or", "sizes.min() < (3) or", SPEED),
        ("text[ends - 1]", "text[(ends + 1)]", SPEED),
        (_DIGITS, "(1 <= int(digits.min()) <= int(digits.max()) < _MAX_DIGITS)", SPEED),
        ("DECODE_BYTES = 128 * 1024", "DECODE_BYTES = 128 * (1025)", LIMIT),
        ("ids.max()) < 2**31", "ids.max()) < 2**(32)", "no vocabulary has such ids"),
        ("data.dtype[portion] == JSON", "(data.dtype[portion] != JSON)", SPEED),
        ("has_numbers = sizes > 2", "has_numbers = (sizes >= 2)", SPEED),
    ],
    "loader/batch/run_reader.py": [
        ("round_.first <= run_tick < round_.end", "(round_.first < run_tick < round_.end)", SPEED),
        ("run.row_tokens", "(not (run.row_tokens))", SPEED),
        ("laid_out is None", "(laid_out is not None)", SPEED),
        ("self._window_ticks = (0, 0,", "self._window_ticks = (0, (1),", "no tick is in that window"),
    ],
    "loader/read/reading.py": [
        ("is_apart |= gap % 4 > 0", "pass", "in every tar, arrays of ids are at multiples of 4"),
        ("[0] // 8, 1)", "[0] // (9), 1)", LIMIT),
        ("number: int = 0", "number: int = (1)", "a reader without a number is the only one"),
        ("record[:-1] != 1", "record[:-1] != (2)", READS),
        ("gap % 4 > 0", "(gap % 4 >= 0)", READS),
        ("(gap > _MOST_GAP_BYTES)", "((gap >= _MOST_GAP_BYTES))", READS),
        ("_IDX_RECORDS = 1 << 16", "_IDX_RECORDS = 1 << (17)", LIMIT),
        ("self._used > len(self._buffer)", "(self._used >= len(self._buffer))", MEMORY),
        ("np.empty(0, np.uint8)", "np.empty((1), np.uint8)", MEMORY),
        ("len(self._open) >= self._max_open", "(len(self._open) > self._max_open)", READS),
        ("HELD_IDX_BYTES = 256", "HELD_IDX_BYTES = (257)", LIMIT),
        ("HELD_IDX_BYTES = 256 << 10", "HELD_IDX_BYTES = 256 << (11)", LIMIT),
        ("HELD_IDX_BYTES = 256 << 10", "HELD_IDX_BYTES = (256 >> 10)", READS),
        ("self._buffer = np.empty(0, np.uint8)", "pass", MEMORY),
        ("not len(self._buffer)", "(len(self._buffer))", MEMORY),
        ("_MOST_AT_ONCE_BYTES = 1 << 30", "_MOST_AT_ONCE_BYTES = 1 << (31)", LIMIT),
        ("self._buffer = np.empty(min(num_bytes, _MOST_AT_ONCE_BYTES), np.uint8)", "pass", SPEED),
        ("opened.enter_context(idx.file)", "pass", "the file closes when its object is freed"),
    ],
    "preprocess/make/counts.py": [
        ("histogram = [0] * 64", "histogram = [0] * (65)", "trailing zeros are dropped"),
        ("64 << (LENGTH_BITS - 1)", "64 << (LENGTH_BITS - (2))", LIMIT),
    ],
    "preprocess/make/packing.py": [
        ("self._turn = 0", "self._turn = (1)", "turns are compared only with each other"),
        ("len(self._closed) >= self.group_rows", "(len(self._closed) > self.group_rows)", "happens later"),
        ("(0, *row.first)", "((1), *row.first)", "the place of a row's first document is not used"),
    ],
    "preprocess/make/rows.py": [
        ("(numbers < number)", "((numbers <= number))", "that document is for validation"),
        ("spec.validation_fraction else 1", "spec.validation_fraction else (2)", MEMORY),
        ("self._num_held_tokens = 0", "self._num_held_tokens = (1)", MEMORY),
    ],
    "preprocess/make/tar_headers.py": [
        ("lines[-1] >= 10**8", "lines[-1] >= (11)**8", "needs a shard of 10^8 lines"),
        ("if len(lines) and lines[-1] >= 10**8", "if (not (len(lines) and lines[-1] >= 10 ** 8))", SPEED),
        ("np.arange(30, -1,", "np.arange(30, -(2),", "the last number is 0 in both cases"),
    ],
    "shardprep/format/done.py": [
        ("_MAX_FINDINGS_BYTES = 64", "_MAX_FINDINGS_BYTES = (65)", LIMIT),
        ("_NUM_THREADS = 8", "_NUM_THREADS = (9)", SPEED),
        ("len(made.done) != spec.num_shards or made.wrong",
         "(len(made.done) != spec.num_shards and made.wrong)", "index.json has a row for each shard"),
    ],
    "preprocess/remade_shards.py": [
        ("allowed_cpus(offset=0)", "allowed_cpus(offset=(1))", SPEED),
    ],
    "preprocess/shard_checks.py": [
        ("if is_there else", "if (not (is_there)) else", MESSAGE),
    ],
}  # fmt: skip
