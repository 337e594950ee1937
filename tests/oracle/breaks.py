"""``python -m tests.oracle.breaks``: break a promise of the packages, and see that the oracle names it.

Each break replaces a text of one file, as a forked process imports it, and runs one test of the oracle there.
The test has to pass without the break, to fail with it, and to say so in the words that the table expects. A
break whose text is not found is out of date: write it for the file that has its work now.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.checkout import ROOT
from tests.mutants import import_changed, import_libraries, run_forked, run_pytest

_STREAM = "test_streams.py::test_a_form_delivers_the_frozen_batches_and_resumes_on_another_number_of_ranks"
_MEMBERS = "test_streams.py::test_the_members_of_tars_are_the_frozen_ones"
_MANIFEST = "test_done.py::test_each_file_is_on_the_disk_before_its_name_and_the_manifests_name_comes_last"
_INPUTS = "test_inputs.py::test_documents_are_those_that_a_separate_reader_finds"


class Break(NamedTuple):
    """What is broken, where, and which test says what about it."""

    promise: str
    path: str
    old: str
    new: str
    test: str
    words: str  # of the message, by which a reader knows where to look


BREAKS = [
    Break("labels are the ids of their places", "loader/batches.py",
          "np.where(is_real, ids, IGNORED)",
          "np.where(is_real, np.roll(ids, -1, 1), IGNORED)",
          f"{_STREAM}[documents-1]",
          "form documents, world size 1, 2 workers: global batch 0 differs first in labels"),
    Break("padding has no label", "loader/batches.py",
          "np.where(is_real, ids, IGNORED)",
          "ids.copy()",
          f"{_STREAM}[grouped-1]",
          "form grouped, world size 1, 0 workers: global batch 0: padding has labels"),
    Break("what the user says in a conversation has no label", "loader/batches.py",
          "labels[labels < 0] = IGNORED",
          "labels &= ID_BITS",
          f"{_STREAM}[chat-1]", "form chat, world size 1, 0 workers: global batch 0 differs first in labels"),
    Break("the last document of a block is there", "preprocess/read/lines.py",
          'yield start, num_begun + cut, b"".join([*begun, data[:cut]]), num_bytes',
          "yield start, num_begun + cut, "
          'b"".join([*begun, data[: data[: cut - 1].rfind(b"\\n") + 1]]), num_bytes',
          f"{_INPUTS}[a.txt-1]", "a.txt in 1 shards: document"),
    Break("documents for validation are those with the least hashes", "shardprep/format/documents.py",
          "np.asarray(firsts < np.uint64(",
          "np.asarray(firsts >= np.uint64(",
          f"{_STREAM}[validation_side-1]",
          "form validation_side, world size 1, 0 workers: global batch 0 differs first in input_ids"),
    Break("a document ends with EOS where it is asked for", "preprocess/make/engines.py",
          "ids=np.insert(tokens.ids, tokens.offsets[1:], end_id),\n"
          "            offsets=tokens.offsets + np.arange(len(tokens.offsets)),",
          "ids=np.insert(tokens.ids, tokens.offsets[1:-1], end_id),\n            offsets=tokens.offsets"
          " + np.arange(len(tokens.offsets)).clip(max=len(tokens.offsets) - 2),",
          f"{_MEMBERS}[concat]", "data set concat, shard 0: its tar's members are others"),
    Break("a manifest is written last", "preprocess/make/shard_writer.py",
          "        for file in written.values():\n            file.publish()",
          "        path = names.manifest_path(self._folder, self._shard_id)\n"
          "        files.publish_bytes(path, manifest.to_json())\n"
          "        for file in written.values():\n            file.publish()",
          _MANIFEST, "the manifest has its name before shard-00001.tar"),
    Break("a state counts the step that the loop holds", "loader/run.py",
          '"step": position.step - run.first_step(epoch),',
          '"step": max(position.step - 1 - run.first_step(epoch), 0),',
          f"{_STREAM}[documents-1]",
          "form documents, world size 2, 0 workers, resumed at 23 from world size 1: global batch 23"),
    Break("rank r has the r-th part of a global batch", "loader/dataloader.py",
          "share(range(run.order.num_slots), who.rank, who.world_size)",
          "share(range(run.order.num_slots), (who.rank + 1) % who.world_size, who.world_size)",
          f"{_STREAM}[grouped-3]",
          "form grouped, world size 3, 0 workers: global batch 0 has the right samples in another order"),
    Break("a resumed run keeps its schedule of weights", "loader/run.py",
          "stages=tuple(stages), batches_per_tick",
          "stages=tuple(stages[:1]), batches_per_tick",
          f"{_STREAM}[mixture-2]", "the state, of step 23, is of another run"),
    Break("positions begin at 0 in each document", "loader/boundaries.py",
          "np.subtract(_places(num_places), positions, out=positions)",
          "np.remainder(_places(num_places), shape[1], out=positions)",
          f"{_STREAM}[packed_concat-2]",
          "form packed_concat, world size 2, 0 workers: global batch 0: cu_seq_lens_q and position_ids tell"),
    Break("each epoch has an order of its own", "loader/order.py",
          "hash_ints(self.seed, epoch, _WINDOWS, number, start)",
          "hash_ints(self.seed, 0, _WINDOWS, number, start)",
          f"{_STREAM}[first_script-1]", "form first_script, world size 1"),
    Break("a schedule of batch sizes holds to its last stage", "loader/samples.py",
          "size_at, shares_at = dict(sizes), ",
          "size_at, shares_at = dict(sizes[:2]), ",
          f"{_STREAM}[batch_size_schedule-1]",
          "batch_size_schedule, world size 2, 0 workers, resumed at 23 from world size 1: global batch 30"),
]  # fmt: skip


def outcome(each: Break, folder: Path) -> str:
    """Break a promise and run its test; returns what went wrong, or nothing."""
    text = (ROOT / each.path).read_text(encoding="utf-8")
    if text.count(each.old) != 1:
        return f"out of date: {each.path} has its text {text.count(each.old)} times, expected once"

    def work() -> int:
        import_changed(each.path, text.replace(each.old, each.new))
        return run_pytest(folder, [f"tests/oracle/{each.test}"])

    code, output = run_forked(folder, work)
    said = [line.removeprefix("E ").strip() for line in output.splitlines() if line.startswith("E ")]
    if code and any(each.words in line for line in said):
        return ""
    return f"caught in other words: {said[:3] or output[-500:]}" if code else "NOT CAUGHT"


def main() -> int:
    import_libraries()
    tests = {f"tests/oracle/{each.test}": None for each in BREAKS}
    num_caught = 0
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "whole"
        code, output = run_forked(whole, lambda: run_pytest(whole, tests))
        if code:
            sys.exit(f"{output}\nthe oracle fails on the packages as they are")
        for number, each in enumerate(BREAKS):
            problem = outcome(each, Path(name) / str(number))
            num_caught += not problem
            print(f"{each.promise}: {problem or each.words}", flush=True)
    print(f"{num_caught} of {len(BREAKS)} breaks are caught in words that name them")
    return int(num_caught < len(BREAKS))


if __name__ == "__main__":
    sys.exit(main())
