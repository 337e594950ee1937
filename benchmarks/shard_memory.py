"""Measure the peak memory of a task: for a shard of a gigabyte, for one line of 200 MB, for each format.

    python benchmarks/shard_memory.py [FOLDER] [--quick] [--form .parquet ...]

A task is `python -m preprocess --shard_id 0` on one core. Its memory must not depend on the size of the
shard, a line, a row group, a record batch or a compressed member: files of other formats have a gigabyte in
one of these. Large files repeat the text of the corpora; the long line is the same text with blanks in place
of line ends. FOLDER (default: the system's scratch folder) needs 8 GB, or 1 GB with --quick.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmark_text import Corpus, lay_out
from contenders import plan
from large_inputs import FORMS
from measured_run import Usage, machine_line, run_pinned

ONE = {
    ".txt": "shard",
    ".jsonl.gz": ".jsonl.gz of one member",
    ".jsonl.zst": ".jsonl.zst of one frame",
    ".jsonl.xz": ".jsonl.xz of one block",
    ".parquet": ".parquet of one row group",
    ".arrow": ".arrow of one record batch",
}
RECORDS = {"documents": [], "packed": ["--record", "packed", "--seq_len", "2048"]}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input file, which becomes one shard."""

    label: str
    corpus: Corpus
    num_bytes: int
    record: str
    is_one_line: bool = False
    form: str = ".txt"


def cases(corpora: list[Corpus], num_bytes: int, line_bytes: int, forms: list[str]) -> list[Case]:
    """Return small and large cases, to show growth. Short documents would need 20 times the space."""
    korean, english = corpora[:2]
    sizes = [("shard", num_bytes // 10, False), ("shard", num_bytes, False), ("line", line_bytes, True)]
    plain = [
        Case(label=label, corpus=corpus, num_bytes=size, is_one_line=is_one_line, record=record)
        for record, corpus in (("documents", english), ("packed", korean))
        for label, size, is_one_line in sizes
    ]
    of_forms = [
        Case(label=ONE[form], corpus=english, num_bytes=num_bytes, record="packed", form=form)
        for form in forms or FORMS
    ]
    return of_forms if forms else [*plain, *of_forms]


def write_input(path: Path, case: Case) -> None:
    """Write the corpus repeatedly, up to the size of the case."""
    text = case.corpus.folder / "documents.txt"
    path.parent.mkdir()
    if case.is_one_line:
        line = text.read_bytes().replace(b"\n", b" ")
        with path.open("wb") as file:
            file.writelines(line for _ in range(case.num_bytes // len(line)))
            file.write(b"\n")
        return
    writer = Path(__file__).with_name("large_inputs.py")
    subprocess.run([sys.executable, writer, text, str(case.num_bytes), path], check=True)


def make_shard(case: Case, tokenizer: Path, folder: Path) -> tuple[int, Usage]:
    """Run a task, and return its input bytes and cost. Removes the shard to make room for the next one."""
    raw, output = folder / "raw", folder / "output"
    path = raw / f"documents{case.form}"
    write_input(path, case)
    plan(raw, output, tokenizer, RECORDS[case.record])
    task: list[str | Path] = [sys.executable, "-m", "preprocess", "--shard_id", "0", "--output_dir", output]
    usage = run_pinned(task, cwd=folder, log=folder / "log")
    num_bytes = path.stat().st_size
    shutil.rmtree(raw)
    shutil.rmtree(output)
    return num_bytes, usage


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--quick", action="store_true", help="a shard of 100 MB and a line of 20 MB")
    parser.add_argument("--form", action="append", choices=FORMS, help="this format alone; may be repeated")
    args = parser.parse_args()
    num_bytes, line_bytes = (100_000_000, 20_000_000) if args.quick else (1_100_000_000, 200_000_000)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="shardprep-bench-") as name:
        scratch = Path(name)
        text = lay_out(scratch, 10_000_000 if not args.quick else 2_000_000)
        print(
            "| one task on one core | input, MB | peak memory, MB | CPU s | wall s |\n|---|---|---|---|---|"
        )
        for case in cases(text.corpora, num_bytes, line_bytes, args.form):
            size, usage = make_shard(case, text.tokenizer, scratch)
            print(
                f"| {case.record}, {case.corpus.label}, one {case.label} | {size / 1e6:.0f} "
                f"| {usage.max_rss_bytes / 1e6:.0f} | {usage.cpu_s:.1f} | {usage.wall_s:.1f} |",
                flush=True,
            )
        print(f"\n{machine_line()}; {text.caption}, text repeated.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
