"""Measure rows of 8k to 1M tokens: padding and CPU time of packing, and the memory of loaders.

    python benchmarks/long_rows.py [--tokens 70_000_000] [--repeats 5]

Packing: document lengths are drawn from the distributions of web pages, source files and books, for a shard
of 256 MB of text; the ids do not matter. "Whole shard" is best fit over all documents at once, the longest
first; the difference is the cost of bounded memory. CPU seconds are those of the packer alone, and the
packers take turns. Loader: one rank with two workers, batches of one row.
"""

from __future__ import annotations

import argparse
import bisect
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from benchmark_text import lay_out
from loader_data_sets import preprocess
from loader_footprint import footprints, peak_bytes_of
from measured_run import machine_line

from preprocess.make.packing import START, packer_of
from preprocess.make.token_ids import TokenBatch
from shardprep.format.data_folder import DataFolder
from shardprep.format.spec import DatasetSpec, TokenizerSpec

Lengths = npt.NDArray[np.int64]

SEQ_LENS = (8192, 32_768, 131_072, 1_048_576)
WAYS = ("concat", "best_fit")
_PEAK_TOKENS = 20_000_000
_BATCH_TOKENS = 1 << 20  # passed to a packer at once
# Kind of text -> median and spread of the lognormal lengths, in tokens.
KINDS = {"web": (400, 1.35), "code": (1200, 1.5), "books": (80_000, 0.9)}
_TOKENIZER = TokenizerSpec(
    model_id="none",
    fingerprint="0" * 64,
    vocab_size=128_256,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)


def lengths_of(kind: str, num_tokens: int) -> Lengths:
    """Return document lengths that sum to ``num_tokens``, the same each time."""
    median, spread = KINDS[kind]
    drawn = np.random.default_rng(0).lognormal(np.log(median), spread, num_tokens // median)
    lengths = np.maximum(8, drawn).astype(np.int64)
    return lengths[: np.searchsorted(np.cumsum(lengths), num_tokens)]


def spec_of(seq_len: int) -> DatasetSpec:
    return DatasetSpec(
        plan_id="0" * 64,
        num_shards=1,
        record="packed",
        token_format="npy",
        seq_len=seq_len,
        append_eos=True,
        tokenizer=_TOKENIZER,
    )


def pack(lengths: Lengths, seq_len: int, way: str) -> tuple[float, int, int]:
    """Return the CPU seconds and rows of a packer, and the documents that it splits."""
    packer = packer_of(spec_of(seq_len), way)
    ids = np.zeros(int(lengths.max()) + _BATCH_TOKENS, np.uint32)
    num_rows, cpu_s = 0, 0.0
    for part in _batches(lengths):
        offsets = np.concatenate([[0], np.cumsum(part)])
        tokens, starts = TokenBatch(ids=ids[: offsets[-1]], offsets=offsets), np.zeros(len(part), START)
        began = time.process_time()
        num_rows += sum(len(group.rows) for group in packer.append(tokens, starts))
        cpu_s += time.process_time() - began
    began = time.process_time()
    num_rows += sum(len(group.rows) for group in packer.finish())
    return cpu_s + time.process_time() - began, num_rows, packer.num_split


def _batches(lengths: Lengths) -> Iterator[Lengths]:
    cuts = np.flatnonzero(np.diff(np.cumsum(lengths) // _BATCH_TOKENS)) + 1
    yield from np.split(lengths, cuts)


def rows_of_whole_shard(lengths: Lengths, seq_len: int) -> int:
    """Return the rows of best fit over all documents, with the remainders of long ones, longest first."""
    rests = lengths % seq_len
    num_rows, spaces = int((lengths // seq_len).sum()), list[int]()
    for length in np.sort(rests[rests > 0])[::-1].tolist():
        place = bisect.bisect_left(spaces, length)
        if place == len(spaces):
            num_rows += 1
            space = seq_len
        else:
            space = spaces.pop(place)
        bisect.insort(spaces, space - length)
    return num_rows


def packing_lines(num_tokens: int, repeats: int) -> Iterator[str]:
    """Return the table of packing."""
    yield "| documents | row | useful: concat | best_fit | whole shard | split: concat | best_fit |"
    yield "|---|---|---|---|---|---|---|"
    costs: list[tuple[str, int, list[float], list[float], list[int]]] = []
    for kind in KINDS:
        lengths = lengths_of(kind, num_tokens)
        for seq_len in SEQ_LENS:
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            rows, split = {}, {}
            for repeat in range(repeats):
                for way in sorted(WAYS, reverse=bool(repeat % 2)):
                    cpu_s, rows[way], split[way] = pack(lengths, seq_len, way)
                    seconds[way].append(cpu_s)
            total = int(lengths.sum())
            least = rows_of_whole_shard(lengths, seq_len)
            useful = [f"{total / (count * seq_len):.4f}" for count in (*map(rows.get, WAYS), least) if count]
            parts = [f"{100 * split[way] / len(lengths):.2f} %" for way in WAYS]
            yield f"| {kind} | {seq_len:,} | {' | '.join(useful)} | {' | '.join(parts)} |"
            peaks = [peak_mib(kind, seq_len, way) for way in WAYS]
            costs.append((kind, seq_len, seconds["concat"], seconds["best_fit"], peaks))
    yield ""
    yield "| documents | row | ns per token: concat | best_fit | peak MiB: concat | best_fit |"
    yield "|---|---|---|---|---|---|"
    for kind, seq_len, *both, peaks in costs:
        cells = [
            f"{statistics.median(of) * 1e9 / num_tokens:.2f} "
            f"({min(of) * 1e9 / num_tokens:.2f}-{max(of) * 1e9 / num_tokens:.2f})"
            for of in both
        ]
        yield f"| {kind} | {seq_len:,} | {' | '.join(cells)} | {' | '.join(map(str, peaks))} |"


def peak_mib(kind: str, seq_len: int, way: str) -> int:
    """Return the peak memory of a packer in a process that has packed nothing before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(_peak_mib_here, kind, seq_len, way).result()


def _peak_mib_here(kind: str, seq_len: int, way: str) -> int:
    lengths = lengths_of(kind, _PEAK_TOKENS)
    return peak_bytes_of(lambda: pack(lengths, seq_len, way)) >> 20


def loader_lines(num_bytes: int) -> Iterator[str]:
    """Return the table of the memory of loaders."""
    yield "| row | rows | resident MiB of the process and two workers: epoch 1 | epoch 3 |"
    yield "|---|---|---|---|"
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as name:
        scratch = Path(name)
        text = lay_out(scratch, num_bytes)
        texts = {corpus.label.split()[0]: corpus.folder / "documents.txt" for corpus in text.corpora[:2]}
        for seq_len in (2048, *SEQ_LENS[2:]):
            folder = scratch / f"rows-{seq_len}"
            flags = ("--record", "packed", "--pack", "best_fit", "--seq_len", str(seq_len))
            preprocess(text.tokenizer, texts, folder, *flags)
            held = footprints(folder, {}, (1, 3), batch_size=1)
            from shardprep.format.index import read_index

            num_rows = int(read_index(DataFolder(folder)).columns[:, 0].sum())
            cells = [f"{each.resident_bytes / 2**20:.0f}" for each in held]
            yield f"| {seq_len:,} | {num_rows} | {' | '.join(cells)} |"
        yield f"\n{text.caption}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=70_000_000)
    parser.add_argument("--mb", type=int, default=100, help="of each text for the loader")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for line in packing_lines(args.tokens, args.repeats):
        print(line, flush=True)
    print()
    for line in loader_lines(args.mb * 1_000_000):
        print(line, flush=True)
    print(f"\n{machine_line()}. Median of {args.repeats} (least-most), in turn.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
