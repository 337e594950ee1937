"""``train_tokenizer``: a byte-level BPE like Llama 3's, from the inputs that ``plan`` takes.

All but its vocabulary is that of Llama 3.1, read off its tokenizer.json; a test compares the two. Inputs
beyond ``max_bytes`` are divided as into shards, and of each part the beginning is taken, about 1 MiB.

Price, with tokenizers 0.23.3 on 2 cores and vocab_size 128,000: 20 MB of Korean reviews 0.76 GB and 14 s,
16 MB of English paragraphs 0.16 GB and 3 s. Memory grows with the 0.77th power of the bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from preprocess.make.engines import LLAMA3_REGEX
from preprocess.plan.planning import even_places, list_inputs, stamp_inputs
from preprocess.read.documents import BadDocument, Documents, read_documents
from shardprep.command_line import parse_size
from shardprep.console import LOG_EVERY_S, Progress, counted, say
from shardprep.errors import BadInput, CannotWrite, Refused, UsageError
from shardprep.files import PublishedFolder, is_folder, make_folder, names_in, size_of_file
from shardprep.format.input_formats import place_text
from shardprep.format.options import PlanOptions
from shardprep.format.plan import ByteRange

PART_BYTES = 1 << 20
MIN_NUM_PARTS = 64
READ_BYTES = 1 << 18
PIECE_CHARS = 4096  # longer texts are cut: one word of a million letters would stall every merge


def training_options(encoding: str, text_field: str = "text", text_template: str = "") -> PlanOptions:
    """How inputs are read for training. Raises UsageError."""
    return PlanOptions(
        encoding=encoding,
        text_field=None if text_template else text_field,  # type: ignore[arg-type]  # None: not given
        text_template=text_template,
    )


class TrainingText:
    """Iterates over batches of stripped texts, documents or pieces of long ones, and counts what it met.

    Errors: NotFound (no folder, no input in it), BadInput (a file is not of its format, or lacks the columns
    of the text), UsageError (a format needs a library that is missing), ReadWriteError.
    """

    def __init__(
        self, input_dir: Path, options: PlanOptions, max_bytes: int, *, recursive: bool = False
    ) -> None:
        paths = list_inputs(input_dir, recursive=recursive)
        inputs, inspected = stamp_inputs(input_dir, paths, options)
        total = sum(item.text_bytes for item in inspected)
        num_parts = 1 if total <= max_bytes else max(MIN_NUM_PARTS, max_bytes // PART_BYTES)
        self._places = even_places(input_dir, inputs, inspected, num_parts, options)
        self._options, self._max_bytes = options, max_bytes
        self._paths, self._sizes = paths, [item.num_bytes for item in inputs]
        # Bytes of text to take per byte of each file.
        self._shares = [
            item.text_bytes / max(1, size) * max_bytes / max(1, total)
            for item, size in zip(inspected, self._sizes, strict=True)
        ]
        self.progress = Progress("reading", min(sum(self._sizes), max_bytes))
        self.is_read = False
        self.num_texts = 0
        self.num_bytes = 0  # of text
        self._bad: Counter[str] = Counter()  # documents left out, by reason
        self._first_bad = ""

    def __iter__(self) -> Iterator[list[str]]:
        for (first, start), (last, end) in itertools.pairwise(self._places):
            parts = [
                ByteRange(
                    input_number=number,
                    path=self._paths[number],
                    start=start.byte if number == first else 0,
                    end=end.byte if number == last else self._sizes[number],
                    text_start=start.text_byte if number == first else 0,
                )
                for number in range(first, last + (end.byte > 0))
            ]
            limit = sum((part.end - part.start) * self._shares[part.input_number] for part in parts)
            with contextlib.closing(
                read_documents(parts, self._options, batch_bytes=READ_BYTES)
            ) as documents:
                yield from self._beginning(documents, min(self._max_bytes, self.num_bytes + limit))
        self.is_read = True

    def _beginning(self, found: Iterator[Documents], ends_at: float) -> Iterator[list[str]]:
        """The texts of a part in pieces, stripped, up to where enough was taken."""
        for documents in found:
            self._leave_out(documents.bad)
            pieces: list[str] = []
            for text in documents.texts:
                for piece in pieces_of_text(text.decode()):
                    num_bytes = len(piece.encode())
                    if self.num_bytes + num_bytes > ends_at:
                        yield pieces
                        return
                    self.num_bytes += num_bytes
                    if stripped := piece.strip():
                        pieces.append(stripped)
                        self.num_texts += 1
            yield pieces
            self.progress.add(documents.num_bytes)

    def _leave_out(self, bad: list[BadDocument]) -> None:
        self._bad.update(one.reason for one in bad)
        if bad and not self._first_bad:
            self._first_bad = place_text(str(self._paths[bad[0].source]), bad[0].source_offset)

    def describe(self) -> str:
        """What was read and what was left out."""
        num_files, num_texts = counted(len(self._paths), "file"), counted(self.num_texts, "document")
        found = f"read {self.num_bytes:,} bytes of text in {num_files}, {num_texts}, long ones in pieces"
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


DEFAULT_MAX_BYTES = 256 << 20
MIN_MAX_BYTES = 1_000_000  # below it the sampled parts would be shorter than lines
NUM_BYTE_TOKENS = 256
MIN_PAIR_COUNT = 2  # a pair seen once is no regularity

# Llama 3.1's special tokens, by position; the others are reserved ones. Read off its tokenizer.json.
BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"
_ROLES = ("step_id", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag", "image")
_NAMED = {0: BOS, 1: EOS, 4: PAD} | {5 + number: f"<|{name}|>" for number, name in enumerate(_ROLES)}


def train_tokenizer(
    *,
    input_dir: Path,
    vocab_size: int = 128_000,
    output_dir: Path,
    recursive: bool = False,
    encoding: str = "utf-8",
    max_bytes: int = DEFAULT_MAX_BYTES,
    text_field: str = "text",
    text_template: str = "",
) -> None:
    """Train a tokenizer on the inputs of a folder; write tokenizer.json and tokenizer_config.json.

    ``vocab_size`` counts the base tokens, bytes included; 256 special tokens come on top. ``text_field``
    or ``text_template`` say what of a record is the text. Equal inputs and arguments give equal bytes.

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
    folder = output_dir.resolve()
    _refuse_existing(folder)
    options = training_options(encoding, text_field, text_template)
    text = TrainingText(input_dir, options, max_bytes, recursive=recursive)
    make_folder(folder.parent, parents=True)
    with PublishedFolder(folder) as unfinished:
        tokenizer = untrained_tokenizer()
        with text.progress:
            _train(tokenizer, text, vocab_size)
        num_base = tokenizer.get_vocab_size()
        add_special_tokens(tokenizer)
        _write(tokenizer, unfinished.temporary)
        if not unfinished.publish_first():
            _refuse_existing(folder)
            raise CannotWrite(f"{folder} was made meanwhile: give --output_dir another folder")
    say(text.describe())
    if num_base < vocab_size:
        say(
            f"the text yields {num_base:,} base tokens, not the {vocab_size:,} asked for: no other pair"
            f" comes {MIN_PAIR_COUNT} times. Special tokens follow at id {num_base}; more text gives more"
        )
    sizes = f"{num_base:,} base, 256 special, BOS is {num_base}"
    say(f"{folder}: {num_base + 256:,} tokens ({sizes})")


def _train(tokenizer: Tokenizer, text: TrainingText, vocab_size: int) -> None:
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
            seconds = time.monotonic() - began
            text.progress.say(f"all text is read, its pairs are merged; {seconds:.0f} s in all")
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
    words = pre_tokenizers.Split(Regex(LLAMA3_REGEX), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def add_special_tokens(tokenizer: Tokenizer) -> None:
    """Append the special tokens after the base vocabulary, and prepend BOS to whatever is encoded."""
    special = [AddedToken(name, special=True, normalized=False) for name in special_tokens()]
    tokenizer.add_special_tokens(special)
    letters = processors.ByteLevel(add_prefix_space=True, trim_offsets=False, use_regex=True)
    ids = [(BOS, tokenizer.token_to_id(BOS))]
    begin = processors.TemplateProcessing(f"{BOS} $A", f"{BOS} $A {BOS} $B", special_tokens=ids)
    tokenizer.post_processor = processors.Sequence([letters, begin])


def _refuse_existing(folder: Path) -> None:
    """Refuse a folder that holds anything: a tokenizer is never overwritten, data sets hold its ids."""
    if names := names_in(folder):
        others = f"{counted(len(names), 'file')} ({names[0]}, ...)"
        what = "a tokenizer" if "tokenizer.json" in names else others
        raise Refused(f"{folder} already holds {what}: give --output_dir a new or empty folder")
    if size_of_file(folder) is not None and not is_folder(folder):
        raise CannotWrite(f"{folder} is a file: give --output_dir a folder")


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags; ``main`` takes what the parser makes of them."""
    folder: dict[str, Any] = {"metavar": "PATH", "type": Path, "required": True}
    parser.add_argument("--input_dir", **folder, help="folder of inputs, as plan takes them")
    parser.add_argument("--output_dir", **folder, help="new or empty folder of the tokenizer")
    text = "number of base tokens; 256 special tokens follow"
    parser.add_argument("--vocab_size", metavar="N", type=int, default=128_000, help=text)
    text = "also take the input files of subfolders (default: off)"
    parser.add_argument("--recursive", action="store_true", help=text)
    text = "encoding of .txt; lines that cannot be decoded are dropped"
    parser.add_argument("--encoding", metavar="TEXT", default="utf-8", help=text)
    fields = parser.add_mutually_exclusive_group()
    fields.add_argument("--text_field", metavar="TEXT", default="text", help="field of the text")
    text = "text of several fields: '{input}\\n\\n{output}' (default: none)"
    fields.add_argument("--text_template", metavar="TEXT", default="", help=text)
    text = "text to train on, sampled evenly over the input; 256M takes about 5 GB of memory"
    parser.add_argument("--max_bytes", metavar="SIZE", default="256M", help=text)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    names = ("input_dir", "vocab_size", "output_dir", "recursive", "encoding", "text_field", "text_template")
    given = {name: getattr(args, name) for name in names}
    train_tokenizer(**given, max_bytes=parse_size(args.max_bytes, "--max_bytes"))
    return 0
