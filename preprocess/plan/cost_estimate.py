"""What a plan will cost, measured on a sample of its own input with the stages of a worker.

The sample is 2 MiB from 8 places, one in each eighth of the input, so planning takes a second or two longer
for it, however large the input is. Of a file that can be read from its beginning alone (gzip), it is the
head. A sample without one usable record stops planning: the fields are not those of the input.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preprocess.make.engines import Engine, tokenizers_engine
from preprocess.make.members import members_of
from preprocess.make.shard_writer import Counting, ShardWriter
from preprocess.read import BATCH_BYTES
from preprocess.read.documents import Documents, read_documents, read_records, starts_in
from preprocess.read.format import SHORT_LINE_BYTES, Start
from preprocess.read.inputs import OpenInput
from preprocess.read.text_fields import TextFields, UnusableText
from preprocess.read.transform import Transform
from shardprep.console import printable
from shardprep.errors import BadInput, CannotWrite
from shardprep.format.input_formats import input_kind
from shardprep.format.names import TOKENIZER_DIR
from shardprep.format.options import PlanOptions
from shardprep.format.plan import ByteRange, Plan
from shardprep.format.tokenizer_files import TOKENIZER_FILE

_NUM_PLACES = 8  # of the input that are sampled
_GOLDEN_RATIO = 0.618034  # its multiples are spread evenly over 0 to 1
_SAMPLE_BYTES = 2 << 20  # in all
_NUM_SHOWN = 20  # fields
_LOCKED_LAYOUT = 0.4  # of it holds the interpreter's lock: 14 of 38 ms for 512 KiB of Korean
_STARTUP_S = 3.0  # a task's Python and tokenizer, generously


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """Figures of the whole plan, scaled up from the sample."""

    num_tokens: int
    output_bytes: int
    core_hours: float
    longest_shard_s: float  # on one core
    num_useful_cores: int  # of a task: more of them would wait for its slowest serial stage
    notes: tuple[str, ...] = ()  # what in the sample is not as the options expect it


def sample_texts(plan: Plan, *, num_bytes: int, transform: Transform | None = None) -> list[str]:
    """Return the texts of a sample of a plan's input."""
    return [text.decode() for documents in _sample(plan, num_bytes, transform) for text in documents.texts]


def _sample(plan: Plan, num_bytes: int, transform: Transform | None) -> Iterator[Documents]:
    """Documents of the sample; of a very long one, all of it."""
    for part in _sample_ranges(plan, num_bytes // _NUM_PLACES):
        num_left = num_bytes // _NUM_PLACES
        found = read_documents(
            [part], plan.options, batch_bytes=min(BATCH_BYTES, num_left), transform=transform
        )
        with contextlib.closing(found):
            for documents in found:
                yield documents
                num_left -= sum(map(len, documents.texts)) + len(documents.bad) * SHORT_LINE_BYTES
                if num_left <= 0:
                    break


def _sample_ranges(plan: Plan, num_bytes: int) -> Iterator[ByteRange]:
    """Parts from evenly spread places, as long as their format allows them to be cut; else whole files."""
    total = sum(item.num_bytes for item in plan.inputs)
    # Each place lies elsewhere in its eighth: at its beginning, equal files would show their heads alone.
    # Of an input that is taken whole, or nearly, the places are at the beginnings: so its first line counts.
    is_small = total <= num_bytes * _NUM_PLACES
    within = [0 if is_small else (0.5 + place * _GOLDEN_RATIO) % 1 for place in range(_NUM_PLACES)]
    targets = iter([int(total * (place + within[place]) / _NUM_PLACES) for place in range(_NUM_PLACES)])
    target, begin = next(targets), 0
    for number, item in enumerate(plan.inputs):
        end = begin + item.num_bytes
        while target < end:
            part = _part_at(plan, number, target - begin, num_bytes)
            if part.start < part.end:
                yield part
            target = next(targets, total)
            if part.end == item.num_bytes:
                target = max(target, end)
        begin = end


def _part_at(plan: Plan, number: int, target: int, num_bytes: int) -> ByteRange:
    """From the first place at or behind a byte of an input on, to the first one ``num_bytes`` later."""
    item, options = plan.inputs[number], plan.options
    path = plan.input_dir / item.path
    file = OpenInput(path)
    (start,) = starts_in(file, [(target, sys.maxsize)], options)
    if start is None or (start.byte == item.num_bytes and not input_kind(item.path).is_in_bytes):
        start = Start(0)
    (stop,) = starts_in(file, [(min(start.byte + num_bytes, item.num_bytes), sys.maxsize)], options)
    return ByteRange(
        input_number=number,
        path=path,
        start=start.byte,
        end=item.num_bytes if stop is None else stop.byte,
        text_start=start.text_byte,
    )


def measure(plan: Plan, engine: Engine, transform: Transform | None = None) -> CostEstimate:
    """Run a sample through the worker's own stages into a scratch folder; scale their CPU seconds up."""
    input_paths = {number: item.path for number, item in enumerate(plan.inputs)}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        members = members_of(plan.spec, 0, plan.options)
        writer = stack.enter_context(
            ShardWriter(
                folder, plan.spec, 0, members, input_paths=input_paths, side_files=plan.options.side_files()
            )
        )
        num_bytes, fields = 0, _OtherFields(plan.options)
        read_s = encode_s = layout_s = write_s = 0.0  # of CPU
        at = time.process_time()
        for documents in _sample(plan, _SAMPLE_BYTES, transform):
            at, read_s = _add_cpu(at, read_s)
            tokens = engine.encode_documents(
                documents, end_id=plan.end_id, mask_rule=plan.options.chat_mask_rule
            )
            at, encode_s = _add_cpu(at, encode_s)
            batch = members.lay_out(documents, tokens)
            at, layout_s = _add_cpu(at, layout_s)
            writer.append(batch)
            at, write_s = _add_cpu(at, write_s)
            num_bytes += documents.num_bytes
            fields.look_at(documents)
            at = time.process_time()
        manifest = writer.commit({})
    counting = writer.counting
    _check_fields(plan, counting)
    shard_bytes = plan.shard_bytes()
    cpu_s = read_s + encode_s + layout_s + write_s
    locked_s = read_s + _LOCKED_LAYOUT * layout_s
    scale = sum(shard_bytes) / max(1, num_bytes)
    files = filter(None, [manifest.tar, manifest.idx, manifest.digests, manifest.ids])
    num_documents = counting.num_documents * scale
    taken = min(1.0, (plan.options.limit or num_documents) / max(1.0, num_documents))  # of a trial
    return CostEstimate(
        notes=(*_bad_note(plan, counting), *fields.note()),
        num_tokens=round(counting.num_tokens * scale * taken),
        output_bytes=round(sum(file.num_bytes for file in files) * scale * taken),
        core_hours=(cpu_s * scale * taken + _STARTUP_S * plan.num_shards) / 3600,
        longest_shard_s=cpu_s * taken * max(shard_bytes) / max(1, num_bytes) + _STARTUP_S,
        # Writing takes one thread, reading and a part of laying out the interpreter's lock; encoding takes
        # as many cores as there are.
        num_useful_cores=max(1, round(cpu_s / max(locked_s, write_s, 1e-9))) if num_bytes else 1,
    )


class _SeenFields(TextFields):
    """Remembers which fields the records have, and takes no text."""

    def __init__(self) -> None:
        super().__init__()
        self.plain_name = None
        self.num_chars: Counter[str] = Counter()  # of texts, by field; 0 for other values
        self.messages: list[str] = []  # fields that are lists of messages

    def text(self, record: Any, place: str = "") -> UnusableText:
        for name, value in record.items() if isinstance(record, dict) else ():
            self.num_chars[place + name] += len(value) if isinstance(value, str) else 0
            if isinstance(value, dict):
                self.text(value, f"{place}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
                self.messages.append(place + name)
        return UnusableText("no_field", "")


def _check_fields(plan: Plan, counting: Counting) -> None:
    """Raise BadInput where no record of the sample has the field of the text, naming the fields it has."""
    is_other_field = counting.bad_reasons and counting.bad_reasons <= {"no_field", "wrong_type"}
    if counting.num_documents or not is_other_field or plan.max_bad_fraction == 1:
        return
    options, seen = plan.options, _SeenFields()
    parts = list(_sample_ranges(plan, _SAMPLE_BYTES // _NUM_PLACES))[:1]
    next(read_records(parts, options, seen, batch_bytes=_SAMPLE_BYTES // _NUM_PLACES), None)
    if not seen.num_chars:
        return
    wanted = options.text_template or options.text_field
    flags = [f"--text_field {name}" for name, number in seen.num_chars.most_common(1) if number]
    for name in dict.fromkeys(seen.messages):
        flags.insert(0, "--record chat" + ("" if name == "messages" else f" --text_field {name}"))
    names = ", ".join(printable(name) for name in list(seen.num_chars)[:_NUM_SHOWN])
    raise BadInput(
        f"no record of a sample of {plan.input_dir} has {wanted!r} as "
        f"{'a list of messages' if options.is_chat else 'a string'}; their fields are: {names}; "
        f"plan with {', or '.join(flags) or '--text_field NAME'}",
        path=plan.input_dir,
        found=names,
        expected=repr(wanted),
        remedy=flags[0] if flags else "--text_field NAME",
    )


def estimate_of(plan: Plan, folder: Path) -> CostEstimate:
    """The same for a data set that is planned in ``folder``, with its own tokenizer: 1 to 2 s of CPU."""
    path = folder / TOKENIZER_DIR / TOKENIZER_FILE
    return measure(plan, tokenizers_engine(path, allow_special_tokens=plan.options.encodes_control_tokens))


class _OtherFields:
    """Which fields beside the text some record of the sample has: a misspelt one is empty in all shards."""

    def __init__(self, options: PlanOptions) -> None:
        self._options = options
        self._wanted = {"--id_field": options.id_field, "--source_field": options.source_field}
        self._has_records, self._seen = False, {""}

    def look_at(self, documents: Documents) -> None:
        if not documents.texts or not documents.columns.keys() & {"id", "source"}:
            return
        self._has_records = True
        if any(documents.columns.get("id", ())):
            self._seen.add(self._options.id_field)
        if any(documents.columns.get("source", ())):
            self._seen.add(self._options.source_field)

    def note(self) -> list[str]:
        unseen = [f"{flag} {name}" for flag, name in self._wanted.items() if name not in self._seen]
        if not unseen or not self._has_records:
            return []
        return [f"no record of a sample has a value for {', '.join(unseen)}; check the spelling"]


def _bad_note(plan: Plan, counting: Counting) -> list[str]:
    if counting.bad_fraction <= plan.max_bad_fraction:
        return []
    what = f"would be left out ({', '.join(sorted(counting.bad_reasons))})"
    limit = f"a shard with more than {plan.max_bad_fraction:.0%} fails"
    return [f"{counting.bad_fraction:.0%} of the documents in a sample {what}; {limit}"]


def _add_cpu(since_s: float, total_s: float) -> tuple[float, float]:
    now = time.process_time()
    return now, total_s + now - since_s


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder under TMPDIR for the time of a ``with``. Raises CannotWrite where none can be made."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="shardprep-"))
    except OSError as error:
        raise CannotWrite(
            f"no scratch folder can be made: {error.strerror}; let TMPDIR name a folder with some space"
        ) from None
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # rmtree lets some through that it was told to ignore
            shutil.rmtree(folder, ignore_errors=True)
