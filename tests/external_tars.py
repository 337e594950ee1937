"""Tars that webdataset's own TarWriter makes: no idx, no manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import webdataset

from tests.word_tokenizers import save_word_tokenizer


def write_numbered_data(folder: Path, num_samples: int, num_shards: int) -> Path:
    """Numbered tars with a tokenizer beside them; ids behind the first one fill a sample, up to 4."""
    save_word_tokenizer(folder, 200)
    form: Any = {"name": "shard-{:05d}.tar", "ids_of": lambda number: [number, *range(number % 5)]}
    write_numbered_tars(folder, num_samples, num_shards, **form)
    return folder


def write_numbered_tars(
    folder: Path,
    num_samples: int,
    num_shards: int,
    *,
    name: str = "part-{:03d}.tar",
    ids_of: Callable[[int], list[int]] = lambda number: [number],
) -> list[str]:
    """Samples 0 to ``num_samples - 1`` in ``num_shards`` tars; sample n has the ids ``ids_of(n)``.

    Returns the paths of the tars, in the order of the samples.
    """
    paths = []
    for shard, numbers in enumerate(np.array_split(np.arange(num_samples), num_shards)):
        paths.append(str(folder / name.format(shard)))
        with webdataset.TarWriter(paths[-1]) as writer:
            for number in numbers.tolist():
                writer.write({"__key__": f"s{number}", "token_ids.json": ids_of(number)})
    return paths
