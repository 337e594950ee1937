"""Make the loaders' input: documents and packed rows of ``preprocess``, and the rows as an array."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmark_text import ROOT, lay_out

NUM_SHARDS = 8
LARGE_COPIES = 32
BATCH_TOKENS = 8 * 2048  # of a batch of packed rows


@dataclass(frozen=True, kw_only=True)
class DataSets:
    """Folders in ``scratch``: packed (rows of 2,048), documents-NAME for each corpus, and rows.npy."""

    scratch: Path
    corpora: list[str]  # their names
    tokenizer: Path
    caption: str

    @property
    def rows(self) -> Path:
        """Return the file of uint32[rows, 2048], which every peer converts to its own format."""
        return self.scratch / "rows.npy"


@dataclass(frozen=True, kw_only=True)
class LimitData:
    """A folder of rows, the same rows LARGE_COPIES times, and a folder of documents for each corpus."""

    rows: Path
    large: list[Path]  # windows are a small part of it
    documents: dict[str, Path]  # by corpus, and "mixed" with all corpora in one folder


def make_limit_data(scratch: Path, num_bytes: int) -> LimitData:
    """Call ``make_data_sets`` and add more; the large one consists of links, to stay in the page cache."""
    data = make_data_sets(scratch, num_bytes)
    names = [*data.corpora, "mixed"]
    texts = {name: (scratch / f"raw-documents-{name}" / f"{name}.txt").resolve() for name in data.corpora}
    preprocess(data.tokenizer, texts, scratch / "documents-mixed")
    large = [scratch / f"packed-{number}" for number in range(LARGE_COPIES)]
    for folder in large:
        folder.symlink_to(scratch / "packed")
    documents = {name: scratch / f"documents-{name}" for name in names}
    return LimitData(rows=scratch / "packed", large=large, documents=documents)


def make_data_sets(scratch: Path, num_bytes: int) -> DataSets:
    """Write and preprocess ``num_bytes`` of each text. Sets BENCH_TOKENIZER to the tokenizer's folder.

    10 MB take half a minute, because of the imports of nine short commands.
    """
    text = lay_out(scratch, num_bytes)
    os.environ["BENCH_TOKENIZER"] = str(text.tokenizer)
    texts = {corpus.label.split()[0]: corpus.folder / "documents.txt" for corpus in text.corpora}
    texts.pop("Python")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        asked = [
            pool.submit(preprocess, text.tokenizer, {name: path}, scratch / f"documents-{name}")
            for name, path in texts.items()
        ]
        rows = ("--record", "packed", "--seq_len", "2048")
        asked.append(pool.submit(preprocess, text.tokenizer, texts, scratch / "packed", *rows))
    for each in asked:
        each.result()
    _dump_rows(scratch / "packed", scratch / "rows.npy")
    return DataSets(scratch=scratch, corpora=list(texts), tokenizer=text.tokenizer, caption=text.caption)


def preprocess(tokenizer: Path, texts: dict[str, Path], out: Path, *options: str) -> None:
    """Make a data set of some texts with plan, run and verify."""
    raw = out.parent / f"raw-{out.name}"
    raw.mkdir()
    for name, path in texts.items():
        (raw / f"{name}.txt").symlink_to(path)
    flags = ["--input_dir", raw, "--output_dir", out, "--model_id", tokenizer]
    flags += ["--num_shards", NUM_SHARDS, *options]
    for step in (["plan", *flags], ["run", out], ["verify", out]):
        command = [sys.executable, "-m", "preprocess", *map(str, step)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{step[0]} of {out} ended with {done.returncode}: {done.stderr}")


def _dump_rows(folder: Path, path: Path) -> None:
    from loader import get_llama3_dataloader

    with get_llama3_dataloader(folder, 1, num_workers=0, shuffle=False) as loader:
        np.save(path, np.concatenate([batch["input_ids"].numpy().astype(np.uint32) for batch in loader]))
