"""Where the documents of a batch come from: ``origins=True`` of ``get_llama3_dataloader``.

``batch["origins"]`` is int64[documents, 6]: row and place in the batch, source, shard, sample, document.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from loader.shards import ShardSet
from shardprep.errors import NotFound, UsageError
from shardprep.files import NOT_THERE
from shardprep.format.index import read_idx
from shardprep.format.input_formats import name_of_input, place_text
from shardprep.format.plan import read_input_names


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a document lies."""

    source: str  # its name; "all" where one set is read
    tar: Path
    sample: int  # its number in the tar, from 0
    document: int  # its number in a packed row, from 0; 0 for a document that is a sample
    place: str  # file and byte of the input; of a packed row, of its first token; "": unknown
    address: str  # for ``shardprep peek DATA``, as "3:17:2"; "" in tars of other tools


def find_origin(name: str, shards: ShardSet, shard: int, sample: int, document: int) -> Origin:
    """Return the origin that these numbers of a batch stand for. Raises UsageError."""
    if not 0 <= shard < shards.num_shards or not 0 <= sample < shards.num_records[shard]:
        raise UsageError(
            f"shard {shard}, sample {sample}: {name} has {shards.num_shards:,} shards, and "
            "samples are numbered in each from 0; pass columns 2 to 5 of origins"
        )
    data, row = shards.locate(shard)
    place = address = ""
    if data.records is None:
        shard_id = int(data.shard_ids[row])
        address = f"{shard_id}:{sample}:{document}" if data.spec.has_rows else f"{shard_id}:{sample}"
        with contextlib.suppress(NotFound, *NOT_THERE):  # a copy without its idx or its plan
            record = _records(data.folder, data.spec, shard_id)[sample]
            name_of = name_of_input(_input_names(data.folder), int(record["source"]))
            place = place_text(name_of, int(record["source_offset"]))
    tar = data.path_of(row)
    return Origin(source=name, tar=tar, sample=sample, document=document, place=place, address=address)


# A loop may ask for each document of each batch.
_input_names = lru_cache(maxsize=4)(read_input_names)
_records = lru_cache(maxsize=16)(read_idx)


def source_ids(origins: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the source of each place of a batch, int64[batch, seq], by its ``origins``.

    Padding has any source. Put into the batch, it goes along where rows or places are dealt to ranks.
    """
    width = shape[1]
    kept = origins[origins[:, 1] < width]
    first = kept[:, 0] * width + kept[:, 1]
    ends = torch.cat([first[1:], first.new_tensor([shape[0] * width])])
    return kept[:, 2].repeat_interleave(ends - first).reshape(shape)
