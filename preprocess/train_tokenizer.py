"""``train_tokenizer``: a byte-level BPE like Llama 3's, from the inputs that ``plan`` takes.

All but its vocabulary is that of Llama 3.1, read off its tokenizer.json; a test compares the two. Of files
beyond ``max_bytes`` in all a sample is taken, from places a few MiB apart.

Price, with tokenizers 0.23.3 on 2 cores and vocab_size 128,000: 20 MB of Korean reviews 0.76 GB and 14 s,
16 MB of English paragraphs 0.16 GB and 3 s. Memory grows with the 0.77th power of the bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from preprocess.make.engines import LLAMA3_REGEX
from preprocess.plan.inputs import find_inputs, sample_documents, stamp_inputs
from shardprep.command_line import add_flags_of, parse_size
from shardprep.console import LOG_EVERY_S, Progress, counted, say
from shardprep.errors import BadInput, CannotWrite, Refused, UsageError
from shardprep.files import PublishedFolder, is_folder, make_folder, names_in, size_of_file
from shardprep.format.names import place_text
from shardprep.format.plan import PlanOptions

PIECE_CHARS = 4096  # longer texts are cut: one word of a million letters would stall every merge
_PLACE_BYTES = 1 << 20  # of text that is taken at each place
_MIN_NUM_PLACES = 256
_MIN_MAX_BYTES = 1_000_000  # below it the samples would be shorter than lines
_PLAN_OPTIONS = ("recursive", "encoding", "text_field", "text_template")

# Llama 3.1's special tokens, by position; the others are reserved ones. Read off its tokenizer.json.
_BOS, _EOS, _PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"
_ROLES = ("step_id", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag", "image")
_NAMED = {0: _BOS, 1: _EOS, 4: _PAD} | {5 + number: f"<|{name}|>" for number, name in enumerate(_ROLES)}


def train_tokenizer(args: argparse.Namespace) -> int:
    """Train a tokenizer on the inputs of a folder. Equal inputs and flags give equal bytes."""
    vocab_size, max_bytes = args.vocab_size, parse_size(args.max_bytes, "--max_bytes")
    if vocab_size < 256:
        expected = "256 or more: the bytes and their merges (Llama 3 has 128000)"
        raise UsageError.of_value("--vocab_size", vocab_size, expected)
    if max_bytes < _MIN_MAX_BYTES:
        raise UsageError.of_value("--max_bytes", max_bytes, f"{_MIN_MAX_BYTES} or more")
    folder = args.output_dir.resolve()
    expected = "a new or empty folder, as a tokenizer is never overwritten; give --output_dir another one"
    if names := names_in(folder):
        raise Refused(path=folder, found=f"a folder that holds {names[0]}", expected=expected)
    if size_of_file(folder) is not None and not is_folder(folder):
        raise CannotWrite(path=folder, found="a file", expected=expected)
    options = {name: value for name, value in vars(args).items() if name in _PLAN_OPTIONS}
    text = _TrainingText(args.input_dir, PlanOptions(**options), max_bytes)
    make_folder(folder.parent, parents=True)
    with PublishedFolder(folder) as unfinished:
        tokenizer = _trained(text, vocab_size)
        num_base = tokenizer.get_vocab_size()
        # Llama 3.1's special tokens stand behind the base vocabulary, and BOS begins what is encoded.
        reserved = (f"<|reserved_special_token_{number}|>" for number in range(256))
        names = [_NAMED.get(position) or next(reserved) for position in range(256)]
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
        letters = processors.ByteLevel(add_prefix_space=True, trim_offsets=False, use_regex=True)
        ids = [(_BOS, tokenizer.token_to_id(_BOS))]
        begin = processors.TemplateProcessing(f"{_BOS} $A", f"{_BOS} $A {_BOS} $B", special_tokens=ids)
        tokenizer.post_processor = processors.Sequence([letters, begin])
        config = {"bos_token": _BOS, "clean_up_tokenization_spaces": False, "eos_token": _EOS}
        config |= {"pad_token": _PAD, "padding_side": "right", "tokenizer_class": "PreTrainedTokenizerFast"}
        try:
            path = unfinished.temporary / "tokenizer.json"
            path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
            path = unfinished.temporary / "tokenizer_config.json"
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise CannotWrite(f"cannot write the tokenizer in {folder}: {error.strerror or error}") from error
        if not unfinished.publish_first():
            raise Refused(path=folder, found="a folder that was made meanwhile", expected=expected)
    say(text.summary())
    if num_base < vocab_size:
        what = f"the text yields {num_base:,} base tokens, not the {vocab_size:,} asked for"
        say(f"{what}: no other pair comes twice; more text gives more")
    say(f"{folder}: {num_base + 256:,} tokens ({num_base:,} base, 256 special, BOS is {num_base})")
    return 0


class _TrainingText:
    """Iterates over lists of stripped texts, documents or pieces of long ones, and counts what it met."""

    def __init__(self, input_dir: Path, options: PlanOptions, max_bytes: int) -> None:
        self._input_dir, self._options, self._max_bytes = input_dir, options, max_bytes
        paths = find_inputs(input_dir, options).paths
        self._inputs = [item.file for item in stamp_inputs(input_dir, paths, options)]
        self._progress = Progress("reading", min(sum(item.num_bytes for item in self._inputs), max_bytes))
        self.is_read = False
        self.num_texts = self._num_bytes = 0  # the bytes are of text
        self._bad: Counter[str] = Counter()  # documents left out, by reason
        self._first_bad = ""

    def __iter__(self) -> Iterator[list[str]]:
        num_places = max(_MIN_NUM_PLACES, self._max_bytes // _PLACE_BYTES)
        for batch in sample_documents(
            self._input_dir, self._inputs, self._options, num_bytes=self._max_bytes, num_places=num_places
        ):
            for bad in batch.bad:
                self._bad[bad.reason] += 1
                path = str(self._input_dir / self._inputs[batch.input_number].path)
                self._first_bad = self._first_bad or place_text(path, bad.source_offset)
            kept: list[str] = []
            for piece in (
                text[begin : begin + PIECE_CHARS].strip()
                for text in map(bytes.decode, batch.texts)
                for begin in range(0, len(text), PIECE_CHARS)
            ):
                if self._num_bytes + len(piece.encode()) > self._max_bytes:
                    break
                self._num_bytes += len(piece.encode())
                kept.append(piece)
            self.num_texts += len(kept)
            yield kept
            self._progress.add(batch.num_bytes)
        self.is_read = True

    def summary(self) -> str:
        files, texts = counted(len(self._inputs), "file"), counted(self.num_texts, "text")
        found = f"read {self._num_bytes:,} bytes of text in {files}, {texts}, long documents in pieces"
        if not self._bad:
            return found
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self._bad.most_common())
        num_bad = counted(self._bad.total(), "document")
        return f"{found}; left out {num_bad} ({reasons}; the first in {self._first_bad})"


def _trained(text: _TrainingText, vocab_size: int) -> Tokenizer:
    """Return Llama 3's pipeline, its vocabulary filled from the text."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    words = pre_tokenizers.Split(Regex(LLAMA3_REGEX), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, show_progress=False, initial_alphabet=alphabet
    )
    failures: list[BaseException] = []

    def train() -> None:
        try:
            tokenizer.train_from_iterator(text, trainer)
        except BaseException as error:  # raised again by the caller
            failures.append(error)

    # In a thread: tokenizers answers Ctrl-C only after its last merge.
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOG_EVERY_S)
        if text.is_read and thread.is_alive():
            say("all text is read, its pairs are merged")
    if failures:
        raise failures[0]
    if not text.num_texts:
        raise BadInput(f"{text.summary()}: nothing to train on; are --encoding and --text_field right?")
    return tokenizer


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input_dir", metavar="PATH", type=Path, required=True, help="folder of inputs, as plan takes them")
    add("--output_dir", metavar="PATH", type=Path, required=True, help="new or empty folder of the tokenizer")
    text = "number of base tokens; 256 special tokens follow"
    add("--vocab_size", metavar="N", type=int, default=128_000, help=text)
    text = "text to train on, sampled evenly over the input; 256M takes about 5 GB of memory"
    add("--max_bytes", metavar="SIZE", default="256M", help=text)
    others = {item.name for item in dataclasses.fields(PlanOptions)} - {*_PLAN_OPTIONS}
    add_flags_of(parser, PlanOptions, but=others, is_grouped=False)
