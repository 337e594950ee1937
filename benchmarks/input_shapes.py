"""Measure the peak memory of `plan` and of a task over shapes of input files that take much memory.

    python benchmarks/input_shapes.py TOKENIZER [FOLDER] [--only SHAPE ...]

Each shape is one small file whose text is large once it is decompressed or decoded, or a large unit that
cannot be divided. A process of its own writes it, because a child's peak memory is at least its parent's.
`plan` and the task must stay below the bound that docs/inputs.md states: 600 MB, and 20 bytes for each byte
of the longest document.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import lzma
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measured_run import RunFailed, run_pinned

BOUND_BYTES, BYTES_PER_DOCUMENT_BYTE = 600_000_000, 20
LONG = "boilerplate " * 7500
WORDS = ("a", "of", "x1", "if", "on", "(", ")", "=", "7", "no")
FUNCTION = "def transform(record):\n    return str(record['text'])[:1000]\n"


def words(num_words: int, seed: int = 1) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


def english(num_bytes: int) -> str:
    sentence = "The quick brown fox jumps over the lazy dog near the river bank. "
    return (sentence * (num_bytes // len(sentence) + 1))[:num_bytes]


def documents(num: int, mean_words: int = 300) -> list[str]:
    return [f"{number} {words(mean_words, number % 50)}" for number in range(num)]


def json_of(**fields: Any) -> str:
    return json.dumps(fields) + "\n"


# A shape writes a file, given the folder, and returns the bytes of its longest document.
Shape = Callable[[Path], int]
SHAPES: dict[str, Shape] = {}
WITH_FUNCTION: set[str] = set()  # shapes that are planned with --transform
MOST_DOCUMENTS = 200  # of a shape with long texts: they need not all be encoded


def shape(name: str, *, has_function: bool = False) -> Callable[[Shape], Shape]:
    def add(write: Shape) -> Shape:
        SHAPES[name] = write
        if has_function:
            WITH_FUNCTION.add(name)
        return write

    return add


def text_shapes() -> None:
    @shape("txt: a million lines of 3 letters")
    def _(raw: Path) -> int:
        (raw / "a.txt").write_text("abc\n" * 1_000_000)
        return 3

    @shape("txt: one line of 8 MB, short words")
    def _(raw: Path) -> int:
        text = words(3_300_000)
        (raw / "a.txt").write_text(text + "\n")
        return len(text)

    @shape("txt: one line of 60 MB, English")
    def _(raw: Path) -> int:
        (raw / "a.txt").write_text(english(60_000_000) + "\n")
        return 60_000_000

    @shape("txt: a line above the limit of 64 MiB")
    def _(raw: Path) -> int:
        (raw / "a.txt").write_text("one\n" * 999 + english(80_000_000) + "\ntwo\n")
        return 3

    for ending, compress in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)):

        @shape(f"txt.{ending}: 30 MB of one line, repeated")
        def _(raw: Path, ending: str = ending, compress: Any = compress) -> int:
            (raw / f"a.txt.{ending}").write_bytes(compress(b"the same line again and again\n" * 1_000_000))
            return 30

    @shape("txt.gz: one line of 10 MB")
    def _(raw: Path) -> int:
        (raw / "a.txt.gz").write_bytes(gzip.compress(english(10_000_000).encode()))
        return 10_000_000

    @shape("txt.zst: a window of 128 MiB")
    def _(raw: Path) -> int:
        (raw / "a.txt").write_text("\n".join(documents(60_000)))
        subprocess.run(["zstd", "-q", "--rm", "--long=27", str(raw / "a.txt")], check=True)
        return 2000

    @shape("jsonl: another field of 30 MB in each of 4 lines")
    def _(raw: Path) -> int:
        with (raw / "a.jsonl").open("w") as file:
            for number in range(4):
                file.write(json_of(id=number, html=english(30_000_000), text="short"))
        return 30_000_000

    @shape("jsonl: a list of 5 million numbers in a line")
    def _(raw: Path) -> int:
        (raw / "a.jsonl").write_text(json_of(text="short", numbers=[0] * 5_000_000) * 2)
        return 15_000_000

    @shape("jsonl: a list of 5 million numbers, with --transform", has_function=True)
    def _(raw: Path) -> int:
        (raw / "a.jsonl").write_text(json_of(text="short", numbers=[0] * 5_000_000) * 2)
        return 15_000_000

    @shape("jsonl.gz: 90 kB repeated 1,000 times")
    def _(raw: Path) -> int:
        (raw / "a.jsonl.gz").write_bytes(gzip.compress(json_of(text=LONG).encode() * 1000))
        return len(LONG)


def parquet_shapes() -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    def written(raw: Path, table: dict[str, Any] | Any, **options: Any) -> None:
        table = arrow.table(table) if isinstance(table, dict) else table
        parquet.write_table(table, raw / "a.parquet", **{"row_group_size": 1 << 20, **options})

    @shape("parquet: 90 kB repeated 8,192 times")
    def _(raw: Path) -> int:
        written(raw, {"text": [LONG] * 8192})
        return len(LONG)

    @shape("parquet: the same after 10 nulls and 20,000 short rows")
    def _(raw: Path) -> int:
        written(raw, {"text": [None] * 10 + documents(2000, 2) * 10 + [LONG] * 8192})
        return len(LONG)

    @shape("parquet: 5 MB repeated 8 times")
    def _(raw: Path) -> int:
        written(raw, {"text": ["short"] * 1000 + [english(5_000_000)] * 8})
        return 5_000_000

    @shape("parquet: 90 kB repeated in a struct")
    def _(raw: Path) -> int:
        written(raw, {"text": documents(8192, 3), "a": [{"b": LONG}] * 8192})
        return len(LONG)

    @shape("parquet: 90 kB in lists of messages, with --transform", has_function=True)
    def _(raw: Path) -> int:
        said = [{"role": "system", "content": LONG}, {"role": "user", "content": "hello"}]
        written(raw, {"text": documents(4000, 3), "messages": [said] * 4000})
        return len(LONG)

    @shape("parquet: values of a dictionary type")
    def _(raw: Path) -> int:
        column = arrow.array([LONG, "short"]).dictionary_encode()
        indices = arrow.array([0] * 8192, arrow.int32())
        written(raw, {"text": arrow.DictionaryArray.from_arrays(indices, column.dictionary)})
        return len(LONG)

    @shape("parquet: DELTA_BYTE_ARRAY, common beginnings of 90 kB")
    def _(raw: Path) -> int:
        texts = [f"{LONG}{number}" for number in range(1000)]
        written(raw, {"text": texts}, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})
        return len(LONG)

    @shape("parquet: one row group of 50 MB")
    def _(raw: Path) -> int:
        written(raw, {"text": documents(30_000, 600)}, compression="zstd")
        return 2000

    @shape("parquet: pages of 1 GB")
    def _(raw: Path) -> int:
        written(raw, {"text": documents(20_000, 600)}, data_page_size=1 << 30, use_dictionary=False)
        return 2000

    @shape("parquet: 2,000 columns")
    def _(raw: Path) -> int:
        table: dict[str, Any] = {"text": documents(3000, 30)}
        table |= {f"c{number}": [float(row) for row in range(3000)] for number in range(2000)}
        written(raw, table)
        return 1000

    @shape("parquet: 2,000 columns, with --transform", has_function=True)
    def _(raw: Path) -> int:
        return SHAPES["parquet: 2,000 columns"](raw)

    @shape("parquet: lists of 4,096 zeros, with --transform", has_function=True)
    def _(raw: Path) -> int:
        zeros = arrow.array([[0] * 4096] * 8192, arrow.list_(arrow.int64()))
        written(raw, {"text": documents(8192, 3), "v": zeros})
        return 8 * 4096

    @shape("parquet: 5,000 row groups")
    def _(raw: Path) -> int:
        written(raw, {"text": documents(50_000, 30)}, row_group_size=10)
        return 1000

    @shape("parquet: one text of 60 MB among 20,000 short ones")
    def _(raw: Path) -> int:
        written(raw, {"text": [*documents(100, 3), english(60_000_000), *documents(20_000, 3)]})
        return 60_000_000


def arrow_shapes() -> None:
    import pyarrow as arrow
    from pyarrow import ipc

    def written(raw: Path, table: Any, compression: str | None = None) -> None:
        table = arrow.table(table) if isinstance(table, dict) else table
        options = ipc.IpcWriteOptions(compression=compression)
        with ipc.new_file(str(raw / "a.arrow"), table.schema, options=options) as file:
            file.write_table(table)

    @shape("arrow: one record batch of 50 MB")
    def _(raw: Path) -> int:
        written(raw, arrow.table({"text": documents(30_000, 600)}).combine_chunks())
        return 2000

    @shape("arrow: 90 kB repeated 1,000 times, lz4")
    def _(raw: Path) -> int:
        written(raw, {"text": [LONG] * 1000}, compression="lz4")
        return len(LONG)

    @shape("arrow: a dictionary")
    def _(raw: Path) -> int:
        indices = arrow.array([0] * 8192, arrow.int32())
        written(raw, {"text": arrow.DictionaryArray.from_arrays(indices, arrow.array([LONG]))})
        return len(LONG)

    @shape("arrow: a run of 8,192 rows, with --transform", has_function=True)
    def _(raw: Path) -> int:
        ends = arrow.array([8192], arrow.int32())
        run = arrow.RunEndEncodedArray.from_arrays(ends, arrow.array([LONG]))
        written(raw, {"text": documents(8192, 3), "run": run})
        return len(LONG)

    @shape("arrow: views of one text")
    def _(raw: Path) -> int:
        one = arrow.array([LONG], arrow.string_view())
        view = one.buffers()[1].to_pybytes()
        buffers = [None, arrow.py_buffer(view * 8192), *one.buffers()[2:]]
        written(raw, {"text": arrow.Array.from_buffers(arrow.string_view(), 8192, buffers)})
        return len(LONG)

    @shape("arrow: 20,000 record batches")
    def _(raw: Path) -> int:
        table = arrow.table({"text": documents(20_000, 30)})
        with ipc.new_file(str(raw / "a.arrow"), table.schema) as file:
            file.write_table(table, max_chunksize=1)
        return 1000


def measured(name: str, tokenizer: Path, folder: Path) -> tuple[int, int, int]:
    """Return the file's bytes, and the peak memory of plan and of the task that makes all of it."""
    raw, data = folder / "raw", folder / "data"
    raw.mkdir()
    writer = [sys.executable, __file__, str(tokenizer), str(raw), "--write", name]
    longest = int(subprocess.run(writer, check=True, capture_output=True, text=True).stdout)
    flags: list[str | Path] = ["--no-keep_text", "--token_format", "npy", "--num_shards", "1"]
    if any(part in name for part in ("90 kB", "views", "dictionary", "50 MB", "1 GB")):
        flags += ["--limit", str(MOST_DOCUMENTS)]
    if name in WITH_FUNCTION:
        function = folder / "function.py"
        function.write_text(FUNCTION)
        flags += ["--transform", function]
    command = [sys.executable, "-m", "preprocess"]
    folders: list[str | Path] = ["--input_dir", raw, "--output_dir", data, "--model_id", tokenizer]
    task: list[str | Path] = ["--shard_id", "0", "--output_dir", data]
    if name in WITH_FUNCTION:
        task += ["--transform", folder / "function.py"]
    runs = (["plan", *folders, *flags], task)
    peaks = [run_pinned([*command, *each], cwd=folder, log=folder / "log").max_rss_bytes for each in runs]
    num_bytes = sum(path.stat().st_size for path in raw.iterdir())
    shutil.rmtree(folder)
    folder.mkdir()
    bound = BOUND_BYTES + BYTES_PER_DOCUMENT_BYTE * longest
    over = "" if max(peaks) <= bound else f" **above {bound / 1e6:.0f}**"
    print(f"| {name} | {num_bytes / 1e6:.3g} | {longest / 1e6:.2g} | {peaks[0] / 1e6:.0f} "
          f"| {peaks[1] / 1e6:.0f}{over} |", flush=True)  # fmt: skip
    return num_bytes, peaks[0], peaks[1]


def chosen(only: list[str]) -> Iterator[str]:
    for name in SHAPES:
        if not only or any(part in name for part in only):
            yield name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer", type=Path, help="folder of a tokenizer, such as Llama 3's")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--only", action="append", default=[], help="shapes with this in their name")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    args = parser.parse_args()
    text_shapes()
    if args.write is None:
        # The names alone: pyarrow would make this process, and so each child, larger.
        listed = [sys.executable, __file__, str(args.tokenizer), str(args.folder), "--write", ""]
        for line in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.splitlines():
            name, _, has_function = line.rpartition("\t")
            SHAPES[name] = lambda _: 0
            if has_function:
                WITH_FUNCTION.add(name)
        print("| input | MB | longest document, MB | plan, MB | task, MB |\n|---|---|---|---|---|")
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="shardprep-bench-") as scratch:
            for name in chosen(args.only):
                try:
                    measured(name, args.tokenizer.absolute(), Path(scratch))
                except RunFailed as error:
                    print(f"| {name} | failed: {str(error)[-200:]} |")
                    shutil.rmtree(scratch)
                    Path(scratch).mkdir()
        return 0
    parquet_shapes()
    arrow_shapes()
    if not args.write:
        print("\n".join(f"{name}\t{'1' if name in WITH_FUNCTION else ''}" for name in SHAPES))
        return 0
    print(SHAPES[args.write](args.folder))
    return 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
