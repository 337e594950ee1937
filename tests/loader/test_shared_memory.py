"""Workers that run out of what they share batches with: the training process raises, and never waits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.children import run_child
from tests.external_tars import write_numbered_tars
from tests.word_tokenizers import save_word_tokenizer

pytestmark = pytest.mark.processes

CHILD = """
import json, multiprocessing, os, resource, sys
from loader import ReadWriteError, get_llama3_dataloader

def lower(limit, most, pid=0):
    resource.prlimit(pid, limit, (most, resource.getrlimit(limit)[1]))

def error_without(what, loader):
    try:
        if what == "room":  # of a file in shared memory, as where /dev/shm is full
            lower(resource.RLIMIT_FSIZE, 16)
        elif what == "files of the loop":
            lower(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")))
        batches = iter(loader)
        if what == "files of the worker":
            next(batches)
            (worker,) = multiprocessing.active_children()
            lower(resource.RLIMIT_NOFILE, 4, worker.pid)
        for _ in range(3):  # there may be chunks that were sent before
            for batch in batches:
                pass
            batches = iter(loader)
    except ReadWriteError as error:
        return str(error)
    finally:
        for limit, most in limits.items():
            resource.setrlimit(limit, most)

if __name__ == "__main__":
    data, method = sys.argv[1:]
    multiprocessing.set_start_method(method)
    limits = {limit: resource.getrlimit(limit) for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)}
    said = {}
    for what in ("room", "files of the loop", "files of the worker"):
        loader = get_llama3_dataloader(data, 8, data, num_workers=1)
        with loader:
            said[what] = error_without(what, loader)
    print(json.dumps(said))
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_that_cannot_share_a_batch_end_the_loop_with_what_is_full(
    tmp_path: Path, method: str
) -> None:
    """A child that waits for ever is killed, and fails the test."""
    save_word_tokenizer(tmp_path, 200)
    write_numbered_tars(
        tmp_path, 400, 1, name="shard-{:05d}.tar", ids_of=lambda number: [number % 200] * 2000
    )  # chunks of 1 MiB: more than are read ahead
    ended = run_child([sys.executable, "-c", CHILD, str(tmp_path), method], cwd=ROOT)
    said = json.loads(ended.stdout)
    for what, error in said.items():
        assert error is not None, f"no error without {what}"
        assert "/dev/shm has " in error
        assert "(ulimit -n)" in error
    assert "a file can have 16 bytes (ulimit -f)" in said["room"]
