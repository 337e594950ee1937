"""How long a task takes until its first document, against the bare load of its engine in the same run.

    python benchmarks/startup.py [--repeats 9]

Both on one core, in turn: `python -m preprocess --shard_id 0` until its tar appears under its first
name (then the engine is loaded and proven on the plan's probe), and a bare Python that does nothing
but `gigatoken.Tokenizer(FILE)`. The target is 1.25 times the bare load and 0.2 s. It also lists
what a whole task has imported; torch, transformers and webdataset must not be among that.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path

from benchmark_text import lay_out
from contenders import plan
from measured_run import NotSeen, Watch, machine_line, run_pinned

FORBIDDEN = ("torch", "transformers", "webdataset")
_BARE = "import gigatoken, sys; gigatoken.Tokenizer(sys.argv[1])"
_LIST_MODULES = (
    "import sys; from preprocess.__main__ import main; main(sys.argv[1:]);"
    "print(*sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    num_repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as folder:
        scratch = Path(folder)
        text = lay_out(scratch, 100_000)
        output, log = scratch / "output", scratch / "log"
        plan(text.ten_documents, output, text.tokenizer, [])
        task: list[str | Path] = ["--shard_id", "0", "--output_dir", output, "--engine", "gigatoken"]
        run_pinned([sys.executable, "-c", _LIST_MODULES, *task], cwd=scratch, log=log)
        modules = log.read_text().splitlines()[-1].split()
        bare, ours = [], []
        for _ in range(num_repeats):
            engine: list[str | Path] = [sys.executable, "-c", _BARE, output / "tokenizer/tokenizer.json"]
            bare.append(run_pinned(engine, cwd=scratch, log=log))
            for path in output.glob("shard-*"):
                path.unlink()
            watch = Watch(folder=output, first=".shard-00000.tar.", last="shard-00000.json")
            command = [sys.executable, "-m", "preprocess", *task]
            with contextlib.suppress(NotSeen):
                ours.append(run_pinned(command, cwd=scratch, log=log, watch=watch))
    load = statistics.median(usage.cpu_s for usage in bare)
    start = statistics.median(usage.start_cpu_s or 0.0 for usage in ours)
    whole = statistics.median(usage.cpu_s for usage in ours)
    print(f"bare load of gigatoken: {load:.2f} CPU s, {bare[0].max_rss_bytes / 1e6:.0f} MB")
    print(f"a task until its first document: {start:.2f} CPU s; the limit is {1.25 * load + 0.2:.2f}")
    print(f"a task of ten documents: {whole:.2f} CPU s, {ours[0].max_rss_bytes / 1e6:.0f} MB")
    print(f"imported besides the standard library: {', '.join(modules)}")
    print(machine_line())
    found = sorted(set(FORBIDDEN) & set(modules))
    if found or start > 1.25 * load + 0.2:
        print(f"MISSED: {', '.join(found) or 'too slow'}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
