"""Try a user's function on a sample.

It must return the same texts a second time, and in another process, where the order of a set is different.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from preprocess.plan.sampling import sample_of_plan
from preprocess.read.transform import Transform
from shardprep import errors
from shardprep.child_process import call_in_child
from shardprep.format.plan import Plan

_FUNCTION_BYTES = 1 << 18  # of the input that a user's function is tried on


def _try(plan: Plan, path: Path, transform: Transform | None = None) -> tuple[str, int, list[str]]:
    """Put a sample through a function. Returns a hash of the texts, the number of documents, and failures."""
    transform = transform or Transform(path, plan.options.transform_files)
    digest = hashlib.sha256()
    num_documents = 0
    failures = list[str]()
    for documents in sample_of_plan(plan, _FUNCTION_BYTES, transform):
        num_documents += len(documents.texts) + len(documents.bad)
        failures += [bad.detail for bad in documents.bad if bad.reason == "transform_error"]
        for text in documents.texts:
            digest.update(len(text).to_bytes(8, "big") + text)
        digest.update(repr([(bad.line, bad.reason) for bad in documents.bad]).encode())
    return digest.hexdigest(), num_documents, failures


def check_transform(plan: Plan, transform: Transform, say: Callable[[str], None]) -> None:
    """Check that a function works on a sample, with equal texts each time. Raises UsageError or BadInput."""
    try:  # first in another process, in case the function ends its process
        texts_elsewhere, num_documents, failures = call_in_child(_try, plan, transform.path)
    except ChildProcessError as error:
        found = f"a function that ended the process that tried it: {error}"
        raise errors.UsageError(path=transform.path, found=found, expected="a text") from None
    if failures:
        found = f"--transform {transform.path} fails for {len(failures)} of {num_documents} sampled documents"
        message = f"{found}, first with: {failures[0]}"
        if len(failures) == num_documents:
            raise errors.BadInput(message, path=transform.path)
        say(f"warning: {message}")
    texts, _, _ = _try(plan, transform.path, transform)
    texts_again, _, _ = _try(plan, transform.path, transform)
    if {texts_again, texts_elsewhere} != {texts}:
        where = "the second time" if texts_again != texts else "in another process"
        expected = "the same text for the same record, independent of time, chance and other documents"
        raise errors.UsageError(path=transform.path, found=f"other texts {where}", expected=expected)
