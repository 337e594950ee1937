"""``train_tokenizer``: train a byte-level BPE like Llama 3's on the inputs that ``plan`` takes.

All but its vocabulary is as in Llama 3.1's tokenizer.json; a test compares the two. If the files have more
than ``max_bytes`` in total, a sample is taken, from places a few MiB apart.

With tokenizers 0.23.3 on 2 cores and vocab_size 128,000, 20 MB of Korean reviews take 0.76 GB and 14 s, 16 MB
of English paragraphs 0.16 GB and 3 s. Memory grows with the 0.77th power of the bytes.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from preprocess.plan.dividing import stamp_inputs
from preprocess.plan.inputs import find_inputs
from preprocess.plan.model_files import write_files
from preprocess.plan.sampling import sample_documents
from shardprep.console import Progress, counted, say
from shardprep.errors import BadInput, CannotWrite, Refused, UsageError
from shardprep.files import is_folder, names_in, size_of_file
from shardprep.foreign_tokenizer import LLAMA3_REGEX
from shardprep.format.inputs import place_text
from shardprep.format.plan_options import PlanOptions
from shardprep.option_flags import add_flags_of, parse_size
from shardprep.output_folder import remove_unfinished
from shardprep.publishing import PublishedFolder, make_folder

PIECE_CHARS = 4096  # longer texts are cut: one word of a million letters would slow down every merge
_PLACE_BYTES = 1 << 20  # of text taken at each place
_MIN_NUM_PLACES = 256
_MIN_MAX_BYTES = 1_000_000  # with less, samples would be shorter than lines
_PLAN_OPTIONS = ("recursive", "encoding", "text_field", "text_template")

# Llama 3.1's special tokens by position, from its tokenizer.json. The others are reserved.
_BOS = "<|begin_of_text|>"
_EOS = "<|end_of_text|>"
_PAD = "<|finetune_right_pad_id|>"
_ROLES = ("step_id", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag", "image")
_NAMED = {0: _BOS, 1: _EOS, 4: _PAD} | {5 + number: f"<|{name}|>" for number, name in enumerate(_ROLES)}


def train_tokenizer(args: argparse.Namespace) -> int:
    """Train a tokenizer on the inputs of a folder. Equal inputs and flags give equal bytes."""
    vocab_size = args.vocab_size
    max_bytes = parse_size(args.max_bytes, "--max_bytes")
    if vocab_size < 256:
        expected = "256 or more: the bytes and their merges (Llama 3 has 128000)"
        raise UsageError.of_value("--vocab_size", vocab_size, expected)
    if max_bytes < _MIN_MAX_BYTES:
        raise UsageError.of_value("--max_bytes", max_bytes, f"{_MIN_MAX_BYTES} or more")
    folder = args.output_dir.resolve()
    expected = "a new or empty folder, as a tokenizer is never overwritten; give --output_dir another one"
    names = names_in(folder)
    if names:
        raise Refused(path=folder, found=f"a folder that has {names[0]}", expected=expected)
    if size_of_file(folder) is not None and not is_folder(folder):
        raise CannotWrite(path=folder, found="a file", expected=expected)
    options = PlanOptions(**{name: value for name, value in vars(args).items() if name in _PLAN_OPTIONS})
    input_dir: Path = args.input_dir
    inputs = [item.file for item in stamp_inputs(input_dir, find_inputs(input_dir, options).paths, options)]
    num_texts = num_bytes = 0  # of the training text
    num_bad = Counter[str]()  # documents left out, by reason
    first_bad = ""  # place of the first of them

    def texts() -> Iterator[list[str]]:
        """Yield lists of stripped texts: documents, or pieces of long documents."""
        nonlocal num_texts, num_bytes, first_bad
        progress = Progress("reading", min(sum(item.num_bytes for item in inputs), max_bytes))
        num_places = max(_MIN_NUM_PLACES, max_bytes // _PLACE_BYTES)
        for batch in sample_documents(input_dir, inputs, options, num_bytes=max_bytes, num_places=num_places):
            for bad in batch.bad:
                num_bad[bad.reason] += 1
                path = str(input_dir / inputs[batch.input_number].path)
                first_bad = first_bad or place_text(path, bad.input_offset)
            pieces: list[str] = []
            for text in map(bytes.decode, batch.texts):
                pieces += [text[n : n + PIECE_CHARS].strip() for n in range(0, len(text), PIECE_CHARS)]
            ends = list(itertools.accumulate((len(piece.encode()) for piece in pieces), initial=num_bytes))
            num_kept = bisect.bisect_right(ends, max_bytes) - 1
            num_texts += num_kept
            num_bytes = ends[num_kept]
            yield pieces[:num_kept]
            progress.add(batch.num_bytes)
        say("all text is read; merging pairs")

    # Llama 3's pipeline with an empty vocabulary.
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    words = pre_tokenizers.Split(Regex(LLAMA3_REGEX), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, show_progress=False, initial_alphabet=alphabet
    )
    trained = Future[None]()

    def train() -> None:
        try:
            tokenizer.train_from_iterator(texts(), trainer)
            trained.set_result(None)
        except BaseException as error:
            trained.set_exception(error)

    make_folder(folder.parent, parents=True)
    remove_unfinished(folder)
    with PublishedFolder(folder) as unfinished:
        # In a thread, because tokenizers reacts to Ctrl-C only after its last merge.
        threading.Thread(target=train, daemon=True).start()
        trained.result()  # or the error of the thread
        read = f"{num_bytes:,} bytes of text in {counted(len(inputs), 'file')}, {counted(num_texts, 'text')}"
        if num_bad:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in num_bad.most_common())
            num_all = counted(num_bad.total(), "document")
            read += f"; left out {num_all} ({reasons}; the first in {first_bad})"
        if not num_texts:
            wanted = "text to train on; are --encoding and --text_field right?"
            raise BadInput(path=input_dir, found=read, expected=wanted)
        say(f"read {read}, long documents in pieces")
        num_base = tokenizer.get_vocab_size()
        # Llama 3.1's special tokens follow the base vocabulary, and encoded texts begin with BOS.
        reserved = (f"<|reserved_special_token_{number}|>" for number in range(256))
        names = [_NAMED.get(position) or next(reserved) for position in range(256)]
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
        trimming = processors.ByteLevel(add_prefix_space=True, trim_offsets=False, use_regex=True)
        ids = [(_BOS, tokenizer.token_to_id(_BOS))]
        begin = processors.TemplateProcessing(f"{_BOS} $A", f"{_BOS} $A {_BOS} $B", special_tokens=ids)
        tokenizer.post_processor = processors.Sequence([trimming, begin])
        config = {"bos_token": _BOS, "clean_up_tokenization_spaces": False, "eos_token": _EOS}
        config |= {"pad_token": _PAD, "padding_side": "right", "tokenizer_class": "PreTrainedTokenizerFast"}
        content = {"tokenizer.json": tokenizer.to_str(pretty=True)}
        content["tokenizer_config.json"] = json.dumps(config, indent=2) + "\n"
        write_files({name: text.encode() for name, text in content.items()}, unfinished.temporary)
        if not unfinished.publish_first():
            raise Refused(path=folder, found="a folder that was created meanwhile", expected=expected)
    if num_base < vocab_size:
        what = f"the text yields {num_base:,} base tokens instead of {vocab_size:,}"
        say(f"{what}, as no other pair occurs twice; more text gives more tokens")
    say(f"{folder}: {num_base + 256:,} tokens ({num_base:,} base, 256 special, BOS is {num_base})")
    return 0


def train_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input_dir", metavar="PATH", type=Path, required=True, help="folder of inputs, as plan takes them")
    add("--output_dir", metavar="PATH", type=Path, required=True, help="new or empty folder of the tokenizer")
    text = "number of base tokens; 256 special tokens are added"
    add("--vocab_size", metavar="N", type=int, default=128_000, help=text)
    text = "text to train on, sampled evenly over the input; 256M takes about 5 GB of memory"
    add("--max_bytes", metavar="SIZE", default="256M", help=text)
    others = {item.name for item in dataclasses.fields(PlanOptions)} - {*_PLAN_OPTIONS}
    add_flags_of(parser, PlanOptions, exclude=others, is_grouped=False)
