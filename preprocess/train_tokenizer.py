"""A tokenizer of one's own: byte-level BPE, in everything but its vocabulary that of Llama 3.

So data sets, loaders and engines take it as they take Llama 3's. Its pre-tokenizer, post-processor and
special tokens are those of Llama 3.1, read off its tokenizer.json; a test compares the two.

Price: memory grows with the distinct words, so the text is bounded by ``max_bytes``. Measured with
tokenizers 0.23.3 on 2 cores, vocab_size 128,000: 20 MB of Korean reviews 0.76 GB and 14 s, half of
it 0.46 GB and 7 s; 16 MB of English paragraphs 0.16 GB and 3 s. Memory thus grows with the 0.77th
power of the bytes: the default of 256 MB takes about 5 GB on such Korean text, 1 GB about 15 GB.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
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

from preprocess.engines import LLAMA3_REGEX
from preprocess.text_fields import TextFields
from preprocess.training_text import TrainingText, find_spans, training_reading
from shardprep.atomic_files import PublishedFolder
from shardprep.command_line import parse_size
from shardprep.console import LOG_EVERY_S, Progress, say
from shardprep.errors import BadInput, CannotWrite, Refused, UsageError
from shardprep.regular_files import names_in

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

    It takes the formats that planning takes; ``fields`` say what of a record is the text (default: ``text``).

    ``vocab_size`` counts the base tokens, bytes included; 256 special tokens come on top. Larger
    inputs are sampled: ``max_bytes`` of them, in stretches spread evenly over all files, but at the
    beginning of those that can be read only whole. Equal inputs and arguments give equal bytes. Progress
    and the result are told on stderr.

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
        what = "a tokenizer" if "tokenizer.json" in names else f"{len(names)} files ({names[0]}, ...)"
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
    contents = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }
    try:
        for name, content in contents.items():
            (unfinished / name).write_text(content, encoding="utf-8", newline="")
    except OSError as error:
        raise CannotWrite(f"cannot write the tokenizer in {unfinished}: {error.strerror or error}") from error


def _report(text: TrainingText, num_base: int, vocab_size: int, folder: Path) -> None:
    say(text.describe())
    if num_base < vocab_size:
        say(
            f"the text yields {num_base:,} base tokens, not the {vocab_size:,} asked for: no other pair"
            f" comes {MIN_PAIR_COUNT} times. Special tokens follow at id {num_base}; more text gives more"
        )
    size = num_base + len(special_tokens())
    say(f"{folder}: {size:,} tokens ({num_base:,} base, {len(special_tokens())} special, BOS is {num_base})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags; ``main`` takes what the parser makes of them."""
    parser.add_argument("--input_dir", type=Path, required=True, help="folder of inputs, as plan takes them")
    parser.add_argument("--output_dir", type=Path, required=True, help="the tokenizer's folder; new or empty")
    parser.add_argument(
        "--vocab_size", type=int, default=128_000, help="base tokens; 256 special ones follow (%(default)s)"
    )
    parser.add_argument("--recursive", action="store_true", help="take the folders below too")
    parser.add_argument("--encoding", default="utf-8", help="of .txt; lines it cannot read are left out")
    fields = parser.add_mutually_exclusive_group()
    fields.add_argument(
        "--text_field",
        default="text",
        help="field of a record that is the text (%(default)s)",
    )
    fields.add_argument("--text_template", default="", help="several fields: '{input}\\n\\n{output}'")
    parser.add_argument(
        "--max_bytes",
        default="256M",
        help="of text to train on, sampled evenly over the input (%(default)s: about 5 GB of memory)",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command; errors are left to the caller, their exit codes stand in them."""
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
