"""The contenders that are measured, and the command line of each."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmark_text import ROOT, BenchmarkText, Corpus
from measured_run import Watch
from peer_environments import PEERS, missing_reason, peer_python

BASELINE, DOCUMENTS, PACKED = "baseline", "documents", "packed"
_WRITES = {
    "datatrove": "uint32 stream, EOS only",
    "dolma": "uint32 stream, EOS only",
    "hf_datasets": "Arrow rows, a document each",
    "litdata": "chunks of blocks of 2,049",
    "mosaicml": "MDS rows of 2,048",
    "megatron": ".bin and .idx, a document each",
    "tokbin": "uint32 stream, BOS and EOS, sha256",
    "megatron_fast": ".bin and .idx, a document each, no BOS",
}
_RECORDS = {DOCUMENTS: [], PACKED: ["--record", "packed", "--seq_len", "2048"]}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One contender. ``command`` gets a folder of documents and an output folder that ``clear`` emptied."""

    key: str
    label: str
    writes: str
    command: Callable[[Path, Path], list[str | Path]]
    num_runs: int = 1  # per repeat

    def folder_of(self, corpus: Corpus) -> tuple[Path, int]:
        """Return its input and the bytes of it. The baseline gets only the beginning of a slow corpus."""
        if self.key == BASELINE:
            return corpus.baseline_folder, corpus.baseline_bytes
        return corpus.folder, corpus.num_bytes

    def watch(self, output: Path) -> Watch | None:
        """Return a watch for ours, which starts for a second and works for a tenth: from tar to manifest."""
        if self.key not in _RECORDS:
            return None
        return Watch(folder=output, first=".shard-00000.tar.", last="shard-00000.json")

    def clear(self, documents: Path, output: Path, text: BenchmarkText) -> None:
        """Remove the output of an earlier run. Ours is planned here, once, and this is not timed."""
        if self.key in _RECORDS:
            if not (output / "plan.json").exists():
                plan(documents, output, text.tokenizer, _RECORDS[self.key])
            for path in output.glob("shard-*"):
                path.unlink()
            return
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)


def plan(documents: Path, output: Path, tokenizer: Path, options: list[str]) -> None:
    """Run ``python -m preprocess plan`` on the .txt of a folder: one file, one shard."""
    if (documents / "documents.jsonl").exists() and (documents / "documents.txt").exists():
        alone = documents.with_name(f"{documents.name}_text")
        alone.mkdir(exist_ok=True)
        if not (alone / "documents.txt").exists():
            (alone / "documents.txt").hardlink_to(documents / "documents.txt")
        documents = alone
    folders: list[str | Path] = ["--input_dir", documents, "--output_dir", output]
    command = [sys.executable, "-m", "preprocess", "plan", *folders]
    done = subprocess.run(
        [*command, "--model_id", tokenizer, *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"planning failed: {done.stderr}")


def contenders(text: BenchmarkText, wanted: list[str]) -> tuple[list[Contender], dict[str, str]]:
    """Return the baseline, the peers whose environments exist, and ours; and why others are left out."""

    def baseline(documents: Path, output: Path) -> list[str | Path]:
        script: list[str | Path] = [sys.executable, ROOT / "benchmarks/baseline.py", "--shard_id", "0"]
        return [*script, "--input_dir", documents, "--output_dir", output, "--model_id", text.tokenizer]

    def ours(_documents: Path, output: Path) -> list[str | Path]:
        return [sys.executable, "-m", "preprocess", "--shard_id", "0", "--output_dir", output]

    def peer(name: str) -> Callable[[Path, Path], list[str | Path]]:
        driver = ROOT / f"benchmarks/peers/with_{name}.py"
        return lambda documents, output: [peer_python(name), driver, documents, text.peer_tokenizer, output]

    found = [Contender(key=BASELINE, label="baseline", writes="tar: ids and text", command=baseline)]
    left_out = {}
    for name in PEERS:
        if name not in wanted:
            continue
        if reason := missing_reason(name):
            left_out[name] = reason
        else:
            found.append(
                Contender(key=name, label=PEERS[name].label, writes=_WRITES[name], command=peer(name))
            )
    found += [
        Contender(
            key=DOCUMENTS,
            label="**shardprep** documents",
            writes="tar: ids and text",
            command=ours,
            num_runs=3,
        ),
        Contender(
            key=PACKED, label="**shardprep** packed", writes="tar: rows of 2,048", command=ours, num_runs=3
        ),
    ]
    return found, left_out
