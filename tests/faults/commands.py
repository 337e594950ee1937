"""The commands that campaigns run, in this process, on a workplace: raw/, model/, data/, staged/."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WARNED = 1  # the exit code of doctor where all is usable
REFUSING = frozenset({65, 66, 73, 74, 75, 78})  # the exit codes that a fault may end a command with
LITTER = ".{}.other-{}-0123abcd.tmp"  # what attempts left that died, and clean removes
REPORT_NAME = "report.json"
EXPORTS = ("export megatron", "export nanogpt", "export hf")


def plan(place: Path, options: list[str]) -> int:
    """``plan``: the raw text into two shards."""
    return _preprocess(
        "plan",
        *("--input_dir", place / "raw", "--output_dir", place / "data"),
        *("--model_id", place / "model", "--num_shards", 2, *options),
    )


def command(name: str, place: Path, options: list[str]) -> Callable[[], tuple[int, Any]]:
    """A command as ``run_forked`` takes it; its value is what it delivers besides files."""
    data = place / "data"
    if name == "load":
        return lambda: (0, loaded(data))
    if name == "load staged":
        return lambda: (0, loaded(place / "staged"))
    if name == "load tars":
        return lambda: (
            0,
            loaded([str(path) for path in sorted(data.glob("*.tar"))], model_id=place / "model"),
        )
    if name.startswith("export "):
        return lambda: (_export(place, name.removeprefix("export ")), None)
    codes: dict[str, Callable[[], int]] = {
        "plan": lambda: plan(place, options),
        "plan, shard": lambda: plan(place, options) or _preprocess("--shard_id", 0, "--output_dir", data),
        "shard": lambda: _preprocess("--shard_id", 0, "--output_dir", data),
        "shard 1": lambda: _preprocess("--shard_id", 1, "--output_dir", data),
        "run": lambda: _preprocess("run", data, "--num_proc", 1),
        "verify": lambda: _preprocess("verify", data),
        "verify --fast": lambda: _preprocess("verify", data, "--fast"),
        "stage": lambda: _stage(data, place / "staged"),
        "status": lambda: _slurm("status", data),
        "peek": lambda: _preprocess("peek", data, "--num", 3),
        "doctor": lambda: _doctor(place),
        "train_tokenizer": lambda: _preprocess(
            *("train_tokenizer", "--input_dir", place / "raw", "--output_dir", place / "trained"),
            *("--vocab_size", 300),
        ),
        "clean": lambda: _preprocess("clean", data),
        "submit": lambda: _slurm("submit", data, "--mem_gb", 1),
        "report": lambda: _slurm("report", data, "--json", "--output", place / REPORT_NAME),
    }
    return lambda: (codes[name](), None)


def _preprocess(*args: object) -> int:
    from preprocess.__main__ import main

    return main([str(item) for item in args])


def _export(place: Path, layout: str) -> int:
    return _preprocess("export", place / "data", "--to", layout, "--output_dir", place / "exported" / layout)


def _doctor(place: Path) -> int:
    code = _preprocess("doctor", "--output_dir", place / "data", "--model_id", place / "model")
    return 0 if code == _WARNED else code


def _stage(data: Path, staged: Path) -> int:
    from loader.__main__ import main

    return main(["stage", str(data), "--to", str(staged)])


def _slurm(*args: object) -> int:
    from slurm.__main__ import main

    return main([str(item) for item in args])


def open_loader(shards: object, **options: object) -> Any:
    from loader import get_llama3_dataloader

    return get_llama3_dataloader(shards, 2, num_workers=0, seed=3, **options)  # type: ignore[arg-type]


def loaded(shards: object, **options: object) -> str:
    """A digest of all batches of an epoch, and of what the tokenizer makes of them."""
    with open_loader(shards, **options) as loader:
        return delivered(loader)


def delivered(loader: Any) -> str:
    """A digest of what a loader still delivers of its epoch."""
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
    """Name -> digest of what counts in a workplace: data set, copies, exports, the report but its time."""
    found = {
        f"{name}/{file}": digest
        for name in ("data", "staged")
        for file, digest in files_of(place / name).items()
    }
    for path in (place / "data").rglob(LITTER.format("*", "?")):
        if path.is_file():  # a folder of which clean had removed a part is young again
            found[f"litter/{path.name}"] = ""
    for path in [*(place / "exported").rglob("*"), place / REPORT_NAME]:
        name = path.relative_to(place).as_posix()
        if path.is_file() and "/." not in name and path.suffix != ".partial":
            data = _without(path, "written") if name == REPORT_NAME else path.read_bytes()
            found[name] = hashlib.sha256(data).hexdigest()
    return found


def files_of(folder: Path) -> dict[str, str]:
    """Name -> digest of the published files of a data set, or of a folder of staged copies.

    A manifest counts without ``run``, which may differ. Temporaries, jobs and the tokenizer are left out.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.name.startswith(("shard-", "index.json", "plan.json")):
            found[name] = hashlib.sha256(_without_run(path)).hexdigest()
    return found


def _without_run(path: Path) -> bytes:
    is_manifest = path.suffix == ".json" and path.name.startswith("shard-")
    return _without(path, "run") if is_manifest else path.read_bytes()


def _without(path: Path, key: str) -> bytes:
    """A JSON file without a value that may differ, or all of what is none."""
    data = path.read_bytes()
    try:
        values = json.loads(data)
        values.pop(key)
        return json.dumps(values).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return data
