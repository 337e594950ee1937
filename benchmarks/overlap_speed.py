"""Compare ``shardprep overlap`` with the decontamination of datatrove and dolma on one core.

    python benchmarks/peer_environments.py datatrove dolma
    python benchmarks/overlap_speed.py [--documents 100000] [--repeats 3]

The rule is 13 consecutive words, separated by white space, against 2,000 items, half of them Korean. All read
the same JSON lines; shardprep reads them through a plan. CPU seconds and peak memory are those of whole
processes, with loading. The last columns are the documents that each one reports, and how many of the
documents with a planted item are among them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from measured_run import Usage, machine_line, run_pinned
from overlap_recall import digest, lay_out, run
from peer_environments import missing_reason, peer_python

PEERS = Path(__file__).resolve().parent / "peers"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3, help="of each run; medians are printed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardprep-overlap-") as scratch:
        folder = Path(scratch)
        kinds = lay_out(folder, args.documents, 2000)
        raw = folder / "documents" / "a.jsonl"  # dolma needs a folder of this name, and ids
        raw.parent.mkdir()
        texts = [json.loads(line)["text"] for line in (folder / "raw" / "a.jsonl").open(encoding="utf-8")]
        with raw.open("w", encoding="utf-8") as file:
            for number, text in enumerate(texts):
                file.write(json.dumps({"id": str(number), "text": text}, ensure_ascii=False) + "\n")
        index = json.loads((folder / "data" / "index.json").read_bytes())
        num_tokens = index["sources"]["."]["num_tokens"]
        contenders: dict[str, Callable[[], tuple[Usage, set[str]]]] = {
            "shardprep, gpt3": lambda: ours(folder, "gpt3"),
            "shardprep, palm": lambda: ours(folder, "palm"),
            "shardprep, llama": lambda: ours(folder, "llama"),
            "datatrove 0.10.1": lambda: datatrove(folder),
            "dolma 1.2.1": lambda: dolma(folder, texts),
        }
        print(f"{num_tokens:,} tokens, {len(texts):,} documents, {raw.stat().st_size / 1e6:.0f} MB\n")
        print("| | CPU s | M tokens/s | memory, MB | documents named | of the planted |\n" + "|---" * 6 + "|")
        for label, measure in contenders.items():
            if label[0] == "d" and (reason := missing_reason(label.split()[0])):
                print(f"| {label} | left out: {reason} |")
                continue
            runs = [measure() for _ in range(args.repeats)]
            cpu_s = statistics.median(usage.cpu_s for usage, _ in runs)
            named = runs[0][1]
            print(
                f"| {label} | {cpu_s:.1f} | {num_tokens / cpu_s / 1e6:.2f} | "
                f"{runs[0][0].max_rss_bytes / 1e6:.0f} | {len(named)} | "
                f"{len(named & kinds.keys())} of {len(kinds)} |",
                flush=True,
            )
    print(f"\n{machine_line()}")


def ours(folder: Path, rule: str) -> tuple[Usage, set[str]]:
    out = _fresh(folder)
    words = [folder / "data", "--against", folder / "evals.jsonl", "--rule", rule, "--output", out]
    usage = run(folder, "overlap", *words)
    hits = (out / "overlap.jsonl").read_text(encoding="utf-8").splitlines()
    return usage, {json.loads(line)["sha256"] for line in hits}


def datatrove(folder: Path) -> tuple[Usage, set[str]]:
    out = _fresh(folder)
    script = PEERS / "with_datatrove_decont.py"
    words = [peer_python("datatrove"), script, folder / "documents", folder / "evals.jsonl", out]
    usage = run_pinned(words, cwd=folder, log=folder / "log")
    removed = [path.read_text(encoding="utf-8") for path in (out / "removed").glob("*.jsonl")]
    return usage, {digest(json.loads(line)["text"]) for text in removed for line in text.splitlines()}


def dolma(folder: Path, texts: list[str]) -> tuple[Usage, set[str]]:
    out = _fresh(folder)
    shutil.rmtree(folder / "attributes", ignore_errors=True)
    documents = folder / "documents" / "a.jsonl"
    script = PEERS / "with_dolma_decont.py"
    words = [peer_python("dolma"), script, documents, folder / "evals.jsonl", out, 1_000_000]
    usage = run_pinned([str(word) for word in words], cwd=folder, log=folder / "log")
    (marks,) = (folder / "attributes").rglob("*.jsonl")
    named = set()
    for text, line in zip(texts, marks.read_text().splitlines(), strict=True):
        if any(share > 0 for _, _, share in json.loads(line)["attributes"]["overlap"]):
            named.add(digest(text))
    return usage, named


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder / "out", ignore_errors=True)
    return folder / "out"


if __name__ == "__main__":
    main()
