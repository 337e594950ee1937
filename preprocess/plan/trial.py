"""What planning tries: a sample of the input, what the plan will cost, a function, a chat template.

The sample is 2 MiB from 8 places, one in each eighth of the input, so planning takes a second or two longer
for it, however large the input is. It goes through the stages of a worker, whose CPU seconds are scaled up. A
sample without one usable record stops planning: its fields are others.

A user's function must give the same texts again, in this process and in another one: the order of a set
differs between processes, and what a function remembers only shows in one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preprocess.make.engines import Engine
from preprocess.make.shard_writer import Counting, ShardWriter
from preprocess.read import BATCH_BYTES
from preprocess.read.chat import ChatTemplate, TooCostly, render_conversations, texts_in
from preprocess.read.documents import Documents, read_documents, read_records, starts_in
from preprocess.read.format import SHORT_LINE_BYTES, OpenInput
from preprocess.read.text_fields import TextFields, UnusableText
from preprocess.read.transform import Transform
from shardprep import HOME
from shardprep.console import counted, printable
from shardprep.errors import BadInput, CannotWrite, UsageError
from shardprep.format.options import PlanOptions
from shardprep.format.plan import ByteRange, Cut, InputFile, Plan, ranges_between

_NUM_PLACES = 8  # of the input that are sampled
_SAMPLE_BYTES = 2 << 20  # in all
_MOST_FILES = 16  # of the sample: to open one is a round trip on a network file system
_NUM_SHOWN = 20  # fields
_FUNCTION_BYTES = 1 << 18  # that a function is tried on
_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from preprocess.plan.trial import answer; answer()"
_STARTUP_S = 3.0  # a task's Python and tokenizer, generously
_GOLDEN_RATIO = 0.618034  # its multiples are spread evenly over 0 to 1


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """Figures of the whole plan, scaled up from the sample."""

    num_tokens: int
    output_bytes: int
    core_hours: float
    longest_shard_s: float  # on one core
    notes: tuple[str, ...]  # what in the sample is not as the options expect it


def sample_of_plan(plan: Plan, num_bytes: int, transform: Transform | None) -> Iterator[Documents]:
    """Yield documents of about this much of a plan's input, from evenly spread places."""
    return sample_documents(
        plan.input_dir,
        plan.inputs,
        plan.options,
        num_bytes=num_bytes,
        num_places=_NUM_PLACES,
        most_files=_MOST_FILES,
        transform=transform,
    )


def measure(plan: Plan, engine: Engine, transform: Transform | None = None) -> CostEstimate:
    """Run a sample through the worker's own stages into a scratch folder, and scale its CPU seconds up.

    Raises BadInput where no record of the sample has the field of the text.
    """
    num_bytes = 0
    found: dict[str, bool] = {}  # "id" and "source", where records are asked for them: whether one has it
    with scratch_folder() as folder, ShardWriter(folder, plan, 0) as writer:
        began = time.process_time()
        for documents in sample_of_plan(plan, _SAMPLE_BYTES, transform):
            tokens = engine.encode_documents(
                documents, end_id=plan.end_id, mask_rule=plan.options.chat_mask_rule
            )
            writer.append(writer.members.lay_out(documents, tokens))
            num_bytes += documents.num_bytes
            for name in ("id", "source") if documents.texts else ():
                if name in documents.columns:
                    found[name] = found.get(name, False) or any(documents.columns[name])
        cpu_s = time.process_time() - began
        manifest = writer.commit({})
    counting = writer.counting
    _check_fields(plan, counting)
    notes = []
    if counting.bad_fraction > plan.max_bad_fraction:
        what = f"are left out ({', '.join(sorted(counting.bad_reasons))})"
        limit = f"a shard with more than {plan.max_bad_fraction:.0%} fails"
        notes.append(f"{counting.bad_fraction:.0%} of the documents in a sample {what}; {limit}")
    fields = {name: getattr(plan.options, f"{name}_field") for name in found}
    unseen = [f"--{name}_field {field}" for name, field in fields.items() if field and not found[name]]
    if unseen:
        notes.append(f"no record of a sample has a value for {', '.join(unseen)}; check the spelling")
    shard_bytes = plan.shard_bytes()
    scale = sum(shard_bytes) / max(1, num_bytes)
    num_documents = counting.num_documents * scale
    taken = min(1.0, (plan.options.limit or num_documents) / max(1.0, num_documents))  # of a trial
    files = filter(None, [manifest.tar, manifest.idx, manifest.digests, manifest.ids])
    return CostEstimate(
        num_tokens=round(counting.num_tokens * scale * taken),
        output_bytes=round(sum(file.num_bytes for file in files) * scale * taken),
        core_hours=(cpu_s * scale * taken + _STARTUP_S * plan.num_shards) / 3600,
        longest_shard_s=cpu_s * taken * max(shard_bytes) / max(1, num_bytes) + _STARTUP_S,
        notes=tuple(notes),
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
    item = next(item for item in plan.inputs if item.num_bytes)
    part = ByteRange(input_number=0, path=plan.input_dir / item.path, start=0, end=item.num_bytes)
    records = read_records([part], options, seen, batch_bytes=_SAMPLE_BYTES // _NUM_PLACES)
    next(records, None)
    if not seen.num_chars:
        return
    wanted = options.text_template or options.text_field
    flags = [f"--text_field {name}" for name, number in seen.num_chars.most_common(1) if number]
    for name in dict.fromkeys(seen.messages):
        flags.insert(0, "--record chat" + ("" if name == "messages" else f" --text_field {name}"))
    names = ", ".join(printable(name) for name in list(seen.num_chars)[:_NUM_SHOWN])
    flags = flags or ["--text_field NAME"]
    kind = "a list of messages" if options.is_chat else "a string"
    message = f"no record of a sample of {plan.input_dir} has {wanted!r} as {kind}; their fields are: {names}"
    raise BadInput(
        f"{message}; plan with {', or '.join(flags)}",
        path=plan.input_dir,
        found=names,
        expected=repr(wanted),
        remedy=flags[0],
    )


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make an empty folder under TMPDIR for the time of a ``with``. Raises CannotWrite."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="shardprep-"))
    except OSError as error:
        found = f"no scratch folder can be made: {error.strerror}"
        raise CannotWrite(found=found, expected="one with some space; let TMPDIR name it") from None
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # rmtree ignores no error of close()
            shutil.rmtree(folder, ignore_errors=True)


def sample_documents(
    input_dir: Path,
    inputs: Sequence[InputFile],
    options: PlanOptions,
    *,
    num_bytes: int,
    num_places: int,
    most_files: int = sys.maxsize,
    transform: Transform | None = None,
) -> Iterator[Documents]:
    """Yield about ``num_bytes`` of text, evenly from each place. What one place lacks the next one gives.

    Inputs of fewer bytes are read whole, if they are no more than ``most_files``. Of a file that can be read
    from its beginning alone (gzip), it is the head. No document comes twice, and a very long one comes whole.
    """
    places = [Cut(0, 0)]
    total = sum(item.num_bytes for item in inputs)
    if total > num_bytes or (total and len(inputs) > most_files):
        places += _places(input_dir, inputs, options, num_places)
    each, files_each = num_bytes // len(places), max(1, most_files // len(places))
    allowed = taken = 0
    for place, following in itertools.pairwise([*places, Cut(len(inputs), 0)]):
        allowed += each
        if taken >= allowed:
            continue
        # As the files are now: whether they are as they were planned is asked by those who make shards.
        ranges = ranges_between(input_dir, inputs, place, following)
        parts = (dataclasses.replace(part, planned=None) for part in ranges if part.start < part.end)
        found = read_documents(
            list(itertools.islice(parts, files_each)),
            options,
            batch_bytes=max(1, min(BATCH_BYTES, each)),
            transform=transform,
        )
        with contextlib.closing(found):
            for documents in found:
                yield documents
                taken += sum(map(len, documents.texts)) + len(documents.bad) * SHORT_LINE_BYTES
                if taken >= allowed:
                    break


def _places(input_dir: Path, inputs: Sequence[InputFile], options: PlanOptions, num_places: int) -> list[Cut]:
    """Return where samples begin behind the first, ascending. Several may be one."""
    ends = list(itertools.accumulate((item.num_bytes for item in inputs), initial=0))
    places: list[Cut] = []
    number = 0
    for place in range(1, num_places):
        # Each lies elsewhere in its stretch: at its beginning, equal files would show their heads alone.
        target = int(ends[-1] * (place + (0.5 + place * _GOLDEN_RATIO) % 1) / num_places)
        while ends[number + 1] <= target:
            number += 1
        file, byte = OpenInput(input_dir / inputs[number].path), target - ends[number]
        (start,) = starts_in(file, [(byte, sys.maxsize)], options)
        if start is not None and start.byte < inputs[number].num_bytes:
            places.append(Cut(number, start.byte, start.text_byte))
        elif places and places[-1].input_number == number:  # none follows in this file
            places.append(places[-1])
        else:
            places.append(Cut(number, 0))
    return places


def _try(plan: Plan, transform: Transform) -> tuple[str, int, list[str]]:
    """Put a sample through a function. Return the texts' hash, the documents' number, and why some failed."""
    digest, num_documents, failures = hashlib.sha256(), 0, list[str]()
    for documents in sample_of_plan(plan, _FUNCTION_BYTES, transform):
        num_documents += len(documents.texts) + len(documents.bad)
        failures += [bad.detail for bad in documents.bad if bad.reason == "transform_error"]
        for text in documents.texts:
            digest.update(len(text).to_bytes(8, "big") + text)
    return digest.hexdigest(), num_documents, failures


def check_transform(plan: Plan, transform: Transform, say: Callable[[str], None]) -> None:
    """Try the function on a sample of the input.

    Raises UsageError where it gives other texts again or ends its process, BadInput where it fails for all.
    """
    # First in another process: what ends a process ends that one.
    command = [sys.executable, "-c", _CODE, str(HOME)]
    done = subprocess.run(
        command, input=pickle.dumps((plan, transform.path)), capture_output=True, check=False
    )
    words = done.stdout.split()
    if done.returncode or not words:
        last_line = "".join(done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:])
        found = f"it ended the process that tried it, with exit code {done.returncode}"
        expected = f"a text; its last words: {last_line or 'none'}"
        raise UsageError(path=transform.path, found=found, expected=expected)
    texts_elsewhere = words[-1].decode()  # the function may print, too
    texts, num_documents, failures = _try(plan, transform)
    if failures:
        found = f"--transform {transform.path} fails for {len(failures)} of {num_documents} sampled documents"
        message = f"{found}, first so: {failures[0]}"
        if len(failures) == num_documents:
            raise BadInput(message, path=transform.path)
        say(f"warning: {message}")
    for texts_again, where in (
        (_try(plan, transform)[0], "the second time that it was given the same sample"),
        (texts_elsewhere, "in another process"),
    ):
        if texts_again != texts:
            expected = "the same text for the same record, whatever the time, chance and other documents"
            raise UsageError(path=transform.path, found=f"other texts {where}", expected=expected)


def answer() -> None:
    """Print the hash of the texts of the sample that stands on standard input."""
    plan, path = pickle.loads(sys.stdin.buffer.read())  # noqa: S301 - of the process that started this one
    transform = Transform(path, plan.options.transform_files)
    sys.stdout.write(f"\n{_try(plan, transform)[0]}\n")


def _turns(*texts: str) -> list[dict[str, Any]]:
    return [dict(zip(("role", "content"), text.split(": ", 1), strict=True)) for text in texts]


_QUESTION = _turns("user: What is it?", "assistant: A probe.")
_CALL = {
    "id": "call00001",  # nine letters and digits, as Mistral's templates want it
    "type": "function",
    "function": {"name": "probe_tool", "arguments": {"probe_key": "probe_value"}},
}
_SHAPES = {
    "several turns": [*_QUESTION, *_turns("user: And now?", "assistant: Again.")],
    "a system message": [*_turns("system: Be brief."), *_QUESTION],
    "two user messages in a row": [*_turns("user: Hear this."), *_QUESTION],
    "two answers in a row": [*_QUESTION, *_turns("assistant: And more.")],
    "reasoning in an earlier turn": [
        *_turns("user: Why?", "assistant: <think>\nSince probes ask.\n</think>\n\nSo.", "user: And then?"),
        *_turns("assistant: <think>\nThey end.\n</think>\n\nNothing."),
    ],
    "tool calls": [
        *_turns("user: Ask the tool."),
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "probe_tool", "tool_call_id": "call00001", "content": "The tool says so."},
        *_turns("assistant: It answered."),
    ],
}


def template_warnings(template: ChatTemplate) -> Iterator[str]:
    """Yield why conversations of some shapes cannot be rendered, and which lose text.

    Raises UsageError where one takes too much memory or time, and ReadWriteError.
    """
    shapes = {name: shape for name, shape in _SHAPES.items() if name != "tool calls"}
    if "tool_calls" in template.text:
        shapes["tool calls"] = _SHAPES["tool calls"]
    try:
        rendered = render_conversations(template, list(map(json.dumps, shapes.values())))
    except TooCostly as error:
        num_messages = len(list(shapes.values())[error.number])
        raise UsageError(
            f"{error}, for a conversation of {counted(num_messages, 'message')} that plan tries; pass a "
            "template without endless loops and huge texts as --chat_template_file"
        ) from None
    unusable: dict[str, list[str]] = {}  # why -> names of shapes
    losing = []
    for (name, shape), found in zip(shapes.items(), rendered, strict=True):
        if isinstance(found, UnusableText):
            unusable.setdefault(found.detail, []).append(name)
            continue
        said: list[str] = []
        for message in shape:
            for text in texts_in([message.get("content"), message.get("tool_calls")]):
                said += re.split(r"\s*</?think>\s*", text)
        lost = [words for words in said if words not in ("call00001", "function") and words not in found.text]
        if lost:
            losing.append(f"{name} ({lost[0]!a})")
    for why, names in unusable.items():
        yield (
            f"the chat template cannot render conversations with {', or '.join(names)}: {why}; such "
            "conversations will be left out; change the data, or put {% generation %} and "
            "{% endgeneration %} around what the assistant writes in a copy of the template, and pass "
            "--chat_template_file"
        )
    if losing:
        yield (
            f"the chat template leaves out text of conversations with {', or '.join(losing)}; the assistant "
            "will not learn it: to keep it, pass a template that renders it as --chat_template_file"
        )
