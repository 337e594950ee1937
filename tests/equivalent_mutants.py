"""Changes that no test can notice: (file, line as it is, line as it would be, reason)."""

from __future__ import annotations

LIMIT = "a limit of files or of memory that no promise names"
MEMORY = "memory alone"
READS = "samples are read in other parts; what is read stays the same"
SPEED = "time alone"
MESSAGE = "words of a message"
CHOICE = "a run writes its choice into its state, and keeps it"
BORDER = "a round begins there anyway"

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
        "while len(self._open) >= self._max_open:",
        "while (len(self._open) > self._max_open):",
        READS,
    ),
    (
        "preprocess/verify.py",
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
        "loader/chunks.py",
        "begins = begins[np.diff(begins, prepend=-1) > 0]",
        "begins = begins[np.diff(begins, prepend=-(2)) > 0]",
        "any number below 0 stands before the first begin, which is 0",
    ),
    (
        "loader/run.py",
        "if laid_out is None or of_round is None or not of_round.first <= at < of_round.end:",
        "if laid_out is None or of_round is None or not (of_round.first < at < of_round.end):",
        SPEED,
    ),
    (
        "loader/chunks.py",
        "if num_spaces not in (0, num_commas):",
        "if num_spaces not in ((1), num_commas):",
        SPEED,
    ),
    ("preprocess/make/members.py", "break", "pass", "no id has more digits: what follows looks at none"),
    (
        "preprocess/make/shard_writer.py",
        "if not self._is_alone or size_of_file(self._again) is not None:",
        "if (self._is_alone) or size_of_file(self._again) is not None:",
        SPEED,
    ),
    (
        "preprocess/make/shard_writer.py",
        "_MOST_LENGTHS = 64 << (LENGTH_BITS - 1)",
        "_MOST_LENGTHS = 64 << (LENGTH_BITS - (2))",
        LIMIT,
    ),
    ("loader/run.py", "if tick == 0 and end == _NEVER:", "if tick == (1) and end == _NEVER:", SPEED),
    ("loader/order.py", "GROUPED_BYTES = 64 << 20", "GROUPED_BYTES = (65) << 20", CHOICE),
    (
        "loader/chunks.py",
        "np.add(behind[:-1], 2 if num_spaces else 1, out=first[1:])",
        "np.add(behind[:-1], 2 if num_spaces else (2), out=first[1:])",
        SPEED,
    ),
    ("shardprep/format/manifest.py", "_NUM_THREADS = 8", "_NUM_THREADS = (9)", SPEED),
    (
        "preprocess/make/members.py",
        "self._packers = [packer_of(spec, options.pack) for _ in range(2 if spec.validation_fraction else 1)]",  # noqa: E501
        "self._packers = [packer_of(spec, options.pack) for _ in range(2 if spec.validation_fraction else (2))]",  # noqa: E501
        MEMORY,
    ),
    ("loader/run.py", "_NEVER = 1 << 62", "_NEVER = 1 << (63)", LIMIT),
    (
        "loader/reading.py",
        'changed = "" if source.records is None else ", other than when it was scanned"',
        'changed = "" if (source.records is not None) else ", other than when it was scanned"',
        MESSAGE,
    ),
    ("loader/reading.py", "HELD_IDX_BYTES = 256 << 10", "HELD_IDX_BYTES = (257) << 10", LIMIT),
    ("loader/chunks.py", "_PAD = bytes(8)", "_PAD = bytes((9))", MEMORY),
    (
        "preprocess/make/members.py",
        "first, last = (10 ** (num_digits - 1) if num_digits > 1 else 0), min(10**num_digits, vocab_size)",
        "first, last = (10 ** (num_digits - 1) if num_digits > 1 else 0), min((11)**num_digits, vocab_size)",
        "longer numbers are written over it",
    ),
    (
        "preprocess/make/members.py",
        "if len(lines) and lines[-1] >= 10**8:",
        "if len(lines) and lines[-1] >= (11)**8:",
        "a shard of 10^8 lines",
    ),
    ("loader/reading.py", "if not len(self._buffer):", "if (len(self._buffer)):", MEMORY),
    (
        "loader/chunks.py",
        "num_spaces = np.count_nonzero(text.take(behind + 1) == _SPACE)",
        "num_spaces = np.count_nonzero(text.take(behind + (2)) == _SPACE)",
        SPEED,
    ),
    ("loader/order.py", "BLOCKS_PER_SLOT = 16", "BLOCKS_PER_SLOT = (17)", CHOICE),
    ("loader/reading.py", "_MOST_AT_ONCE_BYTES = 1 << 30", "_MOST_AT_ONCE_BYTES = 1 << (31)", LIMIT),
    (
        "loader/run.py",
        "begins_round = any(stage.step == step and stage.begins_round for stage in self.stages)",
        "begins_round = any((stage.step == step or stage.begins_round) for stage in self.stages)",
        BORDER,
    ),
    (
        "loader/run.py",
        "goes_on = held.weights == before.weights and not (begins_round and held.step == step)",
        "goes_on = held.weights == before.weights and not ((begins_round or held.step == step))",
        BORDER,
    ),
    ("preprocess/make/members.py", "self._num_held = 0", "self._num_held = (1)", MEMORY),
    (
        "loader/chunks.py",
        "if digits.size and not 1 <= int(digits.min()) <= int(digits.max()) <= _MAX_DIGITS:",
        "if digits.size and not (1 < int(digits.min()) <= int(digits.max()) <= _MAX_DIGITS):",
        SPEED,
    ),
    (
        "loader/run.py",
        "number = np.arange(CYCLE) - np.repeat(np.cumsum(counts) - counts, counts)",
        "number = np.arange(CYCLE) - np.repeat((np.cumsum(counts) + counts), counts)",
        "all places move by as much",
    ),
    (
        "loader/order.py",
        "SLOT_BLOCK_BYTES, MOST_BLOCK_BYTES = 512, 1 << 20",
        "SLOT_BLOCK_BYTES, MOST_BLOCK_BYTES = 512, 1 << (21)",
        CHOICE,
    ),
    (
        "preprocess/make/members.py",
        "_SHIFTS = np.arange(30, -1, -3)",
        "_SHIFTS = np.arange(30, -(2), -3)",
        "the last number is 0 either way",
    ),
    (
        "loader/reading.py",
        "self._buffer = np.empty(min(num_bytes, _MOST_AT_ONCE_BYTES), np.uint8)",
        "pass",
        SPEED,
    ),
    ("loader/reading.py", "opened.enter_context(idx.file)", "pass", "it is closed when its object goes"),
    ("loader/chunks.py", "has_numbers = sizes > 2", "has_numbers = sizes > (3)", SPEED),
    (
        "loader/run.py",
        "if laid_out is None or of_round is None or not of_round.first <= at < of_round.end:",
        "if (laid_out is not None) or of_round is None or not of_round.first <= at < of_round.end:",
        SPEED,
    ),
    (
        "loader/run.py",
        "self._place = (0, 0, 0)",
        "self._place = (0, (1), 0)",
        "no tick is in that window, either",
    ),
    (
        "loader/chunks.py",
        "value &= np.uint64(0x0F0F0F0F0F0F0F0F)",
        "value &= np.uint64((1085102592571150096))",
        "no vocabulary has ids of eight digits, whose first one that byte is",
    ),
    (
        "loader/chunks.py",
        "if sizes.min() < 2 or not ((text[starts] == _OPEN).all() and (text[ends - 1] == _CLOSE).all()):",
        "if sizes.min() < (3) or not ((text[starts] == _OPEN).all() and (text[ends - 1] == _CLOSE).all()):",
        SPEED,
    ),
    (
        "preprocess/verify.py",
        "num_cpus = bind_to_task_cpus(offset=0)",
        "num_cpus = bind_to_task_cpus(offset=(1))",
        SPEED,
    ),
    (
        "loader/chunks.py",
        "if sizes.min() < 2 or not ((text[starts] == _OPEN).all() and (text[ends - 1] == _CLOSE).all()):",
        "if sizes.min() < 2 or not ((text[starts] == _OPEN).all() and (text[(ends + 1)] == _CLOSE).all()):",
        SPEED,
    ),
    (
        "loader/chunks.py",
        "if digits.size and not 1 <= int(digits.min()) <= int(digits.max()) <= _MAX_DIGITS:",
        "if digits.size and not (1 <= int(digits.min()) <= int(digits.max()) < _MAX_DIGITS):",
        SPEED,
    ),
    ("loader/chunks.py", "DECODE_BYTES = 128 * 1024", "DECODE_BYTES = 128 * (1025)", LIMIT),
    (
        "loader/chunks.py",
        "if dtype.itemsize == 8 and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 2**31:",
        "if dtype.itemsize == 8 and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 2**(32):",
        "no vocabulary has these ids, either",
    ),
    (
        "loader/chunks.py",
        "if (data.dtype[part] == JSON).all():",
        "if ((data.dtype[part] != JSON)).all():",
        SPEED,
    ),
    ("loader/chunks.py", "has_numbers = sizes > 2", "has_numbers = (sizes >= 2)", SPEED),
    (
        "loader/run.py",
        "ids=ids if run.row_tokens else ids.joined(),",
        "ids=ids if (not (run.row_tokens)) else ids.joined(),",
        SPEED,
    ),
    (
        "loader/reading.py",
        "is_cut = is_cut | (gap < 0) | (gap > _MOST_GAP_BYTES)",
        "is_cut = is_cut | (gap < 0) | ((gap >= _MOST_GAP_BYTES))",
        READS,
    ),
)
