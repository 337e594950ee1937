"""dolma's command line: JSON lines with ids -> uint32 memory maps, an EOS after each document."""

import json
import sys
from pathlib import Path

from dolma.cli.__main__ import main as dolma


def main(documents: str, tokenizer: str, output: str) -> None:
    """Run ``dolma tokens``. It has its own tokenizer file, as tokenizers 0.19 needs merges as strings."""
    folder = Path(tokenizer)
    eos_token = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
    added = json.loads((folder / "special_ids.json").read_text())
    eos = str(added[eos_token])
    flags = {
        "--documents": f"{documents}/documents.jsonl",
        "--destination": output,
        "--tokenizer.name_or_path": str(folder / "tokenizer_string_merges.json"),
        "--tokenizer.eos_token_id": eos,
        "--tokenizer.pad_token_id": eos,
        "--dtype": "uint32" if max(added.values()) >= 2**16 else "uint16",
        "--processes": "1",
    }
    dolma(["tokens", *(part for flag in flags.items() for part in flag)])


if __name__ == "__main__":
    main(*sys.argv[1:])
