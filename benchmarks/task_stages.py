"""Measure the CPU seconds of a task by stage, and compare another checkout and Megatron-LM's fast path.

    python benchmarks/task_stages.py [--other CHECKOUT] [--pairs 3] [--times 4] [--only korean]

The input is JSON lines: the corpora, repeated ``--times`` and twice as often (4: 105 MB of Korean reviews,
70 MB of English paragraphs). The task makes rows of 2,048 tokens on one core, and the checkouts take turns.
Shown are CPU seconds, and those of this checkout over those of the others. The slope is the cost of the
second half, without any start. Then each stage is measured alone, in one thread, over the smaller input.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmark_text import ROOT, BenchmarkText, lay_out
from measured_run import Usage, machine_line, run_pinned

FAST_PATH = "the fast path"
FORMS = {
    "rows": ["--record", "packed", "--seq_len", "2048"],
    "documents": [],
}


def stages_of(data: Path) -> dict[str, float]:
    """Make shard 0 of a data set in this process and thread, and return the CPU seconds of each stage."""
    from preprocess.make.layout import BatchLayout
    from preprocess.make.resources import bind_to
    from preprocess.make.settings import WorkerSettings
    from preprocess.make.worker import Worker
    from preprocess.make.writer import ShardWriter
    from preprocess.read.documents import DocumentReader
    from shardprep.format.data_folder import DataFolder
    from shardprep.format.manifest import RunFacts
    from shardprep.format.plan import need_plan

    bind_to(sorted(os.sched_getaffinity(0)))
    plan = need_plan(DataFolder(data))
    shard = plan.shard(0)
    worker = Worker(plan, DataFolder(data), WorkerSettings(), num_cpus=1, warn=print)
    spent = {"start": time.process_time(), "read": 0.0, "encode": 0.0, "lay out": 0.0, "count and write": 0.0}
    layout = BatchLayout(plan.spec, plan.options, 0)
    with ShardWriter(DataFolder(data), plan.spec, plan.options, 0) as writer:
        batches = DocumentReader(plan.options).read_shard(shard)
        while True:
            times = [time.process_time()]
            if (documents := next(batches, None)) is None:
                break
            times.append(time.process_time())
            tokens = worker.engine.encode_documents(documents)
            times.append(time.process_time())
            batch = layout.lay_out(documents, tokens)
            times.append(time.process_time())
            writer.append(batch)
            times.append(time.process_time())
            for stage, (begin, end) in zip(list(spent)[1:], itertools.pairwise(times), strict=False):
                spent[stage] += end - begin
        began = time.process_time()
        writer.commit(RunFacts())
        spent["commit"] = time.process_time() - began
    return spent


class Bench:
    """Run tasks of several checkouts over one input."""

    def __init__(self, scratch: Path, text: BenchmarkText) -> None:
        self._scratch, self._text = scratch, text

    def raw(self, corpus: str, times: int) -> Path:
        """Write a corpus several times, and return its folder."""
        folder = self._scratch / "raw" / corpus / str(times)
        if not folder.exists():
            folder.mkdir(parents=True)
            source = next(each.folder for each in self._text.corpora if each.folder.name == corpus)
            data = (source / "documents.jsonl").read_bytes()
            with (folder / "documents.jsonl").open("wb") as file:
                file.writelines(itertools.repeat(data, times))
        return folder

    def task(self, who: str, corpus: str, times: int, form: str) -> Usage:
        """Run a task of the checkout ``who``, or the fast path, from the beginning."""
        raw = self.raw(corpus, times)
        if who == FAST_PATH:
            output = self._scratch / "fast"
            output.mkdir(exist_ok=True)
            script = ROOT / "benchmarks/peers/with_megatron_fast.py"
            return self._run(ROOT, [script, raw, self._text.tokenizer, output])
        data = self.planned(who, corpus, times, form)
        for path in data.glob("shard-*"):
            path.unlink()
        return self._run(Path(who), ["-m", "preprocess", "shard", "--shard_id", "0", "--output_dir", data])

    def planned(self, who: str, corpus: str, times: int, form: str) -> Path:
        data = self._scratch / "data" / Path(who).name / corpus / str(times) / form
        if not (data / "plan.json").exists():
            words: list[str | Path] = [
                "--input_dir",
                self.raw(corpus, times),
                "--output_dir",
                data,
                "--num_shards",
                "1",
            ]
            words += ["--model_id", self._text.tokenizer, *FORMS[form]]
            self._run(Path(who), ["-m", "preprocess", "plan", *words])
        return data

    def stages(self, corpus: str, times: int, form: str) -> dict[str, float]:
        data = self.planned(str(ROOT), corpus, times, form)
        for path in data.glob("shard-*"):
            path.unlink()
        self._run(ROOT, [Path(__file__), "--stages_of", data])
        return dict(json.loads((self._scratch / "log").read_text().splitlines()[-1]))

    def _run(self, checkout: Path, words: list[str | Path]) -> Usage:
        """Run Python with the packages of a checkout."""
        command = ["env", "-u", "PYTHONDONTWRITEBYTECODE", f"PYTHONPATH={checkout}", sys.executable, *words]
        return run_pinned(command, cwd=checkout, log=self._scratch / "log")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", help="another checkout of this project, to be compared with")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--times", type=int, default=4, help="how often the corpora are repeated (default 4)")
    parser.add_argument("--only", action="append", help="a corpus: korean, english or python")
    parser.add_argument("--form", action="append", choices=FORMS, help="default: rows")
    parser.add_argument("--no_stages", action="store_true")
    parser.add_argument("--no_fast_path", action="store_true")
    parser.add_argument("--scratch", type=Path, help="a folder that is kept, for runs to come")
    parser.add_argument("--stages_of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stages_of:
        print(json.dumps(stages_of(args.stages_of)))
        return 0
    scratch = args.scratch or Path(tempfile.mkdtemp(prefix="shardprep-bench-"))
    try:
        shutil.rmtree(scratch / "text", ignore_errors=True)
        text = lay_out(scratch / "text", 20_000_000)
        bench = Bench(scratch, text)
        whos = [str(ROOT), *([str(Path(args.other).resolve())] if args.other else [])]
        for corpus, form in itertools.product(
            args.only or ["korean", "english", "python"], args.form or ["rows"]
        ):
            rivals = [*whos, *([] if args.no_fast_path or form != "rows" else [FAST_PATH])]
            print(f"\n{corpus}, {form}", flush=True)
            usages = compare(bench, rivals, corpus, form, args.times, args.pairs)
            print(table(rivals, usages, args.times))
            if not args.no_stages:
                runs = [bench.stages(corpus, args.times, form) for _ in range(args.pairs)]
                found = {stage: statistics.median(run[stage] for run in runs) for stage in runs[0]}
                print(", ".join(f"{stage} {seconds:.3f}" for stage, seconds in found.items()), flush=True)
        print(f"\n{machine_line()}; {text.caption}. CPU s, median of {args.pairs} (least-most), in turn.")
    finally:
        if not args.scratch:
            shutil.rmtree(scratch)
    return 0


def compare(
    bench: Bench, rivals: list[str], corpus: str, form: str, times: int, num_pairs: int
) -> dict[tuple[str, int], list[Usage]]:
    """Run all in turn over the input, once and twice, by checkout and number of copies of the corpus."""
    usages: dict[tuple[str, int], list[Usage]] = {}
    for turn in range(num_pairs):
        for size in (times, 2 * times):
            for who in rivals if turn % 2 else reversed(rivals):
                usages.setdefault((who, size), []).append(bench.task(who, corpus, size, form))
    return usages


def table(rivals: list[str], usages: dict[tuple[str, int], list[Usage]], times: int) -> str:
    """Return a row per checkout: CPU seconds of both sizes and the slope, our ratio to it, and memory."""

    def seconds(who: str) -> list[list[float]]:
        small, large = ([usage.cpu_s for usage in usages[who, size]] for size in (times, 2 * times))
        return [small, large, [second - first for first, second in zip(small, large, strict=True)]]

    lines = ["| | once | ours over it | twice | ours over it | slope | ours over it | MB |", "|---" * 8 + "|"]
    ours = seconds(rivals[0])
    for who in rivals:
        cells = []
        for own, their in zip(ours, seconds(who), strict=True):
            ratio = statistics.median(a / b for a, b in zip(own, their, strict=True))
            cells += [f"{statistics.median(their):.2f} ({min(their):.2f}-{max(their):.2f})", f"{ratio:.2f}"]
        memory = max(usage.max_rss_bytes for usage in usages[who, times]) / 1e6
        lines.append(f"| {Path(who).name} | {' | '.join(cells)} | {memory:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
