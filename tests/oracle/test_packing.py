"""Packed rows are those of a plain packer, over more rows than are open at a time and than a member holds."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from itertools import accumulate, chain
from operator import ne
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.world import EOS, PAD, World, hostile_texts, open_loader, save_tokenizer, tokenizer_dir

OPEN_ROWS = 1024  # of best fit: the fullest one is closed where there would be more
TOKENIZER = Tokenizer.from_file(str(tokenizer_dir() / "tokenizer.json"))
END: Any = TOKENIZER.token_to_id(EOS)
Rows = list[list[int]]


def concat(documents: Rows, seq_len: int) -> Rows:
    """Join all documents, and cut wherever a row ends."""
    stream = [*chain(*documents)]
    return [stream[first : first + seq_len] for first in range(0, len(stream), seq_len)]


def best_fit(documents: Rows, seq_len: int) -> Rows:
    """Put each document whole into the fullest row that has room, of equally full ones into the one that was
    filled first. Documents longer than a row are cut, and each part begins a row."""
    closed: Rows = []
    open_rows: Rows = []  # the one that was filled last stands last
    for document in documents:
        parts = [document[first : first + seq_len] for first in range(0, len(document), seq_len)]
        for number, part in enumerate(parts):
            fitting = [row for row in open_rows if len(row) + len(part) <= seq_len and number == 0]
            if fitting:
                row = max(fitting, key=len)
                place = [row is other for other in open_rows].index(True)
                open_rows.append(open_rows.pop(place) + part)
            else:
                if len(open_rows) == OPEN_ROWS:
                    fullest = max(open_rows, key=len)
                    closed.append(open_rows.pop([fullest is other for other in open_rows].index(True)))
                open_rows.append(part)
            if len(open_rows[-1]) == seq_len:
                closed.append(open_rows.pop())
    return closed + sorted(open_rows, key=len, reverse=True)


def segments_of(owners: list[int]) -> list[int]:
    """Number the documents of a row from 1, of the document that each of its tokens is of."""
    return [*accumulate(map(ne, owners[1:], owners), initial=1)]


def short_texts() -> Iterator[str]:
    """Documents of which no two fit into a row of 16, then some that do, and some that are longer."""
    for number in range(1100):
        yield "abcdefgh"[: 7 + number % 2] + "zyx"[number % 3]
    yield from ("x" * (number % 5) + "w" for number in range(60))
    yield from ("v" * (10 + number) for number in range(50))


def long_texts() -> Iterator[str]:
    """More than a member's 512 KiB of ids on each side."""
    for text in hostile_texts(460, seed=21, most_words=500):
        yield text.replace("<|", "< |").strip()[:8000] + "."


def arrays_of(world: World) -> dict[str, Any]:
    """Return the members of tars, as numpy reads them."""
    return {name: np.load(io.BytesIO(data)) for name, data in world.members()}


def ids_of_padding(world: World) -> Iterator[int]:
    """Yield the ids that stand behind the tokens of rows."""
    arrays = arrays_of(world)
    for name, num_tokens in arrays.items():
        if name.endswith(".row_tokens.npy"):
            rows = arrays[name.replace(".row_tokens.", ".token_ids.")]
            for row, length in zip(rows, num_tokens, strict=True):
                yield from row[length:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("pack", [best_fit, concat])
@pytest.mark.parametrize(("texts", "seq_len"), [(short_texts, 16), (long_texts, 512)])
@pytest.mark.parametrize("validation_fraction", [None, 0.4])
def test_rows_are_those_of_a_plain_packer(
    tmp_path: Path,
    pack: Callable[[Rows, int], Rows],
    texts: Callable[[], Iterator[str]],
    seq_len: int,
    validation_fraction: float | None,
) -> None:
    every = [*texts()]
    world = World(tmp_path).raw({"a.jsonl": [{"text": text} for text in every]})
    options: dict[str, Any] = {"record": "packed", "seq_len": seq_len, "pack": pack.__name__}
    world.make(num_shards=1, validation_fraction=validation_fraction, **options)
    limit = int((validation_fraction or 0) * 2**64)
    sides: dict[str, Rows] = {"train": [], "validation": []}
    for text, encoding in zip(every, TOKENIZER.encode_batch(every), strict=True):
        is_held = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < limit
        sides["validation" if is_held else "train"].append([*encoding.ids, END])
    for side, documents in sides.items():
        if side == "validation" and validation_fraction is None:
            continue
        of_side = {} if validation_fraction is None else {"split": side}
        with world.ranks(global_batch_size=1, shuffle=False, boundaries="segment_ids", **of_side) as ranks:
            rows = ranks.take(len(ranks.loaders[0]))
        assert [row["input_ids"] for (row,) in rows] == pack(documents, seq_len), side
        owners = pack([[number] * len(document) for number, document in enumerate(documents)], seq_len)
        assert [row["segment_ids"] for (row,) in rows] == list(map(segments_of, owners)), side
    assert set(ids_of_padding(world)) <= {TOKENIZER.token_to_id(PAD)}
    if texts is long_texts:
        most_ids = 512 * 1024 // 2
        of_sides = [sum(map(len, documents)) for documents in sides.values() if documents]
        assert min(of_sides) > most_ids, f"one member holds a side: {of_sides}"


@pytest.mark.parametrize("pack", ["concat", "best_fit"])
def test_documents_of_one_token_begin_where_they_stand(tmp_path: Path, pack: str) -> None:
    texts = ["a", "bcd", "e", "f", "g h i", "j"] * 5
    options: dict[str, Any] = {"record": "packed", "seq_len": 8, "pack": pack, "num_shards": 1}
    bare = {"add_special_tokens": False, "append_eos": False}
    world = World(tmp_path).raw({"a.jsonl": [{"text": text} for text in texts]}).make(**options, **bare)
    sizes = [len(TOKENIZER.encode(text, add_special_tokens=False).ids) for text in texts]
    assert 1 in sizes
    starts = np.concatenate([x for name, x in arrays_of(world).items() if name.endswith(".doc_starts.npy")])
    assert len(starts) == len(texts)
    if pack == "concat":
        assert starts.tolist() == [sum(sizes[:number]) for number in range(len(sizes))]


def test_rows_of_a_tokenizer_without_pad_token_are_filled_with_0(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    world = World(tmp_path, tokenizer=model).raw({"a.txt": "one\ntwo words\n"})
    world.make(record="packed", seq_len=64, num_shards=1)
    assert set(ids_of_padding(world)) == {0}


def test_a_mixture_of_rows_keeps_where_documents_begin(tmp_path: Path) -> None:
    folders = {}
    for seed, name in enumerate(("web", "code")):
        texts = [text.replace("\n", " ") for text in hostile_texts(200, seed=seed, most_words=6)]
        world = World(tmp_path / name).raw({"a.txt": "\n".join(texts)})
        folders[name] = world.make(num_shards=2, record="packed", seq_len=32).data_dir
    options: dict[str, Any] = {"weights": {"web": 0.6, "code": 0.4}, "boundaries": "segment_ids"}
    num_begun = 0
    with open_loader(folders, 4, num_workers=0, **options) as loader:
        for batch, _ in zip(loader, range(40), strict=False):
            for ids, segments, mask in zip(
                *(batch[name].tolist() for name in ("input_ids", "segment_ids", "attention_mask")),
                strict=True,
            ):
                num_tokens = sum(mask)
                begins = [segments[at] != segments[at - 1] for at in range(1, num_tokens)]
                assert begins == [token == END for token in ids[: num_tokens - 1]]
                num_begun += sum(begins)
    assert num_begun > 100
