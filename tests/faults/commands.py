"""The commands that campaigns run, in this process, on a workplace: raw/, model/, data/, staged/."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_WARNED = 1  # the exit code of doctor where all is usable
REFUSING = frozenset({65, 66, 73, 74, 75, 78})  # the exit codes that a fault may end a command with
LITTER = ".{}.other-{}-0123abcd.tmp"  # what attempts left that died, and clean removes
REPORT_NAME = "report.json"
STATE_NAME = "state.json"  # of a loader, as a training script keeps it
EXPORTS = ("export megatron", "export nanogpt", "export hf")
BLANKED_NAME = "blanked.txt"  # the documents that go
_FILES = {"REPORT": REPORT_NAME, "BLANKED": BLANKED_NAME}
# DATA and the like are folders of the workplace, or files; OPTIONS are those of the form.
_WORDS: Mapping[str, str] = {
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
    "export megatron": "export DATA --to megatron --output_dir EXPORTED/megatron",
    "export nanogpt": "export DATA --to nanogpt --output_dir EXPORTED/nanogpt",
    "export hf": "export DATA --to hf --output_dir EXPORTED/hf",
}


def command(name: str, place: Path, options: list[str]) -> Callable[[], tuple[int, Any]]:
    """Return a command as ``run_forked`` takes it; its value is what it delivers besides files."""
    data = place / "data"

    def loads() -> tuple[int, Any]:
        if name == "load resumed":
            return 0, resumed(data, json.loads((place / STATE_NAME).read_bytes()))
        if name == "load tars":
            return 0, loaded([str(path) for path in sorted(data.glob("*.tar"))], model_id=place / "model")
        return 0, loaded(place / "staged" if name == "load staged" else data)

    def runs() -> tuple[int, None]:
        code = 0
        for each in name.split(", "):
            code = code or run_command(_WORDS[each], place, options)
        return 0 if (name, code) == ("doctor", _WARNED) else code, None

    return loads if name.startswith("load") else runs


def run_command(words: str, place: Path, options: list[str]) -> int:
    """Run ``shardprep WORDS`` here and return its exit code."""
    from shardprep.__main__ import main

    argv = []
    for word in words.split():
        head, _, rest = word.partition("/")
        if word == "OPTIONS":
            argv += options
        elif word in _FILES:
            argv.append(str(place / _FILES[word]))
        elif head.isupper():
            argv.append(str(place / head.lower() / rest))
        else:
            argv.append(word)
    return main(argv)


def open_loader(shards: object, **options: object) -> Any:
    """Return a loader of the shards, without worker processes."""
    from loader import get_llama3_dataloader

    return get_llama3_dataloader(shards, 2, num_workers=0, seed=3, **options)  # type: ignore[arg-type]


def loaded(shards: object, **options: object) -> str:
    """Return a digest of all batches of an epoch, and of what the tokenizer makes of them."""
    with open_loader(shards, **options) as loader:
        return _delivered(loader)


def resumed(shards: object, state: Any) -> str:
    """Return a digest of what a loader still delivers from a state on."""
    with open_loader(shards) as loader:
        loader.load_state_dict(state)
        return _delivered(loader)


def _delivered(loader: Any) -> str:
    digest = hashlib.sha256()
    tokenizer = loader.tokenizer
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    digest.update(json.dumps([len(loader), special]).encode())
    for batch in loader:
        for name in sorted(batch):
            digest.update(f"{name} {batch[name].dtype} {list(batch[name].shape)} ".encode())
            digest.update(batch[name].numpy().tobytes())
    digest.update(tokenizer.decode(list(range(tokenizer.vocab_size))).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def published_below(place: Path) -> dict[str, str]:
    """Return name -> digest of what counts in a workplace: data set, copies, exports, the report.

    A manifest counts without ``run``, which may differ, and the report without its time. Temporaries, jobs
    and the tokenizer are left out.
    """
    found = {}
    for folder in ("data", "staged"):
        for path in sorted((place / folder).rglob("*")):
            if path.is_file() and path.name.startswith(("shard-", "index.json", "plan.json")):
                is_manifest = path.suffix == ".json" and path.name.startswith("shard-")
                data = _without(path, "run") if is_manifest else path.read_bytes()
                found[path.relative_to(place).as_posix()] = hashlib.sha256(data).hexdigest()
    for path in (place / "data").rglob(LITTER.format("*", "?")):
        if path.is_file():  # a folder of which clean had removed a part is young again
            found[f"litter/{path.name}"] = ""
    for path in [*(place / "exported").rglob("*"), place / REPORT_NAME]:
        name = path.relative_to(place).as_posix()
        if path.is_file() and "/." not in name and path.suffix != ".partial":
            data = _without(path, "written") if name == REPORT_NAME else path.read_bytes()
            found[name] = hashlib.sha256(data).hexdigest()
    return found


def _without(path: Path, key: str) -> bytes:
    """Return a JSON file without a value that may differ, or all of what is none."""
    data = path.read_bytes()
    try:
        values = json.loads(data)
        values.pop(key)
        return json.dumps(values).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return data
