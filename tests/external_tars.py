"""Tars written by webdataset's TarWriter, without an idx or a manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import webdataset

from tests.word_tokenizers import save_word_tokenizer


def write_tar(path: Path, samples: Iterable[Mapping[str, Any]]) -> Path:
    """Write samples given as fields, with PAX headers and float mtimes. Bytes are written unchanged."""
    with webdataset.TarWriter(str(path)) as writer:
        for number, fields in enumerate(samples):
            writer.write({"__key__": f"d{number}", **fields})
    return path


def write_numbered_tars(
    folder: Path,
    num_samples: int,
    num_shards: int,
    ids_of: Callable[[int], list[int]] = lambda number: [number, *range(number % 5)],
) -> list[Path]:
    """Write samples 0 to ``num_samples - 1`` into tars, sample n with the ids ``ids_of(n)``.

    Returns the paths of the tars in the order of the samples.
    """
    paths = [folder / f"part-{shard:02d}.tar" for shard in range(num_shards)]
    for path, numbers in zip(paths, np.array_split(np.arange(num_samples), num_shards), strict=True):
        write_tar(path, [{"token_ids.json": ids_of(number)} for number in numbers.tolist()])
    return paths


def write_numbered_data(folder: Path, num_samples: int, num_shards: int) -> Path:
    """Write numbered tars and a tokenizer of 200 words into a folder, and return it."""
    save_word_tokenizer(folder, 200)
    write_numbered_tars(folder, num_samples, num_shards)
    return folder
