"""Count the calls on paths that a task makes, by owner of the path.

    python benchmarks/path_calls.py [--python ENV/bin/python] [--list]

On a parallel file system each such call (stat, open, rename and the like) is a request to the metadata
server, unless the node has the answer in its cache, as it often has for repeated paths. The task makes one
shard of Korean reviews in a scratch folder, in the environment of --python (default: this one), started as in
slurm/prep_array.sh. A first task, which is not counted, writes byte code. This needs strace. Counts do not
depend on the load. --list prints each path instead.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmark_text import lay_out
from contenders import plan

_CALL = re.compile(r'^\d+ +(\w+)\((?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"([^"]+)"')
# As in slurm/prep_array.sh: Python does not look for modules in the working folder.
_START = (
    "import sys; sys.path.remove(''); import runpy;"
    "runpy.run_module('preprocess', run_name='__main__', alter_sys=True)"
)
_WHERE = "import sys, preprocess; print(sys.prefix, sys.base_prefix, preprocess.__file__, sep='\\n')"
KINDS = ("data", "shardprep", "libraries", "Python", "the system")


def calls_of_task(python: Path, output: Path, scratch: Path) -> list[tuple[str, str]]:
    """Run the task under strace, and return name and path of each call on a path."""
    log = scratch / "strace.log"
    traced: list[str | Path] = ["strace", "-f", "-qq", "-y", "-e", "trace=%file", "-o", log]
    task: list[str | Path] = [python, "-c", _START, "--shard_id", "0", "--output_dir", output]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PYTHON"))}
    for command in (task, [*traced, *task]):
        for path in output.glob("shard-*"):
            path.unlink()
        subprocess.run(command, cwd=scratch, env=environ, check=True, capture_output=True)
    calls = filter(None, map(_CALL.match, log.read_text(errors="replace").splitlines()))
    return [(call[1], str(Path(call[2] or scratch, call[3]))) for call in calls]


def kinds_of_paths(python: Path, scratch: Path) -> dict[str, str]:
    """Return prefix of a path -> its owner. The longest prefix counts."""
    done = subprocess.run([python, "-c", _WHERE], cwd=scratch, capture_output=True, text=True, check=True)
    environment, base, ours = done.stdout.splitlines()
    packages = Path(ours).parent.parent
    kinds = {str(scratch / name): "data" for name in ("text", "output")}
    kinds |= {base: "Python", environment: "Python"}
    kinds |= {str(path): "libraries" for path in Path(environment).glob("lib*/python*/site-packages")}
    for name in ("loader", "lustre", "preprocess", "shardprep", "slurm"):
        kinds[str(packages / name)] = "shardprep"
    return kinds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--list", action="store_true", help="also print each call")
    args = parser.parse_args()
    python = args.python.absolute()
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as folder:
        scratch = Path(folder)
        text = lay_out(scratch, 2_000_000)
        output = scratch / "output"
        plan(text.corpora[0].folder, output, text.tokenizer, ["--record", "packed", "--seq_len", "2048"])
        calls = calls_of_task(python, output, scratch)
        kinds = kinds_of_paths(python, scratch)
    beginnings = sorted(kinds, key=len, reverse=True)
    found: dict[str, list[tuple[str, str]]] = {kind: [] for kind in KINDS}
    for name, path in calls:
        kind = next((kinds[each] for each in beginnings if path.startswith(each)), "the system")
        found[kind].append((name, path))
    print("| paths of | calls | of these open | different paths |\n|---|---|---|---|")
    for kind, of_kind in found.items():
        num_opens = sum(name == "openat" for name, _ in of_kind)
        print(f"| {kind} | {len(of_kind)} | {num_opens} | {len({path for _, path in of_kind})} |")
    if args.list:
        print(*(f"{kind} {name} {path}" for kind in KINDS for name, path in found[kind]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
