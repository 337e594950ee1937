"""``train_tokenizer``: a byte-level BPE like Llama 3's, from the inputs that ``plan`` takes.

All but its vocabulary is that of Llama 3.1, read off its tokenizer.json; a test compares the two. Inputs
beyond ``max_bytes`` are sampled: stretches of about 1 MiB begin evenly spread over all files, each read from
the next place where a part of its file may begin; one without such a place lengthens the one before it.

Price, with tokenizers 0.23.3 on 2 cores and vocab_size 128,000: 20 MB of Korean reviews 0.76 GB and 14 s,
16 MB of English paragraphs 0.16 GB and 3 s. Memory grows with the 0.77th power of the bytes.
"""

from __future__ import annotations

import argparse
import bisect
import codecs
import itertools
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from preprocess.formats.documents import documents_of, inspect_input, starts_in
from preprocess.formats.format import DocumentBatch, Reading, Start
from preprocess.formats.inputs import BadDocument, ByteRange, OpenInput, RangeReader
from preprocess.formats.text_fields import TextFields
from preprocess.make.engines import LLAMA3_REGEX
from preprocess.plan.planning import list_inputs
from shardprep.command_line import parse_size
from shardprep.console import LOG_EVERY_S, Progress, counted, say
from shardprep.errors import BadInput, CannotWrite, Refused, UsageError
from shardprep.files import PublishedFolder, names_in
from shardprep.format.input_formats import place_text

SPAN_BYTES = 1 << 20
MIN_NUM_SPANS = 64
READ_BYTES = 1 << 18
PIECE_CHARS = 4096  # longer texts are cut: one word of a million letters would stall every merge


@dataclass(frozen=True, kw_only=True)
class Span:
    """Bytes [start, stop) of the text of a file that has ``size_bytes`` of it, about."""

    path: Path
    start: int
    stop: int
    size_bytes: int  # of plain text the file's size

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def training_reading(encoding: str, fields: TextFields | None = None) -> Reading:
    """How inputs are read for training: ``fields`` are the text of records. Raises UsageError."""
    try:
        b"\0\0\0\0".decode(encoding, "replace")
    except (LookupError, ValueError) as error:
        raise UsageError(f"--encoding {encoding!r}: Python knows no such text encoding") from error
    known = codecs.lookup(encoding).name
    return Reading(doc="line", encoding=known, batch_bytes=READ_BYTES, fields=fields or TextFields())


def find_spans(input_dir: Path, max_bytes: int, recursive: bool, reading: Reading) -> list[Span]:
    """What to read of the folder's inputs, in the order of their relative paths.

    Errors: NotFound (no folder, no input in it), BadInput (a file is not of its format, or lacks the columns
    of the text), UsageError (a format needs a library that is missing), ReadWriteError.
    """
    paths = list_inputs(input_dir, recursive=recursive)
    sizes = [inspect_input(OpenInput(path), reading).text_bytes for path in paths]
    return sample_spans(list(zip(paths, sizes, strict=True)), max_bytes)


def sample_spans(files: list[tuple[Path, int]], max_bytes: int) -> list[Span]:
    """All of the files where they hold at most ``max_bytes``, else that many bytes spread over them."""
    total_bytes = sum(size for _, size in files)
    if total_bytes <= max_bytes:
        return [Span(path=path, start=0, stop=size, size_bytes=size) for path, size in files if size]
    num_spans = max(MIN_NUM_SPANS, max_bytes // SPAN_BYTES)
    begins = [number * total_bytes // num_spans for number in range(num_spans)]
    length = max_bytes // num_spans
    spans: list[Span] = []
    base = 0
    for path, size in files:
        first, last = bisect.bisect_right(begins, base - length), bisect.bisect_left(begins, base + size)
        for begin in begins[first:last] if size else ():
            start, stop = max(0, begin - base), min(size, begin - base + length)
            spans.append(Span(path=path, start=start, stop=stop, size_bytes=size))
        base += size
    return spans


class TrainingText:
    """Iterates over batches of stripped texts, documents or pieces of long ones, and counts what it met.

    ``progress`` is told the bytes of text, about, of each block that was read. At most ``max_bytes`` are
    taken, whatever a file's size promised.
    """

    def __init__(
        self,
        spans: list[Span],
        reading: Reading,
        progress: Callable[[int], None] = lambda _: None,
        *,
        max_bytes: int | None = None,
    ) -> None:
        self.is_read = False
        self.num_texts = 0
        self.num_bytes = 0  # of text
        self._spans = spans
        self._reading = reading
        self._progress = progress
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._bad: Counter[str] = Counter()  # documents left out, by reason
        self._first_bad = ""

    def __iter__(self) -> Iterator[list[str]]:
        for path, spans in itertools.groupby(self._spans, lambda span: span.path):
            yield from self._texts_of_file(OpenInput(path), list(spans))
        self.is_read = True

    def _texts_of_file(self, file: OpenInput, spans: list[Span]) -> Iterator[list[str]]:
        num_left = sum(span.num_bytes for span in spans)  # for progress
        for part, most_bytes in _sampled_parts(file, spans, self._reading):
            ends_at = min(self._max_bytes, self.num_bytes + most_bytes)
            for texts, bad, num_bytes in _read_texts(file, part, self._reading):
                self._bad.update(one.reason for one in bad)
                if bad and not self._first_bad:
                    self._first_bad = place_text(str(file.path), bad[0].source_offset)
                told = min(num_left, num_bytes * spans[0].size_bytes // max(1, file.stamp.num_bytes))
                num_left -= told
                self._progress(told)
                pieces, is_full = self._first_pieces(texts, ends_at)
                self.num_texts += len(pieces)
                yield pieces
                if is_full:
                    break
        self._progress(num_left)

    def _first_pieces(self, texts: list[str], ends_at: float) -> tuple[list[str], bool]:
        """The texts in pieces, stripped, up to where enough was taken; whether it was."""
        pieces: list[str] = []
        for piece in itertools.chain.from_iterable(map(pieces_of_text, texts)):
            num_bytes = len(piece.encode())
            if self.num_bytes + num_bytes > ends_at:
                return pieces, True
            self.num_bytes += num_bytes
            if stripped := piece.strip():
                pieces.append(stripped)
        return pieces, False

    def describe(self) -> str:
        """What was read and what was left out."""
        num_files = len({span.path for span in self._spans})
        found = (
            f"read {self.num_bytes:,} bytes of text in {counted(num_files, 'file')}, "
            f"{counted(self.num_texts, 'document')}, long ones in pieces"
        )
        if not self._bad:
            return found
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self._bad.most_common())
        num_bad = counted(self._bad.total(), "document")
        return f"{found}; left out {num_bad} ({reasons}; the first in {self._first_bad})"


def pieces_of_text(text: str) -> Iterator[str]:
    """Cut a text into pieces of at most PIECE_CHARS, before a space where the second half has one."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        space = text.rfind(" ", start + PIECE_CHARS // 2, start + PIECE_CHARS)
        stop = space if space > 0 else start + PIECE_CHARS
        yield text[start:stop]
        start = stop
    yield text[start:]


def _sampled_parts(file: OpenInput, spans: list[Span], reading: Reading) -> Iterator[tuple[ByteRange, float]]:
    """The parts of a file to read for its spans, ascending, and how many bytes of text to take of each."""
    size, text_bytes = file.stamp.num_bytes, spans[0].size_bytes
    parts = [(Start(0), 0.0)]
    if spans[0].num_bytes == text_bytes:
        parts = [(Start(0), math.inf)]
        spans = []
    places = [span.start * size // text_bytes for span in spans]
    starts = starts_in(file, list(itertools.pairwise([*places, size])), reading) if spans else []
    for start, span in zip(starts, spans, strict=True):
        begin, limit = parts[-1]
        if start is not None and begin.byte < start.byte < size:
            parts.append((start, span.num_bytes))
        else:
            parts[-1] = (begin, limit + span.num_bytes)
    ends = [*(begin.byte for begin, _ in parts[1:]), size]
    for (begin, limit), end in zip(parts, ends, strict=True):
        if limit:
            part = ByteRange(
                input_number=0, path=file.path, start=begin.byte, end=end, text_start=begin.text_byte
            )
            yield part, limit


def _read_texts(
    file: OpenInput, part: ByteRange, reading: Reading
) -> Iterator[tuple[list[str], list[BadDocument], int]]:
    """The texts of a part as they come, a long one in pieces; what is bad; bytes of the file read."""
    for item in documents_of(RangeReader(file, part, None), reading, 0):
        if isinstance(item, DocumentBatch):
            yield item.texts, item.bad, item.num_bytes
            continue
        bad: list[BadDocument] = []
        try:
            for piece in item.text():
                yield [piece], [], 0
        except UnicodeDecodeError as error:
            bad = [item.place.undecodable(error)]
        yield [], bad, item.num_bytes


DEFAULT_MAX_BYTES = 256 << 20
MIN_MAX_BYTES = 1_000_000  # below it the sampled stretches would be shorter than lines
NUM_BYTE_TOKENS = 256
MIN_PAIR_COUNT = 2  # a pair seen once is no regularity

# Llama 3.1's special tokens, by position; the others are reserved ones. Read off its tokenizer.json.
BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"
_NAMED = {
    0: BOS,
    1: EOS,
    4: PAD,
    5: "<|step_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
    11: "<|image|>",
}


def train_tokenizer(
    *,
    input_dir: Path,
    vocab_size: int = 128_000,
    output_dir: Path,
    recursive: bool = False,
    encoding: str = "utf-8",
    max_bytes: int = DEFAULT_MAX_BYTES,
    fields: TextFields | None = None,
) -> None:
    """Train a tokenizer on the inputs of a folder; write tokenizer.json and tokenizer_config.json.

    ``vocab_size`` counts the base tokens, bytes included; 256 special tokens come on top. ``fields`` say what
    of a record is the text (default: ``text``). Equal inputs and arguments give equal bytes.

    Errors: UsageError, NotFound (no folder, no input in it), BadInput (no text in them, a broken file),
    ReadWriteError, CannotWrite, Refused (``output_dir`` is there and not empty).
    """
    if vocab_size < NUM_BYTE_TOKENS:
        raise UsageError(
            f"--vocab_size is {vocab_size:,}; a byte-level vocabulary has the {NUM_BYTE_TOKENS} bytes and"
            f" its merges: give {NUM_BYTE_TOKENS} or more (Llama 3 has 128000)"
        )
    if max_bytes < MIN_MAX_BYTES:
        raise UsageError(f"--max_bytes is {max_bytes:,}; give {MIN_MAX_BYTES:,} or more")
    reading = training_reading(encoding, fields)
    spans = find_spans(input_dir, max_bytes, recursive, reading)
    folder = output_dir.resolve()
    _refuse_existing(folder)
    _make_parent(folder)
    with PublishedFolder(folder) as unfinished:
        tokenizer = untrained_tokenizer()
        with Progress("reading", sum(span.num_bytes for span in spans)) as progress:
            text = TrainingText(spans, reading, progress.add, max_bytes=max_bytes)
            _train(tokenizer, text, vocab_size, progress)
        num_base = tokenizer.get_vocab_size()
        add_special_tokens(tokenizer)
        _write(tokenizer, unfinished.temporary)
        if not unfinished.publish_first():
            _refuse_existing(folder)
            raise CannotWrite(f"{folder} is a file: give --output_dir a folder")
    _report(text, num_base, vocab_size, folder)


def _train(tokenizer: Tokenizer, text: TrainingText, vocab_size: int, progress: Progress) -> None:
    """Fill the tokenizer's vocabulary from the text.

    A thread does it, so that this one can hear Ctrl-C, which tokenizers itself would answer only
    after its last merge, and tell that it still merges.
    """
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_PAIR_COUNT,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
    )
    failures: list[BaseException] = []

    def train() -> None:
        try:
            tokenizer.train_from_iterator(text, trainer)
        except BaseException as error:  # raised again by the caller
            failures.append(error)

    thread = threading.Thread(target=train, daemon=True)
    began = time.monotonic()
    thread.start()
    while thread.is_alive():
        thread.join(LOG_EVERY_S)
        if thread.is_alive() and text.is_read:
            progress.say(f"all text is read, its pairs are merged; {time.monotonic() - began:.0f} s in all")
    if failures:
        raise failures[0]
    if not text.num_texts:
        raise BadInput(
            f"{text.describe()}: nothing to train on; are --encoding, and --text_field or --text_template, "
            "right?"
        )


def special_tokens() -> list[str]:
    """Llama 3.1's 256 special tokens in the order of their ids, which follow the base vocabulary."""
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(256))
    return [_NAMED.get(position) or next(reserved) for position in range(256)]


def untrained_tokenizer() -> Tokenizer:
    """Llama 3's pipeline around an empty BPE model."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def add_special_tokens(tokenizer: Tokenizer) -> None:
    """Append the special tokens after the base vocabulary, and prepend BOS to whatever is encoded."""
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special_tokens()]
    )
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(add_prefix_space=True, trim_offsets=False, use_regex=True),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A {BOS} $B",
                special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
            ),
        ]
    )


def _refuse_existing(folder: Path) -> None:
    """Refuse a folder that holds anything: a tokenizer is never overwritten, data sets hold its ids."""
    if names := names_in(folder):
        what = (
            "a tokenizer" if "tokenizer.json" in names else f"{counted(len(names), 'file')} ({names[0]}, ...)"
        )
        raise Refused(f"{folder} already holds {what}: give --output_dir a new or empty folder")


def _make_parent(folder: Path) -> None:
    try:
        if folder.exists() and not folder.is_dir():
            raise CannotWrite(f"{folder} is a file: give --output_dir a folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"cannot write in {folder.parent}: {error.strerror or error}") from error


def _write(tokenizer: Tokenizer, unfinished: Path) -> None:
    config = {
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "pad_token": PAD,
        "padding_side": "right",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    try:
        (unfinished / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        (unfinished / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise CannotWrite(f"cannot write the tokenizer in {unfinished}: {error.strerror or error}") from error


def _report(text: TrainingText, num_base: int, vocab_size: int, folder: Path) -> None:
    say(text.describe())
    if num_base < vocab_size:
        say(
            f"the text yields {num_base:,} base tokens, not the {vocab_size:,} asked for: no other pair"
            f" comes {MIN_PAIR_COUNT} times. Special tokens follow at id {num_base}; more text gives more"
        )
    num_special = len(special_tokens())
    sizes = f"{num_base:,} base, {num_special} special, BOS is {num_base}"
    say(f"{folder}: {num_base + num_special:,} tokens ({sizes})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags; ``main`` takes what the parser makes of them."""
    parser.add_argument(
        "--input_dir", metavar="PATH", type=Path, required=True, help="folder of inputs, as plan takes them"
    )
    parser.add_argument(
        "--output_dir", metavar="PATH", type=Path, required=True, help="new or empty folder of the tokenizer"
    )
    parser.add_argument(
        "--vocab_size",
        metavar="N",
        type=int,
        default=128_000,
        help="number of base tokens; 256 special tokens follow (default: %(default)s)",
    )
    parser.add_argument(
        "--recursive", action="store_true", help="also take the input files of subfolders (default: off)"
    )
    parser.add_argument(
        "--encoding",
        metavar="TEXT",
        default="utf-8",
        help="encoding of .txt; lines that cannot be decoded are dropped (default: %(default)s)",
    )
    fields = parser.add_mutually_exclusive_group()
    fields.add_argument(
        "--text_field", metavar="TEXT", default="text", help="field of the text (default: %(default)s)"
    )
    fields.add_argument(
        "--text_template",
        metavar="TEXT",
        default="",
        help="text of several fields: '{input}\\n\\n{output}' (default: none)",
    )
    parser.add_argument(
        "--max_bytes",
        metavar="SIZE",
        default="256M",
        help="text to train on, sampled evenly over the input; 256M takes about 5 GB of memory "
        "(default: %(default)s)",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    train_tokenizer(
        input_dir=args.input_dir,
        vocab_size=args.vocab_size,
        output_dir=args.output_dir,
        recursive=args.recursive,
        encoding=args.encoding,
        max_bytes=parse_size(args.max_bytes, "--max_bytes"),
        fields=TextFields(args.text_field, args.text_template),
    )
    return 0
