"""The commands that campaigns run, in this process, on a workplace: raw/, model/, data/, staged/."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WARNED = 1  # the exit code of doctor where all is usable
LITTER = ".{}.other-{}-0123abcd.tmp"  # what attempts left that died, and clean removes
LISTS = ("duplicates", "overlap")  # commands that write them
EXPORTS = ("export megatron", "export nanogpt", "export hf")
# Words in capitals are files and folders of the workplace; OPTIONS are those of the form.
_WORDS = {
    "plan": "plan --input_dir RAW --output_dir DATA --model_id MODEL --num_shards 2 OPTIONS",
    "shard": "shard --shard_id 0 --output_dir DATA",
    "shard 1": "shard --shard_id 1 --output_dir DATA",
    "run": "run DATA --num_proc 1",
    "verify": "verify DATA",
    "verify --fast": "verify DATA --fast",
    "stage": "stage DATA --to STAGED",
    "status": "status DATA",
    "peek": "peek DATA --num 3",
    "doctor": "doctor --output_dir DATA --model_id MODEL",
    "train_tokenizer": "train_tokenizer --input_dir RAW --output_dir TRAINED --vocab_size 300",
    "clean": "clean DATA",
    "submit": "submit DATA --mem_gb 1",
    "report": "report DATA --json --output REPORT",
    "blank": "blank DATA --ids BLANKED --output_dir STAGED --num_proc 1 --max_bad_fraction 0.5",
    "duplicates": "duplicates DATA --output NAMES",
    "overlap": "overlap DATA --against RAW --output EXPORTED/overlap",
    "export megatron": "export DATA --to megatron --output_dir EXPORTED/megatron",
    "export nanogpt": "export DATA --to nanogpt --output_dir EXPORTED/nanogpt",
    "export hf": "export DATA --to hf --output_dir EXPORTED/hf",
}


def command(name: str, place: Path, options: list[str]) -> Callable[[], tuple[int, Any]]:
    """Return a command as ``run_forked`` takes it; its value is what it delivers besides files."""
    data = place / "data"
    delivers: dict[str, Callable[[], str]] = {
        "state": lambda: json.dumps(open_loader(data).state_at(2)),
        "load": lambda: loaded(data),
        "load staged": lambda: loaded(place / "staged"),
        "load tars": lambda: loaded([*map(str, sorted(data.glob("*.tar")))], model_id=place / "model"),
        "load resumed": lambda: loaded(data, state=json.loads((place / "state").read_bytes())),
    }
    if name in delivers:
        return lambda: (0, delivers[name]())

    def run() -> tuple[int, None]:
        from shardprep.__main__ import main

        words = _WORDS[name].replace("OPTIONS", " ".join(options)).split()
        code = main([re.sub("^[A-Z]+", lambda word: str(place / word[0].lower()), word) for word in words])
        return 0 if (name, code) == ("doctor", _WARNED) else code, None

    return run


def open_loader(shards: object, **options: object) -> Any:
    """Return a loader of the shards, without worker processes."""
    from loader import get_llama3_dataloader

    return get_llama3_dataloader(shards, 2, num_workers=0, seed=3, **options)  # type: ignore[arg-type]


def loaded(shards: object, *, state: Any = None, **options: object) -> str:
    """Return a digest of all batches of an epoch, or of those behind a state, and of all decoded ids."""
    digest = hashlib.sha256()
    with open_loader(shards, **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        tokenizer = loader.tokenizer
        special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
        digest.update(json.dumps([len(loader), special]).encode())
        for batch in loader:
            for name in sorted(batch):
                digest.update(f"{name} {batch[name].dtype} {list(batch[name].shape)} ".encode())
                digest.update(batch[name].numpy().tobytes())
        texts = tokenizer.decode(list(range(tokenizer.vocab_size)))
        digest.update(texts.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def published_below(place: Path) -> dict[str, str]:
    """Return name -> digest of what counts in a workplace: data set, copies, exports, lists, the report.

    A manifest counts without ``run``, which may differ, and the report without its time. Temporaries, jobs
    and the tokenizer are left out.
    """
    found = {}
    for path in [*place.rglob("*")]:
        name = path.relative_to(place).as_posix()
        folder = name.partition("/")[0]
        if not path.is_file():
            continue
        if folder in ("data", "staged") and path.name.startswith(("shard-", "index.json", "plan.json")):
            data = _without("run", path) if path.match("shard-*.json") else path.read_bytes()
        elif folder == "data" and path.match(LITTER.format("*", "?")):
            name, data = f"litter/{path.name}", b""
        elif folder in ("exported", "names", "trained") and "/." not in name and path.suffix != ".partial":
            data = path.read_bytes()
        elif name == "report":
            data = _without("written", path)
        else:
            continue
        found[name] = hashlib.sha256(data).hexdigest()
    return found


def _without(key: str, path: Path) -> bytes:
    """Return a JSON file without a value that may differ, or all of what is none."""
    data = path.read_bytes()
    try:
        values = json.loads(data)
        values.pop(key)
        return json.dumps(values).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return data
