"""Build a virtual environment for each peer in .bench/PEER, because their dependencies conflict.

    python benchmarks/peer_environments.py [PEER ...]        # default: the peers of bench_preprocess

An existing environment is kept. If one cannot be built, it is left out with the reason; pip's output is in
.bench/PEER.log. Git ignores the folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".bench"
BUILD_LIMIT_S = 1200
# Pinned, and installed first: an unpinned torch may bring gigabytes of CUDA.
TORCH = "torch==2.13.0"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A library of others: the label of its table row, and its packages for pip."""

    label: str
    requirements: tuple[str, ...]
    needs_torch: bool = False


PEERS = {
    "datatrove": Peer(
        label="datatrove 0.10.1", requirements=("datatrove[processing,io]==0.10.1", "orjson", "transformers")
    ),
    "dolma": Peer(label="dolma 1.2.1", requirements=("dolma==1.2.1",)),
    "hf_datasets": Peer(label="HF datasets 5.2", requirements=("datasets==5.2.*", "transformers")),
    "litdata": Peer(
        label="litdata 0.2.76", requirements=("litdata==0.2.76", "transformers"), needs_torch=True
    ),
    "mosaicml": Peer(
        label="MosaicML streaming 0.13",
        requirements=("mosaicml-streaming==0.13.*", "transformers"),
        needs_torch=True,
    ),
    "megatron": Peer(
        label="Megatron-core indexed dataset",
        requirements=("megatron-core==0.16.1", "transformers"),
        needs_torch=True,
    ),
    "tokbin": Peer(label="tokbin 0.1.0", requirements=("tokbin==0.1.0",)),
    "megatron_fast": Peer(
        label="Megatron-LM's fast path (gigatoken 0.10)", requirements=("gigatoken==0.10.0", "numpy")
    ),
}

# More peers, only for the loader's benchmark.
LOADER_PEERS = {
    "loader_hf_datasets": Peer(label="HF datasets 5.2", requirements=("datasets==5.2.*",), needs_torch=True),
    "grain": Peer(label="Grain 0.2.18", requirements=("grain==0.2.18", "array-record"), needs_torch=True),
    "lancedb": Peer(label="lancedb 0.40", requirements=("lancedb==0.40.0",), needs_torch=True),
    "loader_tokbin": Peer(label="tokbin 0.1.0", requirements=("tokbin==0.1.0",), needs_torch=True),
    "energon": Peer(label="Energon 7.4.1", requirements=("megatron-energon==7.4.1",), needs_torch=True),
}
_ALL = PEERS | LOADER_PEERS


def peer_python(name: str) -> Path:
    """Return the interpreter of a peer's environment, which may not exist."""
    return CACHE / name / "bin" / "python"


def missing_reason(name: str) -> str | None:
    """Return why a peer cannot run, or None if its environment exists."""
    if _stamp(name).exists() and _stamp(name).read_text() == _wanted(name):
        return None
    reason = CACHE / name / "failed"
    return reason.read_text() if reason.exists() else f"not built; run: python {__file__} {name}"


def build(name: str) -> str | None:
    """Build a peer's environment unless it exists. Return why this failed, or None."""
    if missing_reason(name) is None:
        return None
    CACHE.mkdir(exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n")
    peer = _ALL[name]
    steps = [["pip>=25.1"], [TORCH]] if peer.needs_torch else [["pip>=25.1"]]
    steps.append([*peer.requirements, *([TORCH] if peer.needs_torch else [])])
    folder = CACHE / name
    try:
        venv.create(folder, clear=True, with_pip=True)
        with (CACHE / f"{name}.log").open("wb") as log:
            for step in steps:
                command = [
                    str(peer_python(name)),
                    "-m",
                    "pip",
                    "install",
                    "--upgrade-strategy",
                    "only-if-needed",
                ]
                subprocess.run(
                    [*command, *step], check=True, stdout=log, stderr=subprocess.STDOUT, timeout=BUILD_LIMIT_S
                )
    except (OSError, subprocess.SubprocessError) as error:
        reason = _last_error(name) or f"{type(error).__name__}: {error}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "failed").write_text(reason)
        return reason
    _stamp(name).write_text(_wanted(name))
    return None


def _stamp(name: str) -> Path:
    return CACHE / name / "installed"


def _wanted(name: str) -> str:
    return "\n".join([*_ALL[name].requirements, TORCH if _ALL[name].needs_torch else ""])


def _last_error(name: str) -> str | None:
    log = CACHE / f"{name}.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line for line in reversed(lines) if "ERROR" in line), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="*", default=[], metavar="PEER", help=f"of {', '.join(_ALL)}")
    names = parser.parse_args().peers or list(PEERS)
    if unknown := sorted(set(names) - set(_ALL)):
        parser.error(f"no such peer: {', '.join(unknown)}; there are {', '.join(_ALL)}")
    for name in names:
        print(f"{name}: ", end="", flush=True)
        reason = build(name)
        print("ready" if reason is None else f"left out: {reason}", flush=True)
    return 0  # every peer is optional


if __name__ == "__main__":
    sys.exit(main())
