"""Packed rows equal those of a plain packer, for more rows than are open at once or fit into a member."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable
from itertools import accumulate, chain
from operator import ne
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.world import EOS, PAD, Ranks, World, hostile_text, hostile_texts, save_tokenizer, tokenizer_dir

OPEN_ROWS = 1024  # limit of open rows in best fit; beyond it the fullest row is closed
TOKENIZER = Tokenizer.from_file(str(tokenizer_dir() / "tokenizer.json"))
END: Any = TOKENIZER.token_to_id(EOS)
Rows = list[list[int]]


def concat(documents: Rows, seq_len: int) -> Rows:
    """Join all documents and cut the stream into rows."""
    stream = [*chain(*documents)]
    return [stream[first : first + seq_len] for first in range(0, len(stream), seq_len)]


def best_fit(documents: Rows, seq_len: int) -> Rows:
    """Put each whole document into the fullest row that has room; of equally full rows, into the one that was
    filled first. Cut a document that is longer than a row; each part after the first starts a new row."""
    closed: Rows = []
    open_rows: Rows = []  # in the order in which they were last filled

    def take_fullest(numbers: Iterable[int]) -> list[int]:
        return open_rows.pop(max(numbers, key=lambda number: len(open_rows[number])))

    for document in documents:
        for first in range(0, len(document), seq_len):
            part = document[first : first + seq_len]
            fitting = [n for n, row in enumerate(open_rows) if first == 0 and len(row) + len(part) <= seq_len]
            if fitting:
                part = take_fullest(fitting) + part
            elif len(open_rows) == OPEN_ROWS:
                closed.append(take_fullest(range(OPEN_ROWS)))
            (closed if len(part) == seq_len else open_rows).append(part)
    return closed + sorted(open_rows, key=len, reverse=True)


def segments_of(owners: list[int]) -> list[int]:
    """Return the segment of each token, numbered from 1; ``owners`` has the document of each token."""
    return [*accumulate(map(ne, owners[1:], owners), initial=1)]


def short_texts() -> list[str]:
    """Return documents of which no two fit into a row of 16, then some that do, then some longer ones."""
    of_half = ["abcdefgh"[: 7 + number % 2] + "zyx"[number % 3] for number in range(1100)]
    return [*of_half, *("x" * (number % 5) + "w" for number in range(60)), *("v" * n for n in range(10, 60))]


def long_texts() -> list[str]:
    """Return texts with more than 512 KiB of ids, the size of a member, on each side of a split."""
    texts = hostile_texts(460, seed=21, most_words=500)
    return [text.replace("<|", "< |").strip()[:8000] + "." for text in texts]


def ids_of_padding(world: World) -> set[int]:
    """Return the ids in the padding of rows."""
    arrays = {name: np.load(io.BytesIO(data)) for name, data in world.members()}
    found = set[int]()
    for name, num_tokens in arrays.items():
        if name.endswith(".row_tokens.npy"):
            rows = arrays[name.replace(".row_tokens.", ".token_ids.")]
            for row, length in zip(rows, num_tokens, strict=True):
                found.update(row[length:].tolist())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("pack", [best_fit, concat])
@pytest.mark.parametrize(("texts", "seq_len"), [(short_texts, 16), (long_texts, 512)])
@pytest.mark.parametrize("validation_fraction", [None, 0.4])
def test_rows_are_those_of_a_plain_packer(
    tmp_path: Path,
    pack: Callable[[Rows, int], Rows],
    texts: Callable[[], list[str]],
    seq_len: int,
    validation_fraction: float | None,
) -> None:
    world = World(tmp_path).raw({"a.jsonl": [{"text": text} for text in texts()]})
    options = {"record": "packed", "seq_len": seq_len, "pack": pack.__name__}
    world.make(num_shards=1, validation_fraction=validation_fraction, **options)
    limit = int((validation_fraction or 0) * 2**64)
    sides: dict[str | None, Rows] = {"train": [], "validation": []} if validation_fraction else {None: []}
    for text, encoding in zip(texts(), TOKENIZER.encode_batch(texts()), strict=True):
        is_held = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < limit
        side = ("validation" if is_held else "train") if validation_fraction else None
        sides[side].append([*encoding.ids, END])
    for side, documents in sides.items():
        check_rows(world, documents, pack, seq_len, **({"split": side} if side else {}))
    assert ids_of_padding(world) <= {TOKENIZER.token_to_id(PAD)}
    # Each member has 512 KiB of ids, except the last one of each side.
    members = [np.load(io.BytesIO(data)) for name, data in world.members() if name.endswith("token_ids.npy")]
    sizes = [ids.nbytes for ids in members]
    assert sizes.count(512 << 10) == len(sizes) - len(sides)
    assert max(sizes) <= 512 << 10
    assert texts is short_texts or len(sizes) >= 2 * len(sides)


def check_rows(world: World, documents: Rows, pack: Any, seq_len: int, **options: Any) -> None:
    """Compare the rows of a data set and the document boundaries in them."""
    rows = world.samples(boundaries="segment_ids", **options)
    assert [row["input_ids"] for row in rows] == pack(documents, seq_len)
    owners = pack([[number] * len(document) for number, document in enumerate(documents)], seq_len)
    assert [row["segment_ids"] for row in rows] == list(map(segments_of, owners))


@pytest.mark.parametrize("pack", [best_fit, concat])
def test_documents_of_one_token_have_their_own_segments(tmp_path: Path, pack: Any) -> None:
    texts = ["a", "bcd", "e", "f", "g h i", "j"] * 5
    options: dict[str, Any] = {"record": "packed", "seq_len": 8, "pack": pack.__name__, "num_shards": 1}
    world = World(tmp_path).raw({"a.jsonl": [{"text": text} for text in texts]})
    world.make(add_special_tokens=False, append_eos=False, **options)
    check_rows(world, [TOKENIZER.encode(text, add_special_tokens=False).ids for text in texts], pack, 8)


def test_rows_of_a_tokenizer_without_pad_token_are_filled_with_0(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path / "model", without="pad_token")
    world = World(tmp_path, tokenizer=model).raw({"a.txt": "one\ntwo words\n"})
    world.make(record="packed", seq_len=64, num_shards=1)
    assert ids_of_padding(world) == {0}


def test_a_mixture_of_rows_keeps_where_documents_begin(tmp_path: Path) -> None:
    folders = {}
    for seed, name in enumerate(("web", "code")):
        world = World(tmp_path / name).raw({"a.txt": hostile_text(200, seed, most_words=6)})
        folders[name] = world.make(num_shards=2, record="packed", seq_len=32).data_dir
    options: dict[str, Any] = {"weights": {"web": 0.6, "code": 0.4}, "boundaries": "segment_ids"}
    with Ranks(folders, global_batch_size=4, **options) as ranks:
        rows = [row for step in ranks.take(40) for row in step]
    begins = [list(map(ne, row["segment_ids"][1:], row["segment_ids"])) for row in rows]
    assert begins == [[token == END for token in row["input_ids"][:-1]] for row in rows]
    assert sum(map(sum, begins)) > 100
