"""Plant 2,000 evaluation items in a million documents, and count what ``shardprep overlap`` finds.

    python benchmarks/overlap_recall.py [--documents 1000000] [--items 2000] [--folder /tmp/planted]

Documents are lines of the corpora, and items are other lines, so other hits are in the corpora themselves:
each such pair is checked with sets of n-grams that share no code with the product. Half of the items are
Korean. CPU seconds are those of the whole command on one core.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import random
import re
import sys
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmark_text import lay_out as lay_out_text
from benchmark_text import shared_folder
from measured_run import Usage, machine_line, run_pinned

RULES = {"gpt3": (13, "words"), "palm": (8, "tokens"), "llama": (10, "tokens")}
SEQ_LEN = 2048
PARTICLES = {"은": "이", "는": "가", "이": "은", "가": "는", "을": "도", "를": "도", "에": "로", "의": "와"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--folder", type=Path, help="keeps the data set (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardprep-planted-") as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(exist_ok=True)
        kinds = lay_out(folder, args.documents, args.items)
        for rule in RULES:
            report(folder, rule, kinds)
    print(f"\n{machine_line()}")


def lay_out(folder: Path, num_documents: int, num_items: int) -> dict[str, tuple[int, str]]:
    """Write raw/, evals.jsonl and data/. Return item and kind of each planted text, by digest."""
    chooser = random.Random(0)
    if shared_folder() is None:
        sys.exit("the corpora are not here: made-up text would hold every item many times")
    with tempfile.TemporaryDirectory() as scratch:
        corpora = lay_out_text(Path(scratch), 10**8)
        files = {each.label.split()[0]: each.folder / "documents.txt" for each in corpora.corpora}
        sources = {
            name: iter(files[name].read_text(encoding="utf-8").splitlines()) for name in ("Korean", "English")
        }
    items, changed = [], []
    for number in range(num_items):
        language = ("Korean", "English")[number % 2]
        item = ""
        while len(item.split()) < 20:
            item = f"{item} {next(sources[language])}".strip()
        item = " ".join(item.split()[:60])
        items.append(item)
        changed.append(plant(chooser, item, number // 2 % 6, language))
    fillers = filler_texts(chooser, sources)
    at = dict(zip(sorted(chooser.sample(range(num_documents), num_items)), range(num_items), strict=True))
    kinds = {}
    (folder / "raw").mkdir(exist_ok=True)
    with (folder / "raw" / "a.jsonl").open("w", encoding="utf-8") as file:
        for number in range(num_documents):
            text = next(fillers)
            if number in at:
                kind, planted = changed[at[number]]
                before = text
                while kind == "over row edges" and len(before) < 6 * SEQ_LEN:  # at least the tokens of a row
                    before += " " + next(fillers)
                text = f"{before} {planted} {next(fillers)}"
                kinds[digest(text)] = at[number], kind
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    lines = [json.dumps({"text": item}, ensure_ascii=False) + "\n" for item in items]
    (folder / "evals.jsonl").write_text("".join(lines), encoding="utf-8")
    if not (folder / "data" / "index.json").exists():
        data = ["--output_dir", folder / "data"]
        plan = ["--input_dir", folder / "raw", "--model_id", corpora.tokenizer, "--num_shards", 4]
        run(folder, "plan", *plan, *data, "--record", "packed", "--seq_len", SEQ_LEN)
        run(folder, "run", folder / "data", "--num_proc", 1)
        run(folder, "verify", folder / "data", "--fast")
    return kinds


def plant(chooser: random.Random, item: str, turn: int, language: str) -> tuple[str, str]:
    """Return a kind, and the item changed accordingly."""
    words = item.split()
    first = chooser.randrange(1 + len(words) // 3)
    part = " ".join(words[first : first + max(15, len(words) // 2)])
    if turn == 4 and language == "Korean":
        return "Korean particles changed", re.sub(
            "([가-힣])([은는이가을를에의])(?= |$)",
            lambda found: found[1] + (PARTICLES[found[2]] if chooser.random() < 0.5 else found[2]),
            item,
        )
    return [
        ("verbatim", item),
        ("cut to a half", part),
        ("other case and spacing", item.swapcase().replace(" ", "  \n").replace(", ", " , ")),
        ("decomposed (NFD)", unicodedata.normalize("NFD", item)),
        ("verbatim", item),
        ("over row edges", item),
    ][turn]


def filler_texts(chooser: random.Random, sources: dict[str, Iterator[str]]) -> Iterator[str]:
    """Yield the other lines of the corpora, and after these their sentences in another order."""
    lines = [line for source in sources.values() for line in source]
    chooser.shuffle(lines)
    yield from lines
    words = [line.split() for line in lines[:20_000]]
    while True:
        parts = [chooser.choice(words) for _ in range(6)]
        yield " ".join(word for part in parts for word in part[: chooser.randrange(1, 12)])


def run(folder: Path, *words: object) -> Usage:
    """Run a command of shardprep on one core."""
    command = [sys.executable, "-m", "shardprep", *map(str, words)]
    return run_pinned(command, cwd=folder, log=folder / "log")


def report(folder: Path, rule: str, kinds: dict[str, tuple[int, str]]) -> None:
    """Search, and print the hits."""
    out = folder / rule
    words = ["overlap", folder / "data", "--against", folder / "evals.jsonl", "--rule", rule, "--output", out]
    usage = run(folder, *words)
    lines = (folder / "evals.jsonl").read_bytes().splitlines(keepends=True)
    items = [json.loads(line)["text"] for line in lines]
    starts = itertools.accumulate(map(len, lines), initial=0)
    number_of = {f"evals.jsonl:{start}": number for number, start in enumerate(starts)}
    found, others = set(), []
    for line in (out / "overlap.jsonl").open(encoding="utf-8"):
        hit = json.loads(line)
        item = number_of[hit["eval"]]
        if kinds.get(hit["sha256"], (-1, ""))[0] == item:
            found.add(hit["sha256"])
        else:
            others.append((hit["sha256"], item))
    planted, recalled = (Counter(kinds[each][1] for each in some) for some in (kinds, found))
    num_wrong = wrong_pairs(folder, rule, items, others)
    num_tokens = json.loads((folder / "data" / "index.json").read_bytes())["sources"]["."]["num_tokens"]
    memory_mb = usage.max_rss_bytes / 1e6
    print(f"\n{rule}: {usage.cpu_s:.0f} CPU s for {num_tokens:,} tokens, {memory_mb:.0f} MB of memory")
    print("| kind | planted | found | recall |\n|---|---|---|---|")
    for kind, number in sorted(planted.items()):
        print(f"| {kind} | {number} | {recalled[kind]} | {recalled[kind] / number:.1%} |")
    print(f"{len(others)} other pairs, {num_wrong} of them without a shared n-gram")


def wrong_pairs(folder: Path, rule: str, items: list[str], pairs: list[tuple[str, int]]) -> int:
    """Count the pairs whose raw texts share no n-gram."""
    wanted, texts = {sha256 for sha256, _ in pairs}, {}
    with (folder / "raw" / "a.jsonl").open(encoding="utf-8") as file:
        for line in file:
            text = json.loads(line)["text"]
            if digest(text) in wanted:
                texts[digest(text)] = text
    ngram, unit = RULES[rule]
    split = words_of if unit == "words" else token_splitter(folder / "data" / "tokenizer" / "tokenizer.json")

    def ngrams(text: str) -> set[tuple[Any, ...]]:
        units = split(text)
        return {tuple(units[n : n + ngram]) for n in range(len(units) - ngram + 1)}

    return sum(ngrams(texts[sha256]).isdisjoint(ngrams(items[item])) for sha256, item in pairs)


def words_of(text: str) -> list[str]:
    kept = []
    for char in unicodedata.normalize("NFKC", text).casefold():
        kind = unicodedata.category(char)[0]
        kept.append(char if kind in "LMN" else " " if char.isspace() else "")
    return "".join(kept).split()


@functools.cache
def token_splitter(path: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


if __name__ == "__main__":
    main()
