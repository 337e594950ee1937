"""Whether a user's function gives the same texts again: in this process, and in another one.

The order of a set differs between processes, and what a function remembers only shows in one.
"""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from preprocess.plan.estimate import sample_of_plan
from preprocess.read.transform import Transform
from shardprep.errors import BadInput, UsageError
from shardprep.format.plan import Plan
from shardprep.own_packages import HOME

_SAMPLE_BYTES = 1 << 18
_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from preprocess.plan.transform_check import answer; answer()"
)


@dataclass(frozen=True)
class _Sample:
    """What is sampled, and the function that the sample goes through."""

    plan: Plan
    function: Path

    def run(self, transform: Transform) -> tuple[str, int, list[str]]:
        """Return the hash of the texts, the number of documents, and why the function failed for some."""
        digest, num_documents, failures = hashlib.sha256(), 0, []
        for documents in sample_of_plan(self.plan, _SAMPLE_BYTES, transform):
            num_documents += len(documents.texts) + len(documents.bad)
            failures += [bad.detail for bad in documents.bad if bad.reason == "transform_error"]
            for text in documents.texts:
                digest.update(len(text).to_bytes(8, "big") + text)
        return digest.hexdigest(), num_documents, failures


def check_transform(plan: Plan, transform: Transform, say: Callable[[str], None]) -> None:
    """Try the function on a sample of the input.

    Raises UsageError where it gives other texts again or ends its process, BadInput where it fails for all.
    """
    sample = _Sample(plan, transform.path)
    # First in another process: what ends a process ends that one.
    command = [sys.executable, "-c", _CODE, str(HOME)]
    done = subprocess.run(command, input=pickle.dumps(sample), capture_output=True, check=False)
    words = done.stdout.split()
    if done.returncode or not words:
        last_line = "".join(done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:])
        found = f"it ended the process that tried it, with exit code {done.returncode}"
        expected = f"a text; its last words: {last_line or 'none'}"
        raise UsageError(path=transform.path, found=found, expected=expected)
    texts_elsewhere = words[-1].decode()  # the function may print, too
    texts, num_documents, failures = sample.run(transform)
    if failures:
        found = f"--transform {transform.path} fails for {len(failures)} of {num_documents} sampled documents"
        message = f"{found}, first so: {failures[0]}"
        if len(failures) == num_documents:
            raise BadInput(message, path=transform.path)
        say(f"warning: {message}")
    for texts_again, where in (
        (sample.run(transform)[0], "the second time that it was given the same sample"),
        (texts_elsewhere, "in another process"),
    ):
        if texts_again != texts:
            expected = "the same text for the same record, whatever the time, chance and other documents"
            raise UsageError(path=transform.path, found=f"other texts {where}", expected=expected)


def answer() -> None:
    """Print the hash of the texts of the sample that stands on standard input."""
    sample: _Sample = pickle.loads(sys.stdin.buffer.read())  # noqa: S301 - of the process that started this one
    transform = Transform(sample.function, sample.plan.options.transform_files)
    sys.stdout.write(f"\n{sample.run(transform)[0]}\n")
