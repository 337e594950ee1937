"""Compare three cleaning recipes as ``--transform`` with datatrove's filters of the same rules.

    python benchmarks/peer_environments.py datatrove
    python benchmarks/transform_recipes.py [--mb 20] [--repeats 3]

JSON lines are filtered and tokenized: shardprep plans and makes one shard of packed rows, and datatrove's
reader, filters and tokenizer write their stream. Shown are CPU seconds of whole processes on one core.
"filter" is the difference to the same run without a filter; the identity function of ours has its own line.
The texts of kept documents are compared.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from benchmark_text import BenchmarkText, lay_out
from measured_run import machine_line, run_pinned
from peer_environments import missing_reason, peer_python

HERE = Path(__file__).resolve().parent
IDENTITY = "def transform(record):\n    return record['text']\n"
RECIPES = {"gopher": "English", "fineweb": "Pages", "korean": "Korean"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=20, help="of each text (default: 20)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="of each run; medians are printed (default: 3)"
    )
    args = parser.parse_args()
    if reason := missing_reason("datatrove"):
        sys.exit(f"datatrove: {reason}")
    with tempfile.TemporaryDirectory(prefix="shardprep-recipes-") as scratch:
        folder = Path(scratch)
        text = lay_out(folder / "text", int(args.mb * 1e6))
        inputs = {corpus.label.split()[0]: corpus.folder for corpus in text.corpora}
        inputs["Pages"] = _pages(inputs["English"], folder / "pages")
        (folder / "identity.py").write_text(IDENTITY)
        print(f"| {args.mb:g} MB | kept | shardprep, CPU s | filter | datatrove, CPU s | filter | ratio |")
        print("|---|---|---|---|---|---|---|")
        for recipe, language in RECIPES.items():
            documents = inputs[language]
            function = HERE / "recipes" / f"{recipe}.py"
            turns = [
                (
                    _ours(folder, documents, text.tokenizer, function),
                    _ours(folder, documents, text.tokenizer, None),
                    _theirs(folder, documents, text.peer_tokenizer, recipe),
                    _theirs(folder, documents, text.peer_tokenizer, "none"),
                )
                for _ in range(args.repeats)
            ]
            ours, bare, theirs, their_bare = map(statistics.median, zip(*turns, strict=True))
            kept, num_documents = _kept(folder, documents, text, function, recipe)
            print(
                f"| {recipe}, {language} | {kept:,} of {num_documents:,} | {ours:.2f} | {ours - bare:.2f} | "
                f"{theirs:.2f} | {theirs - their_bare:.2f} | {theirs / ours:.1f} |"
            )
        for language in ("Korean", "English"):
            pairs = [
                [
                    _ours(folder, inputs[language], text.tokenizer, each)
                    for each in (None, folder / "identity.py")
                ]
                for _ in range(args.repeats)
            ]
            bare, same = map(statistics.median, zip(*pairs, strict=True))
            print(f"\nIdentity, {language}: {same:.2f} beside {bare:.2f} CPU s without, x{same / bare:.2f}")
    print(f"\n{machine_line()}")


def _pages(documents: Path, folder: Path) -> Path:
    """Yield documents of several lines, some repeated, made of sentences of the English paragraphs."""
    folder.mkdir()
    lines = []
    with (documents / "documents.jsonl").open(encoding="utf-8") as file:
        for number, record in enumerate(map(json.loads, file)):
            sentences = [part.strip() + " ." for part in record["text"].split(" . ")]
            if number % 7 == 0:
                sentences += sentences[:3]
            if number % 11 == 0:
                sentences = [word for line in sentences for word in line.split()]  # a list of words
            record["text"] = "\n".join(sentences)
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    (folder / "documents.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def _command(*words: object) -> list[str]:
    return [sys.executable, "-m", "preprocess", *map(str, words)]


def _ours(
    folder: Path, documents: Path, tokenizer: Path, function: Path | None, *, record: str = "packed"
) -> float:
    """Return the CPU seconds of plan and shard."""
    data, flags = folder / "ours", [] if function is None else ["--transform", function]
    shutil.rmtree(data, ignore_errors=True)
    raw = folder / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    raw.mkdir()
    (raw / "documents.jsonl").hardlink_to(documents / "documents.jsonl")
    plan = ["--input_dir", raw, "--output_dir", data, "--model_id", tokenizer, "--record", record]
    plan += ["--seq_len", 2048] if record == "packed" else []
    commands = [
        _command("plan", *plan, *flags),
        _command("shard", "--shard_id", 0, "--output_dir", data, *flags),
    ]
    return sum(run_pinned(each, cwd=folder, log=folder / "log").cpu_s for each in commands)


def _theirs(folder: Path, documents: Path, tokenizer: Path, recipe: str, kind: str = "tokens") -> float:
    output = folder / "theirs"
    shutil.rmtree(output, ignore_errors=True)
    raw = folder / "their_raw"
    shutil.rmtree(raw, ignore_errors=True)
    raw.mkdir()
    (raw / "documents.jsonl").hardlink_to(documents / "documents.jsonl")
    command: list[str | Path] = [
        peer_python("datatrove"),
        HERE / "peers/with_datatrove_filters.py",
        raw,
        tokenizer,
        output,
        recipe,
        kind,
    ]
    return run_pinned(command, cwd=folder, log=folder / "log").cpu_s


def _kept(folder: Path, documents: Path, text: BenchmarkText, function: Path, recipe: str) -> tuple[int, int]:
    """Return how many documents both keep, and of how many. Exits if they keep different ones."""
    import webdataset

    _ours(folder, documents, text.tokenizer, function, record="documents")
    tars = [str(path) for path in sorted((folder / "ours").glob("shard-*.tar"))]
    ours = [sample["text.txt"].decode() for sample in webdataset.WebDataset(tars, shardshuffle=False)]
    _theirs(folder, documents, text.peer_tokenizer, recipe, "texts")
    theirs = [
        json.loads(line)["text"]
        for path in sorted((folder / "theirs/texts").glob("*"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    if ours != theirs:
        only = [set(ours) - set(theirs), set(theirs) - set(ours)]
        sys.exit(
            f"{recipe}: {len(ours)} and {len(theirs)} documents are kept; {[list(each)[:2] for each in only]}"
        )
    return len(ours), sum(1 for _ in (documents / "documents.jsonl").open(encoding="utf-8"))


if __name__ == "__main__":
    main()
