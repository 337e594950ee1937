"""``shardprep peek``: samples of the shards, decoded, with their boundaries and where they came from.

Ids are decoded by the data set's own tokenizer, piece by piece between the special tokens, which are shown by
their names in brackets, as ⟦<|end_of_text|>⟧. Where not all tokens have labels, those that do stand in ⟪ ⟫.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from preprocess.look.addresses import (
    InInput,
    find_address,
    made_shards,
    num_train_samples,
    samples_at,
)
from preprocess.look.left_out import left_out_at
from preprocess.make.engines import Ids, load_tokenizer
from shardprep.console import counted, output_is_read, print_lines
from shardprep.errors import NotFound, UsageError
from shardprep.format.dataset_spec import BLANK, blank_id
from shardprep.format.idx import read_idx
from shardprep.format.input_formats import name_of_input, place_text
from shardprep.format.names import TOKENIZER_DIR, shard_name
from shardprep.format.plan import Plan, need_plan
from shardprep.format.shards import ShardSamples
from shardprep.format.tokenizer_files import TOKENIZER_FILE


class Decoder:
    """Ids -> text in which special tokens are seen. Raises ReadWriteError where there is no tokenizer."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(folder / TOKENIZER_DIR / TOKENIZER_FILE)
        added = self._tokenizer.get_added_tokens_decoder()
        self._names = {number: token.content for number, token in added.items() if token.special}
        self._vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def are_blank(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Tell which ids are of a blanked document: bool[ids]."""
        return (ids == BLANK) | (ids == blank_id(self._vocab_size))

    def text(self, ids: Ids, mask: npt.NDArray[np.bool_]) -> str:
        """The text of some ids, of which ``mask`` have labels."""
        cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
        parts = [
            (self._text(ids[begin:end]), bool(mask[begin:end].all()))
            for begin, end in itertools.pairwise(cuts)
        ]
        return "".join(f"⟪{text}⟫" if has_labels and len(parts) > 1 else text for text, has_labels in parts)

    def _text(self, ids: Ids) -> str:
        if self.are_blank(ids).all() and len(ids):
            return f"⟦{counted(len(ids), 'blanked token')}⟧"
        groups = itertools.groupby(ids.tolist(), self._names.get)
        return "".join(
            self._tokenizer.decode(list(some), skip_special_tokens=False)
            if name is None
            else "".join(f"⟦{name}⟧" for _ in some)
            for name, some in groups
        )


def sample_places(folder: Path, plan: Plan, *, is_random: bool) -> Iterator[tuple[int, int]]:
    """Yield shard and number of all samples: in their order, or at random, of each shard by turns.

    Raises NotFound where no shard is made.
    """
    shard_ids = made_shards(folder)
    if not is_random:
        for shard_id in shard_ids:
            yield from ((shard_id, number) for number in range(len(read_idx(folder, plan.spec, shard_id))))
        return
    random.shuffle(shard_ids)
    left: dict[int, list[int]] = {}  # samples of each shard that was looked at, not shown yet
    while shard_ids:
        for shard_id in list(shard_ids):
            if shard_id not in left:
                left[shard_id] = list(range(len(read_idx(folder, plan.spec, shard_id))))
                random.shuffle(left[shard_id])
            if left[shard_id]:
                yield shard_id, left[shard_id].pop()
            else:
                shard_ids.remove(shard_id)


def asked_documents(
    folder: Path, plan: Plan, args: argparse.Namespace
) -> tuple[dict[tuple[int, int], set[int]], list[str]]:
    """The samples at some addresses, and of each the documents that are asked for (none: all); and lines on
    documents that were left out. Raises NotFound, UsageError."""
    flags = ("grep", "random")
    if args.addresses and (given := [name for name in flags if getattr(args, name)]):
        raise UsageError(f"an address says which sample to show; leave out --{given[0]}")
    wanted: dict[tuple[int, int], set[int]] = {}
    left_out: list[str] = []
    for address in args.addresses:
        found = find_address(folder, plan, address)
        if isinstance(found, InInput):
            if lines := left_out_at(folder, plan, found):
                left_out += lines
                continue
            wanted |= {place: set() for place in samples_at(folder, plan, found)}
            continue
        documents = wanted.setdefault((found.shard_id, found.sample), set())
        if found.document is not None:
            documents.add(found.document)
    return wanted, left_out


def sample_lines(
    plan: Plan,
    samples: ShardSamples,
    number: int,
    documents: list[str],
    chars: int,
    num_train: int,
    only: set[int],
) -> Iterator[str]:
    """A sample for people; ``only``: these of its documents (none: all).

    Of each document ``chars`` characters at most; 0: all.
    """
    record = samples.records[number]
    begins_inside = len(documents) > len(samples.starts(number))
    num_tokens, num_trained = len(samples.ids(number)), int(samples.loss_mask(number).sum())
    what = "row" if plan.spec.has_rows else "document"
    trained = "" if num_trained == num_tokens else f" ({num_trained} with labels)"
    came = "begins in the document at" if begins_inside else "from"
    path = name_of_input([item.path for item in plan.inputs], int(record["source"]))
    place = place_text(path, int(record["source_offset"]))
    name = f"{shard_name(samples.shard_id)} {what} {number}"
    side = ", for validation" if number >= num_train else ""
    yield f"{name}: {num_tokens} tokens{trained}{side}, {came} {place}"
    for position, text in enumerate(documents):
        if only and position not in only:
            continue
        cut = text if not chars or len(text) <= chars else f"{text[:chars]} ... ({len(text)} characters)"
        if plan.spec.has_rows:
            is_rest = begins_inside and position == 0
            yield f"  --- {'the rest of a document' if is_rest else 'a document begins'}"
        yield from (f"  {line}" for line in cut.split("\n"))
    yield ""


class Excerpt(NamedTuple):
    """The beginning of a document."""

    address: str
    text: str


def excerpts(
    folder: Path,
    plan: Plan,
    shard_id: int,
    input_numbers: Sequence[int],
    decoder: Decoder,
    *,
    num: int,
    chars: int,
) -> list[Excerpt]:
    """Return the first documents of some inputs in a shard, without blanked ones."""
    found: list[Excerpt] = []
    with ShardSamples(folder, plan.spec, shard_id) as samples:
        is_wanted = np.append(np.isin(samples.records["source"], input_numbers), False)
        for number in np.flatnonzero(is_wanted).tolist():
            if len(found) == num:
                break
            address, begin, ids = f"{shard_id}:{number}", 0, samples.ids(number)
            if plan.spec.has_rows:
                starts = samples.starts(number).tolist()
                # Behind the end of another document the next row tells that the input is still the same.
                if not starts or (starts[0] and not is_wanted[number + 1]):
                    continue
                begin, end = [*starts, len(ids)][:2]
                address, ids = f"{address}:{int(begin > 0)}", ids[:end]
            ids = ids[begin : begin + chars]
            if decoder.are_blank(ids).any():
                continue
            text = " ".join(decoder.text(ids, np.ones(len(ids), np.bool_)).split())
            found.append(Excerpt(address, text if len(text) <= chars else f"{text[:chars]}..."))
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print samples of the shards, decoded by the data set's own tokenizer: special tokens in brackets, "
        "where documents begin in packed rows, and the file and place that each came from."
    )
    add = parser.add_argument
    add("output_dir", type=Path, help="folder of the data set")
    text = (
        "only these: SHARD:SAMPLE, such as 3:17, SHARD:ROW:DOCUMENT, FILE:BYTE of an input, or id:ID "
        "(default: the first samples)"
    )
    add("addresses", nargs="*", metavar="ADDRESS", help=text)
    add("--grep", help="only samples whose decoded text this regular expression finds (default: all)")
    add("--random", action="store_true", help="random samples of all shards, other ones each time")
    add("--num", type=int, default=5, help="number of samples (default: 5)")
    text = "characters to print of a document at most; 0: all (default: 400)"
    add("--chars", type=int, default=400, help=text)


def peek(args: argparse.Namespace) -> int:
    """``peek DATA``: print samples. Raises NotFound where none is there, UsageError."""
    folder: Path = args.output_dir
    plan = need_plan(folder)
    for name, least in (("num", 1), ("chars", 0)):
        if (value := getattr(args, name)) < least:
            raise UsageError.of_value(f"--{name}", value, f"a whole number from {least}")
    try:
        pattern = re.compile(args.grep or "")
    except re.error as error:
        raise UsageError(
            f"--grep {args.grep!r} is no regular expression: {error}",
            found=f"--grep {args.grep!r}",
            expected="regular expression",
        ) from None
    asked, left_out = asked_documents(folder, plan, args)
    print_lines(*left_out)
    places = iter(asked) if args.addresses else sample_places(folder, plan, is_random=args.random)
    decoder, num_shown = Decoder(folder), 0
    for shard_id, of_shard in itertools.groupby(places, key=lambda place: place[0]):
        with ShardSamples(folder, plan.spec, shard_id) as samples:
            num_train = num_train_samples(folder, shard_id, len(samples.records))
            for _, number in of_shard:
                documents = _documents(samples, number, decoder)
                if args.grep and not any(map(pattern.search, documents)):
                    continue
                only = asked.get((shard_id, number), set())
                if max(only, default=0) >= len(documents):
                    address = f"{shard_id}:{number}:{max(only)}"
                    raise NotFound(f"{address}: that sample has documents 0 to {len(documents) - 1}")
                print_lines(*sample_lines(plan, samples, number, documents, args.chars, num_train, only))
                num_shown += 1
                if (num_shown == args.num and not args.addresses) or not output_is_read():
                    return 0
    if not num_shown and not args.addresses:
        raise NotFound(f"{folder} has no sample that was asked for; take fewer flags")
    return 0


def _documents(samples: ShardSamples, number: int, decoder: Decoder) -> list[str]:
    """The texts of a sample; of a row, the end of one that began before it, if any, comes first."""
    ids, mask = samples.ids(number), samples.loss_mask(number)
    if not len(ids):  # a document that the tokenizer drops wholly
        return [""]
    cuts = sorted({0, *samples.starts(number).tolist(), len(ids)})
    return [decoder.text(ids[begin:end], mask[begin:end]) for begin, end in itertools.pairwise(cuts)]
