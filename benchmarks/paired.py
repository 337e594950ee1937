"""Compare CPU seconds and peak memory of two checkouts, job by job, in turns on one core.

    python benchmarks/paired.py OLD NEW [--mb 20] [--turns 5] [--only shard,rows] [--corpora korean,english]

Each checkout runs with its .venv/bin/python, or else with this Python. A row has the median and range of the
ratios NEW / OLD, and the medians of CPU seconds and peak memory. In each turn both checkouts run the job one
after the other, and they alternate in going first. For the loader only batches are measured, without imports.
The shards of "status" are artificial: each checkout's own benchmarks/scale.py writes them.
On a busy machine a ratio within 3 % of 1 is noise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmark_text import lay_out
from measured_run import machine_line, run_pinned

RECORDS = {"documents": [], "rows": ["--record", "packed", "--seq_len", "2048"]}
LOADS: dict[str, tuple[str, int, dict[str, object]]] = {  # record, number of batches, options
    "rows": ("rows", 20_000, {}),
    "rows with boundaries": ("rows", 20_000, {"boundaries": "transformers"}),
    "documents, padded": ("documents", 10_000, {}),
    "documents, packed at load": ("documents", 5_000, {"seq_len": 2048}),
}
# Prints the CPU seconds of some batches, over any number of epochs, without the first five. A full garbage
# collection takes 90 ms with torch, so it is done before.
_LOAD = """
import gc, itertools, json, sys, time
from loader import get_llama3_dataloader
data, num_batches, options = map(json.loads, sys.argv[1:])
loader = get_llama3_dataloader(data, batch_size=8, num_workers=0, seed=1, **options)
batches = itertools.chain.from_iterable(itertools.repeat(loader))
for _ in itertools.islice(batches, 5): pass
gc.collect()
began = time.process_time()
for _ in itertools.islice(batches, num_batches): pass
print(time.process_time() - began)
"""
# Writes the shards of a plan. Its arguments are the folder of scale.py and that of the plan.
_SHARDS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import scale
folder = Path(sys.argv[2])
opened = getattr(scale, "DataFolder", Path)(folder)
scale.make_shards(folder, scale.need_plan(opened))
"""
_NUM_SHARDS = 10_000
Cost = tuple[float, int]  # CPU seconds, peak memory in bytes


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """One side of the comparison, with its own data sets and cache."""

    root: Path
    scratch: Path
    raw: Path  # a folder for each corpus
    tokenizer: Path

    def run(self, *words: str | Path) -> Cost:
        """Run this checkout's Python on one core."""
        self.scratch.mkdir(exist_ok=True)
        python = self.root / ".venv/bin/python"
        # Write byte code, or the checkout with the newer files would compile them each time.
        environ = [
            "-u",
            "PYTHONDONTWRITEBYTECODE",
            f"XDG_CACHE_HOME={self.scratch / 'cache'}",
            f"PYTHONPATH={self.root}",
        ]
        command = ["env", *environ, python if python.exists() else sys.executable, *words]
        usage = run_pinned(command, cwd=self.scratch, log=self.scratch / "log")
        return usage.cpu_s, usage.max_rss_bytes

    def plan(self, corpus: str, record: str, name: str = "planned", *, is_known: bool = True) -> Cost:
        """Plan a corpus into two shards, with or without the tokenizer in the cache."""
        folder = self.scratch / name
        for gone in (folder,) if is_known else (folder, self.scratch / "cache"):
            shutil.rmtree(gone, ignore_errors=True)
        flags: list[str | Path] = ["--input_dir", self.raw / corpus, "--output_dir", folder]
        flags += ["--model_id", self.tokenizer, "--num_shards", "2", *RECORDS[record]]
        return self.run("-m", "preprocess", "plan", *flags)

    def data(self, corpus: str, record: str) -> Path:
        """Return a data set, made and verified."""
        folder = self.scratch / f"{corpus}_{record}"
        if not (folder / "index.json").exists():
            self.plan(corpus, record, folder.name)
            self.run("-m", "preprocess", "run", folder, "--num_proc", "1")
            self.run("-m", "preprocess", "verify", folder)
        return folder

    def shard(self, corpus: str, record: str) -> Cost:
        """Make the first shard again."""
        folder = self.data(corpus, record)
        for path in folder.glob("shard-00000*"):
            path.unlink()
        return self.run("-m", "preprocess", "--shard_id", "0", "--output_dir", folder)

    def status(self) -> Cost:
        """Show the state of a data set of many shards."""
        folder = self.scratch / "many"
        if not folder.exists():
            flags: list[str | Path] = ["--input_dir", self.raw / "many", "--output_dir", folder]
            flags += ["--model_id", self.tokenizer, "--num_shards", str(_NUM_SHARDS)]
            self.run("-m", "preprocess", "plan", *flags)
            self.run("-c", _SHARDS, self.root / "benchmarks", folder)
        return self.run("-m", "shardprep", "status", folder)

    def load(self, corpora: list[str], name: str) -> Cost:
        """Take batches of a data set, or of a mixture of two."""
        record, num_batches, options = LOADS[name]
        data: object = str(self.data(corpora[0], record))
        if len(corpora) > 1:
            data = {corpus: str(self.data(corpus, record)) for corpus in corpora}
            options = {**options, "weights": dict(zip(corpora, (0.3, 0.7), strict=True))}
        _, peak_bytes = self.run("-c", _LOAD, json.dumps(data), str(num_batches), json.dumps(options))
        return float((self.scratch / "log").read_text().split()[-1]), peak_bytes


def jobs(corpora: list[str]) -> dict[str, Callable[[Checkout], Cost]]:
    """Return each job by its name."""
    first, last = corpora[0], corpora[-1]
    found: dict[str, Callable[[Checkout], Cost]] = {}
    for name, is_known in (("plan, tokenizer not seen before", False), ("plan, tokenizer known", True)):
        found[name] = partial(Checkout.plan, corpus=first, record="rows", is_known=is_known)
    for corpus in corpora:
        for record in RECORDS:
            found[f"shard, {corpus}, {record}"] = partial(Checkout.shard, corpus=corpus, record=record)
    found["status, 10,000 shards"] = Checkout.status
    found["verify"] = lambda side: side.run("-m", "preprocess", "verify", side.data(last, "documents"))
    for name in LOADS:
        found[f"load {name}, {last}"] = partial(Checkout.load, corpora=[last], name=name)
    for name in ("rows", "documents, packed at load") if first != last else ():
        found[f"load a mixture, {name}"] = partial(Checkout.load, corpora=[first, last], name=name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT")
    parser.add_argument("--mb", type=float, default=20, help="of each corpus")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", default="", help="jobs whose name contains one of these, comma-separated")
    parser.add_argument("--corpora", default="korean,english", help="of korean, english, python")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as folder:
        scratch = Path(folder)
        text = lay_out(scratch, int(args.mb * 1e6))
        for corpus in text.corpora:
            (raw := scratch / "raw" / corpus.folder.name).mkdir(parents=True)
            (raw / "documents.jsonl").hardlink_to(corpus.folder / "documents.jsonl")
        (scratch / "raw" / "many").mkdir()
        lines = "".join(f"line {number}\n" for number in range(10 * _NUM_SHARDS))
        (scratch / "raw" / "many" / "lines.txt").write_text(lines, encoding="ascii")
        given = {"raw": scratch / "raw", "tokenizer": text.tokenizer}
        roots = enumerate(args.checkouts)
        sides = [Checkout(root=root.resolve(), scratch=scratch / str(n), **given) for n, root in roots]
        print("| NEW / OLD | CPU | CPU s | peak MB |\n|---|---|---|---|")
        for name, job in jobs(args.corpora.split(",")).items():
            if not any(word in name for word in args.only.split(",")):
                continue
            turns: list[list[Cost]] = []
            for turn in range(args.turns + 1):
                costs = {side.root: job(side) for side in (sides if turn % 2 else sides[::-1])}
                turns.append([costs[side.root] for side in sides])
            del turns[0]  # this turn also made the data sets and the byte code
            ratios = [new[0] / old[0] for old, new in turns]
            cells = [f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"]
            for what, unit, digits in ((0, 1, 2), (1, 1e6, 0)):
                medians = [statistics.median(turn[side][what] for turn in turns) / unit for side in (0, 1)]
                cells.append(" → ".join(f"{median:.{digits}f}" for median in medians))
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"\n{machine_line()}, load {os.getloadavg()[0]:.1f}; {args.mb:g} MB of each corpus, {text.caption}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
