"""Write the text and the tokenizer that all contenders use into a scratch folder.

If the corpora are beside the checkout (../shared, or $SHARDPREP_TEST_SHARED), these are Korean reviews,
English paragraphs and Llama 3's tokenizer. Otherwise it is the text of examples/sample_text.py, repeated, and
a tokenizer trained on it. Repetition helps every cache, so compare such figures only with each other.
"""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE_BYTES = 2_000_000


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A text with one document per line. Each folder contains documents.txt and documents.jsonl."""

    label: str
    folder: Path
    num_bytes: int
    baseline_folder: Path  # the same, or only its beginning if the baseline would take minutes
    baseline_bytes: int


@dataclass(frozen=True, kw_only=True)
class BenchmarkText:
    """The input of a run."""

    corpora: list[Corpus]
    ten_documents: Path  # of the first corpus, to measure the start of a run
    tokenizer: Path
    peer_tokenizer: Path  # the same, with additional files that some peers need
    caption: str


def shared_folder() -> Path | None:
    """Return the folder of the real corpora and tokenizer, or None."""
    folder = Path(os.environ.get("SHARDPREP_TEST_SHARED", ROOT.parent / "shared"))
    return folder if (folder / "corpora").is_dir() and (folder / "tokenizers/llama3").is_dir() else None


def lay_out(scratch: Path, num_bytes: int) -> BenchmarkText:
    """Write the corpora, ``num_bytes`` each, and the tokenizer's variants into ``scratch``."""
    shared = shared_folder()
    if shared is not None:
        tokenizer = shared / "tokenizers/llama3"
        sources = {
            "Korean reviews": _xz_lines(shared / "corpora/ko_reviews.txt.xz"),
            "English paragraphs": _xz_lines(shared / "corpora/en_paragraphs.txt.xz"),
        }
        caption = "Llama 3's tokenizer"
    else:
        tokenizer, sources = _sample_text(scratch)
        caption = (
            "made-up sample text, repeated, and a tokenizer trained on it (the real corpora are not here)"
        )
    sources["Python lines"] = _python_lines()
    corpora = [
        _lay_out_corpus(
            scratch / "text",
            label,
            lines,
            num_bytes // 2 if label == "Python lines" else num_bytes,
            shorten=not label.startswith("English"),
        )
        for label, lines in sources.items()
    ]
    ten = _write_documents(scratch / "text/ten", _take_lines(corpora[0].folder / "documents.txt", 10))
    return BenchmarkText(
        corpora=corpora,
        ten_documents=ten,
        tokenizer=tokenizer,
        peer_tokenizer=_peer_tokenizer(tokenizer, scratch / "peer_tokenizer"),
        caption=caption,
    )


def _lay_out_corpus(
    folder: Path, label: str, lines: Iterator[str], num_bytes: int, *, shorten: bool
) -> Corpus:
    kept = list(_up_to(lines, num_bytes))
    whole = _write_documents(folder / label.split()[0].lower(), kept)
    size = (whole / "documents.txt").stat().st_size
    if not shorten or size <= BASELINE_BYTES:
        return Corpus(label=label, folder=whole, num_bytes=size, baseline_folder=whole, baseline_bytes=size)
    short = _write_documents(folder / f"{whole.name}_short", list(_up_to(iter(kept), BASELINE_BYTES)))
    return Corpus(
        label=label,
        folder=whole,
        num_bytes=size,
        baseline_folder=short,
        baseline_bytes=(short / "documents.txt").stat().st_size,
    )


def _write_documents(folder: Path, lines: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "documents.txt").write_text("".join(lines), encoding="utf-8")
    with (folder / "documents.jsonl").open("w", encoding="utf-8") as file:
        for number, line in enumerate(lines):
            if text := line.strip():
                file.write(json.dumps({"id": str(number), "text": text}, ensure_ascii=False) + "\n")
    return folder


def _up_to(lines: Iterator[str], num_bytes: int) -> Iterator[str]:
    """Yield whole lines of at most ``num_bytes`` in total."""
    held = 0
    for line in lines:
        held += len(line.encode())
        if held > num_bytes:
            return
        yield line


def _take_lines(path: Path, num_lines: int) -> list[str]:
    with path.open(encoding="utf-8") as file:
        return [line for line, _ in zip(file, range(num_lines), strict=False)]


def _xz_lines(path: Path) -> Iterator[str]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        yield from file


def _python_lines() -> Iterator[str]:
    """Yield the lines of the standard library's .py files: the shortest documents, with about 10 tokens."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="ignore")
            yield from (line + "\n" for line in text.split("\n") if line.isprintable())


def _sample_text(scratch: Path) -> tuple[Path, dict[str, Iterator[str]]]:
    raw, tokenizer = scratch / "sample", scratch / "tokenizer"
    subprocess.run([sys.executable, ROOT / "examples/sample_text.py", raw], check=True, stdout=sys.stderr)
    command = [sys.executable, "-m", "preprocess", "train_tokenizer", "--vocab_size", "1500"]
    subprocess.run([*command, "--input_dir", raw, "--output_dir", tokenizer], check=True, stdout=sys.stderr)
    return tokenizer, {
        "Korean sample": _repeated(sorted(raw.glob("ko_*.txt"))),
        "English sample": _repeated(sorted(raw.glob("en_*.txt"))),
    }


def _repeated(paths: list[Path]) -> Iterator[str]:
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines(keepends=True)]
    while True:
        yield from lines


def _peer_tokenizer(tokenizer: Path, folder: Path) -> Path:
    """Write the tokenizer for all versions of transformers, and, for dolma, merges as strings and ids."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").symlink_to((tokenizer / "tokenizer.json").resolve())
    config = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    names = {name: config[name] for name in ("bos_token", "eos_token", "model_max_length") if name in config}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"  # MosaicML needs transformers before version 5
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    data = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    data["model"]["merges"] = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]
    ]
    text = json.dumps(data, ensure_ascii=False)
    (folder / "tokenizer_string_merges.json").write_text(text, encoding="utf-8")
    ids = {token["content"]: token["id"] for token in data["added_tokens"]}
    (folder / "special_ids.json").write_text(json.dumps(ids), encoding="utf-8")
    return folder
