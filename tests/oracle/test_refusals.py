"""What is refused, and what is told: a table of wrong uses, of commands and of the loader.

A row is a wrong use, how it ends, and what the error says as data: the path, what was found, what was
expected, what to type. No row has a sentence. ``$DATA`` and the like in it stand for folders of the scene.
"""

from __future__ import annotations

import ast
import contextlib
import gzip
import hashlib
import json
import os
import pickle
import re
import resource
import shlex
import shutil
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loader import OtherRun, TokenLoader, get_llama3_dataloader
from shardprep.errors import (
    BrokenShard,
    MissingShard,
    NotFound,
    OtherPlan,
    OtherTokenizer,
    ShardprepError,
    UnknownVersion,
    UsageError,
)
from tests.world import Ended, World, call_main, flags_of, save_tokenizer, tokenizer_dir

NUM_SHARDS = 3
LINES = [f"the kettle of store {number}" for number in range(120)]
RECORDS = [{"body": line} for line in LINES[:20]]
TALK = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "kettle"}]


def argument_of(remedy: str) -> dict[str, Any]:
    """``"amend=True"`` -> the argument."""
    name, _, value = remedy.partition("=")
    return {name: ast.literal_eval(value)} if remedy else {}


def loader_of(data: Any, **arguments: Any) -> TokenLoader:
    return get_llama3_dataloader(data, **{"batch_size": 4, "num_workers": 0, **arguments})


class Scene:
    """Data sets that are whole, and a folder to break a copy in.

    RAW: text, of which DATA (documents), PACKED (rows of 8), MIXED (a second set of
    documents) and OTHER (by another tokenizer) are made. PLANNED has no shard yet. TMP is this row's own.
    """

    def __init__(self, shared: Path, tmp: Path) -> None:
        self.tmp = tmp
        self.broken = tmp / "broken"
        self.raw = shared / "raw"
        names = ("data", "packed", "mixed", "other", "planned", "records", "model", "no_eos", "talks")
        self.folders = {"TMP": tmp, "RAW": self.raw, "BROKEN": self.broken, "NEW": tmp / "new"}
        self.folders |= {name.upper(): shared / name for name in names}
        self.num_tries = 0
        self.repeat: Callable[[str], Any] = pytest.fail  # the last use once more, mended by a remedy

    def __getitem__(self, name: str) -> Path:
        return self.folders[name]

    def filled(self, text: str) -> str:
        """Return a text with the folders in the places of their names."""
        return string.Template(text).safe_substitute({name: str(path) for name, path in self.folders.items()})

    def main(self, *words: object, **options: Any) -> Ended:
        """Run a command; strings are words as a shell would have them, with names of folders in them."""
        line = [self.filled(word) if isinstance(word, str) else str(word) for word in words]
        line += [self.filled(flag) for flag in flags_of(options)]
        self.repeat = lambda remedy: call_main(*line, *shlex.split(remedy))
        return call_main(*line)

    def plan(self, **options: Any) -> Ended:
        """Plan RAW into NEW."""
        folders = {"input_dir": "$RAW", "output_dir": "$NEW", "model_id": "$MODEL"}
        return self.main("plan", **{**folders, **options})

    def shard(self, shard_id: int, **options: Any) -> Ended:
        return self.main("--shard_id", shard_id, **{"output_dir": "$PLANNED", **options})

    def breaks(self, change: Callable[[Path], object], of: str = "DATA") -> Path:
        """Copy a data set to BROKEN, once, and change the copy."""
        if not self.broken.exists():
            shutil.copytree(self[of], self.broken)
            change(self.broken)
        return self.broken

    def load(self, data: Any, *, reads: bool = False, **arguments: Any) -> None:
        """Make a loader; ``reads`` an epoch."""

        def use(remedy: str) -> None:
            with loader_of(data, **arguments, **argument_of(remedy)) as made:
                for _ in made if reads else ():
                    pass

        def again(remedy: str) -> Ended:
            use(remedy)
            return Ended(code=0, out="", err="")

        self.repeat = again
        use("")

    def mix(self) -> dict[str, Path]:
        return {"a": self["DATA"], "b": self["MIXED"]}

    def load_state(self, state: Any) -> None:
        loader_of(self["DATA"]).load_state_dict(state)

    def resume(self, changes: Mapping[str, Any], data: str = "DATA", **arguments: Any) -> Ended:
        """Load the state of a run of DATA, with some values of it or its fingerprint changed."""
        self.repeat = lambda remedy: self.resume(changes, data, **arguments, **argument_of(remedy))
        state = loader_of(self["DATA"]).state_dict()
        state["fingerprint"] |= {name: changes[name] for name in changes.keys() & state["fingerprint"].keys()}
        state |= {name: changes[name] for name in changes.keys() & state.keys()}
        loader_of(self[data], **arguments).load_state_dict(state)
        return Ended(code=0, out="", err="")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    what: str
    use: Callable[[Scene], Any]
    ends: int | type[BaseException]  # exit code of a command, or error of a call
    path: str | None = None
    found: str | None = None  # words; None: whatever it says
    expected: str | None = None
    remedy: str | None = None
    heals: bool = False  # with the remedy the same use succeeds
    starts_process: bool = False
    needs_user: bool = False  # root may write anywhere
    is_text_alone: bool = False  # a command refuses its own words, before there is an error


def row(what: str, use: Callable[[Scene], Any], ends: int | type[BaseException], **facts: Any) -> Refusal:
    return Refusal(what=what, use=use, ends=ends, **facts)


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def cut(path: Path, num_bytes: int) -> None:
    os.truncate(path, num_bytes)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def set_version(path: Path, version: int) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))


def copy_shard(source: Path, shard_id: int, target: Path, new_id: int) -> None:
    for suffix in ("tar", "idx", "json"):
        shutil.copy(source / f"shard-{shard_id:05d}.{suffix}", target / f"shard-{new_id:05d}.{suffix}")


def spoil_ids(folder: Path) -> None:
    tar = folder / "shard-00001.tar"
    tar.write_bytes(tar.read_bytes().replace(b"[", b"x", 1))


def reseal(path: Path, old: str, new: str) -> None:
    """Change the text of one of our JSON files, and give it the hash of what it holds then."""
    data = json.loads(path.read_text().replace(old, new))
    held = {name: data[name] for name in data.keys() - {"content_sha256", "run"}}
    text = json.dumps(held, sort_keys=True, separators=(",", ":"))
    data["content_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(data))


def without_index(change: Callable[[Path], object]) -> Callable[[Path], object]:
    def both(folder: Path) -> None:
        (folder / "index.json").unlink()
        change(folder)

    return both


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """As on a full disk: no file of this process grows beyond these bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def on_full_disk(scene: Scene) -> Ended:
    scene.breaks(lambda _: None, "PLANNED")
    with largest_file(1000):
        return scene.shard(0, output_dir="$BROKEN")


def in_read_only_folder(scene: Scene) -> Ended:
    scene.breaks(lambda folder: folder.chmod(0o555), "PLANNED")
    try:
        return scene.main("run", "$BROKEN")
    finally:
        scene.broken.chmod(0o755)


def off_cluster(*words: str) -> Callable[[Scene], Ended]:
    """Run a command where there is no Slurm, whatever this machine has."""

    def use(scene: Scene) -> Ended:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", str(scene.tmp))
            return scene.main(*words)

    return use


def with_other_input(scene: Scene, change: Callable[[Path], object]) -> str:
    raw = scene.tmp / "raw"
    shutil.copytree(scene.raw, raw)
    change(raw)
    return str(raw)


def tar_of(scene: Scene, members: Mapping[str, bytes]) -> Path:
    import tarfile

    for name, content in members.items():
        write(scene.tmp / "members" / name, content)
    with tarfile.open(scene.tmp / "others.tar", "w") as tar:
        for name in members:
            tar.add(scene.tmp / "members" / name, arcname=name)
    return scene.tmp / "others.tar"


def with_dead_link(raw: Path) -> None:
    (raw / "9.txt").symlink_to(raw / "gone.txt")


def planned_bad(scene: Scene) -> str:
    """Plan records half of which have no text, into NEW."""
    lines = '{"text": "the kettle"}\n{"text": 7}\n' * 10
    scene.plan(input_dir=write(scene.tmp / "bad" / "a.jsonl", lines).parent)
    return "$NEW"


def planned(name: str, content: bytes | str) -> Callable[[Scene], Ended]:
    """Plan a folder TMP/x of one file."""
    return lambda scene: scene.plan(input_dir=write(scene.tmp / "x" / name, content).parent)


def verified(change: Callable[[Path], object]) -> Callable[[Scene], Ended]:
    """Verify a copy of DATA that was changed."""
    return lambda scene: scene.main("verify", scene.breaks(change))


def loaded(change: Callable[[Path], object], **arguments: Any) -> Callable[[Scene], None]:
    """Load a copy of DATA that was changed."""
    return lambda scene: scene.load(scene.breaks(change), **arguments)


def run_of(change: Callable[[Path], object]) -> Callable[[Scene], Ended]:
    """Make the shards of a copy of DATA that was changed."""
    return lambda scene: scene.main("run", scene.breaks(change))


TOKENIZER = "tokenizer/tokenizer.json"


def cut_tar(scene: Scene, num_bytes: int) -> Path:
    path = tar_of(scene, {"a.token_ids.json": b"[1]"})
    cut(path, num_bytes)
    return path


PACKED = {"record": "packed", "seq_len": 8}
REMAKE = "shardprep --shard_id 1 --output_dir $BROKEN"
UNMAKE = f"rm $BROKEN/shard-00001.json && {REMAKE}"
MIX: dict[str, Any] = {"weights": {"a": 1, "b": 1}}

PLAN_ROWS = [
    row("no raw folder", lambda s: s.plan(input_dir="$TMP/nowhere"), 66, path="$TMP/nowhere"),
    row("a raw folder that is a file", lambda s: s.plan(input_dir="$RAW/0.txt"), 66, path="$RAW/0.txt"),
    row("a raw folder of too long a name", lambda s: s.plan(input_dir="$TMP/" + 300 * "x"), 66,
        path="$TMP/" + 300 * "x", expected="a folder that you can read"),
    row("an empty raw folder", planned(".a", ""),
        66, path="$TMP/x", expected=".txt .jsonl .parquet"),
    row("a raw folder of other files", planned("a.md", "the"),
        66, path="$TMP/x", expected=".txt .jsonl"),
    row("a model that is not there", lambda s: s.plan(model_id="$TMP/nowhere"), 66, path="$TMP/nowhere",
        expected="tokenizer.json"),
    row("a model by its file", lambda s: s.plan(model_id="$MODEL/tokenizer.json"), 66,
        path="$MODEL/tokenizer.json", expected="folder of tokenizer.json", remedy="$MODEL"),
    row("a data set among its inputs", lambda s: s.plan(output_dir="$RAW/made", recursive=True), 2,
        path="$RAW/made", expected="a folder outside of the raw text"),
    row("a data set in a file", lambda s: s.plan(output_dir="$RAW/0.txt"), 73, path="$RAW/0.txt",
        expected="a folder that you can write to"),
    row("a data set below a file", lambda s: s.plan(output_dir="$RAW/0.txt/new"), 73, path="$RAW/0.txt/new",
        expected="a folder that you can write to"),
    row("a flag that is nearly one", lambda s: s.plan(num_shard=3), 2, found="--num_shard",
        remedy="--num_shards", is_text_alone=True),
    row("a flag of other tools", lambda s: s.plan(packing=True), 2, found="--packing",
        remedy="--record packed --seq_len 8192", is_text_alone=True),
    row("a record of another name", lambda s: s.plan(record="pack"), 2, found="'pack'",
        expected="documents packed chat", is_text_alone=True),
    row("a fraction that is no number", lambda s: s.plan(validation_fraction="x"), 2,
        found="--validation_fraction 'x'", is_text_alone=True),
    row("two ways to divide", lambda s: s.plan(num_shards=2, shard_bytes="1M"), 2,
        found="--shard_bytes --num_shards", is_text_alone=True),
    row("rows of no token", lambda s: s.plan(record="packed", seq_len=0), 2, found="--seq_len 0",
        expected="1 to"),
    row("a row length for documents", lambda s: s.plan(seq_len=8), 2, found="--seq_len",
        remedy="--record packed", heals=True),
    row("text beside rows", lambda s: s.plan(**PACKED, keep_text=True), 2, found="--keep_text",
        remedy="--record documents"),
    row("a field and a template", lambda s: s.plan(text_field="a", text_template="{b}"), 2,
        found="--text_field and --text_template", expected="one"),
    row("a template that is not closed", lambda s: s.plan(text_template="{a"), 2,
        found="--text_template '{a'", expected=r"'{input}\n\n{output}'"),
    row("a template without a field", lambda s: s.plan(text_template="abc"), 2,
        found="--text_template 'abc'", expected=r"'{input}\n\n{output}'"),
    row("more validation than training", lambda s: s.plan(validation_fraction=2), 2,
        found="--validation_fraction 2.0", expected="1e-06 to 0.5"),
    row("more bad documents than there are", lambda s: s.plan(max_bad_fraction=2), 2,
        found="--max_bad_fraction 2.0", expected="0 to 1"),
    row("fewer documents than none", lambda s: s.plan(limit=-1), 2, found="--limit -1", expected="1 to"),
    row("no shard at all", lambda s: s.plan(num_shards=0), 2, found="--num_shards 0", expected="at least 1"),
    row("more shards than names", lambda s: s.plan(num_shards=100_000), 2, found="100000 shards",
        expected="at most 99999", remedy="--num_shards 99999"),
    row("a size in no unit", lambda s: s.plan(shard_bytes="12x"), 2, found="--shard_bytes 12x",
        expected="512M or 2G"),
    row("an unknown encoding", lambda s: s.plan(encoding="nope"), 2, found="--encoding nope",
        expected="utf-8 cp949"),
    row("an encoding without line ends", lambda s: s.plan(encoding="utf-7"), 2, found="--encoding utf-7",
        remedy="iconv -f utf-7 -t utf-8"),
    row("links without subfolders", lambda s: s.plan(follow_links=True), 2, found="--follow_links",
        remedy="--recursive", heals=True),
    row("a trial of all bytes", lambda s: s.plan(limit=3, hash_inputs=True), 2,
        found="--limit --hash_inputs"),
    row("no EOS to put", lambda s: s.plan(**PACKED, model_id="$NO_EOS"), 2, path="$NO_EOS",
        expected="eos_token", remedy="--no-append_eos", heals=True),
    row("conversations in plain text", lambda s: s.plan(record="chat"), 2, path="$RAW/0.txt", found="text",
        expected="JSON lines and tables"),
    row("no chat template", lambda s: s.plan(record="chat", input_dir="$TALKS"), 2,
        expected="chat template", remedy="--chat_template_file", starts_process=True),
    row("a chat template that is not there",
        lambda s: s.plan(record="chat", input_dir="$TALKS", chat_template_file="$TMP/no.jinja"), 2,
        path="$TMP/no.jinja", expected="the file of a Jinja template", starts_process=True),
    row("EOS behind conversations", lambda s: s.plan(record="chat", append_eos=True), 2,
        found="--append_eos"),
    row("an engine that knows no places", lambda s: s.plan(record="chat", engine="gigatoken"), 2,
        found="--engine gigatoken", remedy="--engine tokenizers"),
    row("another field of the text", lambda s: s.plan(input_dir="$RECORDS"), 65, path="$RECORDS",
        found="body", expected="'text'", remedy="--text_field body", heals=True),
    row("another plan in the folder", lambda s: s.plan(output_dir="$DATA", num_shards=2), 78, path="$DATA",
        remedy="--output_dir NEW", heals=True),
    row("a link to nothing", lambda s: s.plan(input_dir=with_other_input(s, with_dead_link)), 66,
        path="$TMP/raw/9.txt"),
    row("a gzip file that is cut",
        planned("a.txt.gz", gzip.compress(b"the\n" * 999)[:-9]),
        65, path="$TMP/x/a.txt.gz", expected="a whole file"),
    row("a gzip file that is none",
        planned("a.txt.gz", "the kettle\n"), 65,
        path="$TMP/x/a.txt.gz", found="b'the", expected=r"b'\x1f\x8b'"),
    row("a Parquet file that is none",
        planned("a.parquet", "the kettle\n" * 9), 65,
        path="$TMP/x/a.parquet", expected="a whole file"),
    row("one list of JSON", planned("a.json", '[{"text": "a"}]'),
        65, path="$TMP/x/a.json", found="one list of JSON", expected="an object in each line",
        remedy="jq -c '.[]' $TMP/x/a.json > $TMP/x/a.jsonl"),
    row("a layout that is none", lambda s: s.plan(stripe="x"), 2, found="--stripe x",
        expected="N[,SIZE][,POOL]"),
]  # fmt: skip

SHARD_ROWS = [
    row("a shard past the end", lambda s: s.shard(9), 66, found="shard 9", expected="0 to 2",
        remedy="--array=0-2"),
    row("a shard before the first", lambda s: s.shard(-1), 66, found="shard -1", expected="0 to 2",
        remedy="--array=0-2"),
    row("a task whose plan is gone", lambda s: s.shard(0, output_dir="$NEW", planned=True), 66, path="$NEW",
        expected="plan.json",
        remedy="shardprep plan --input_dir RAW --output_dir $NEW --model_id MODEL --num_shards N"),
    row("the first script's form without text",
        lambda s: s.shard(0, output_dir="$NEW", input_dir="$TMP/nowhere"), 66, path="$TMP/nowhere"),
    row("the first script's form, a shard too many",
        lambda s: s.shard(2, output_dir="$NEW", input_dir="$RAW", model_id="$MODEL"), 66, found="shard 2",
        expected="0 to 1", remedy="--array=0-1"),
    row("another option than planned", lambda s: s.shard(0, append_eos=True), 78, path="$PLANNED",
        found="--append_eos True", remedy="--output_dir"),
    row("another tokenizer than planned", lambda s: s.shard(0, model_id="$NO_EOS"), 78, path="$PLANNED",
        found="--model_id $NO_EOS", remedy="--output_dir"),
    row("an input that changed",
        lambda s: s.shard(0, input_dir=with_other_input(s, lambda raw: flip(raw / "0.txt", 0))), 78,
        path="$TMP/raw/0.txt", found="bytes with sample"),
    row("an input that is gone",
        lambda s: s.shard(0, input_dir=with_other_input(s, lambda raw: (raw / "0.txt").unlink())), 66,
        path="$TMP/raw/0.txt", remedy="--input_dir"),
    row("an input that was added",
        lambda s: s.shard(0, check_inputs=True,
                          input_dir=with_other_input(s, lambda raw: write(raw / "9.txt", "the\n"))),
        78, path="$TMP/raw", found="9.txt", expected="2 planned input files", remedy="--output_dir"),
    row("a tokenizer that is gone",
        lambda s: s.shard(0, output_dir=s.breaks(lambda x: (x / TOKENIZER).unlink(), "PLANNED")),
        66, path="$BROKEN/tokenizer/tokenizer.json"),
    row("a tokenizer that changed",
        lambda s: s.shard(0, output_dir=s.breaks(lambda x: flip(x / TOKENIZER, 99), "PLANNED")),
        78, path="$BROKEN/tokenizer/tokenizer.json"),
    row("too many bad documents", lambda s: s.shard(0, output_dir=planned_bad(s)), 65,
        path="$NEW/quarantine/shard-00000.jsonl", found="50.00%", expected="1.00%",
        remedy="--max_bad_fraction 0.51"),
    row("no memory", lambda s: s.shard(0, memory_gb=0), 2, found="--memory_gb 0",
        expected="more than 0"),
    row("a full disk", on_full_disk, 74, path="$BROKEN/shard-00000.tar"),
    row("a plan of a newer version", run_of(lambda x: set_version(x / "plan.json", 9)),
        78, path="$BROKEN/plan.json", found="9"),
    row("a plan of an older version", run_of(lambda x: set_version(x / "plan.json", 1)),
        78, path="$BROKEN/plan.json", found="1",
        remedy="shardprep plan --input_dir RAW --output_dir NEW --model_id MODEL --num_shards N"),
    row("a plan that is cut", run_of(lambda x: cut(x / "plan.json", 100)), 65,
        path="$BROKEN/plan.json", expected="JSON"),
    row("a plan that was edited",
        run_of(lambda x: (x / "plan.json").write_text(
            (x / "plan.json").read_text().replace('"line"', '"file"'))), 65, path="$BROKEN/plan.json"),
    row("raw text in the place of a data set", lambda s: s.main("run", "$RAW"), 66, path="$RAW",
        expected="plan.json",
        remedy="shardprep plan --input_dir $RAW --output_dir ${RAW}_shards --model_id MODEL --num_shards N"),
    row("a file in the place of a data set", lambda s: s.main("run", "$RAW/0.txt"), 66, path="$RAW/0.txt",
        expected="the folder of a data set"),
    row("shards past the end", lambda s: s.main("run", "$PLANNED", shards="5-9"), 2, found="--shards 5-9",
        expected="ids of 0 to 2"),
    row("a folder that may not be written to", in_read_only_folder, 73, path="$BROKEN", needs_user=True),
    row("no process", lambda s: s.main("run", "$PLANNED", num_proc=0), 2, found="--num_proc 0",
        expected="1 or more"),
]  # fmt: skip

CHECK_ROWS = [
    row("nothing made yet", lambda s: s.main("verify", s.breaks(lambda _: None, "PLANNED"), fast=True), 66,
        path="$BROKEN/shard-00000.json", remedy="shardprep --shard_id 0 --output_dir $BROKEN"),
    row("a tar is missing", verified(lambda x: (x / "shard-00001.tar").unlink()), 66,
        path="$BROKEN/shard-00001.tar", remedy=REMAKE, heals=True),
    row("an idx is missing", verified(lambda x: (x / "shard-00001.idx").unlink()), 66,
        path="$BROKEN/shard-00001.idx", remedy=REMAKE, heals=True),
    row("a manifest is missing", verified(lambda x: (x / "shard-00001.json").unlink()),
        66, path="$BROKEN/shard-00001.json", remedy=REMAKE, heals=True),
    row("a tar is cut", verified(lambda x: cut(x / "shard-00001.tar", 5120)), 65,
        path="$BROKEN/shard-00001.tar", found="5120", remedy=REMAKE,
        heals=True),
    row("a bit of a tar flipped", verified(lambda x: flip(x / "shard-00001.tar", 3000)),
        65, path="$BROKEN/shard-00001.tar",
        remedy=UNMAKE, heals=True),
    row("a bit of a manifest flipped",
        verified(lambda x: flip(x / "shard-00001.json", 300)), 65,
        path="$BROKEN/shard-00001.json", remedy=REMAKE, heals=True),
    row("a manifest of another shard",
        verified(lambda x: copy_shard(x, 0, x, 1)), 78,
        path="$BROKEN/shard-00001.json", found="shard 0", expected="shard 1",
        remedy=UNMAKE, heals=True),
    row("a manifest of another plan",
        lambda s: s.main("verify", s.breaks(lambda x: copy_shard(s["OTHER"], 1, x, 1))), 78,
        path="$BROKEN/shard-00001.json",
        remedy=UNMAKE, heals=True),
    row("a manifest that is another file",
        verified(lambda x: shutil.copy(x / "plan.json", x / "shard-00001.json")), 65,
        path="$BROKEN/shard-00001.json", found="shardprep-plan", expected="shardprep-manifest",
        remedy=REMAKE, heals=True),
    row("a manifest of an impossible number",
        verified(lambda x: reseal(x / "shard-00001.json", '"shard_id": 1', '"shard_id": -1')), 65,
        path="$BROKEN/shard-00001.json", found="-1", expected="a whole number", remedy=REMAKE, heals=True),
    row("a manifest of a newer version",
        verified(lambda x: set_version(x / "shard-00001.json", 9)), 78,
        path="$BROKEN/shard-00001.json", found="9"),
    row("no shard to compare", lambda s: s.main("verify", "$PLANNED", deep=0), 2, found="--deep 0",
        expected="a number of shards from 1"),
    row("two depths of a check", lambda s: s.main("verify", "$DATA", fast=True, deep=True), 2,
        found="--deep --fast", is_text_alone=True),
    row("no folder to clean", lambda s: s.main("clean", "$TMP/nowhere"), 66, path="$TMP/nowhere",
        expected="a data set"),
    row("another folder to clean", lambda s: s.main("clean", "$TMP"), 66, path="$TMP",
        expected="the folder of a data set"),
    row("a file to clean", lambda s: s.main("clean", "$RAW/0.txt"), 66, path="$RAW/0.txt",
        expected="the folder of a data set"),
    row("nothing to look at", lambda s: s.main("peek", "$PLANNED"), 66, path="$PLANNED",
        remedy="shardprep run $PLANNED"),
    row("a sample past the end", lambda s: s.main("peek", "$DATA", "0:999"), 66, found="0:999",
        expected="samples 0 to"),
    row("a shard to look at that is not made", lambda s: s.main("peek", "$PLANNED", "1:0"), 66,
        path="$PLANNED/shard-00001.json", remedy="shardprep run $PLANNED"),
    row("a shard to look at past the end", lambda s: s.main("peek", "$DATA", "9:0"), 2, found="9",
        expected="ids of 0 to 2"),
    row("a sample to look at without its idx",
        lambda s: s.main("peek", s.breaks(lambda x: (x / "shard-00001.idx").unlink()), "1:0"), 66,
        path="$BROKEN/shard-00001.idx", remedy=REMAKE, heals=True),
    row("an address that is none", lambda s: s.main("peek", "$DATA", "zzz"), 2, found="zzz",
        expected="SHARD:SAMPLE FILE:BYTE"),
    row("an address in a file of no plan", lambda s: s.main("peek", "$DATA", "no.txt:3"), 66, found="no.txt",
        expected="0.txt"),
    row("an address past the end of a file", lambda s: s.main("peek", "$DATA", "0.txt:99999"), 66,
        path="0.txt", found="99999", expected="0 to"),
    row("an id where none is kept", lambda s: s.main("peek", "$DATA", "id:7"), 2, path="$DATA",
        expected="SHARD:SAMPLE or FILE:BYTE"),
    row("a pattern that is none", lambda s: s.main("peek", "$DATA", grep="("), 2, found="--grep '('",
        expected="regular expression"),
    row("no sample to print", lambda s: s.main("peek", "$DATA", num=0), 2, found="--num 0",
        expected="from 1"),
    row("an export of what is not made",
        lambda s: s.main("export", "$PLANNED", to="nanogpt", output_dir="$NEW"), 66,
        path="$PLANNED/shard-00000.json", remedy="shardprep --shard_id 0 --output_dir $PLANNED"),
    row("an export of a side that is not there",
        lambda s: s.main("export", "$DATA", to="nanogpt", output_dir="$NEW", split="train"), 2, path="$DATA",
        found="--split", remedy="--validation_fraction"),
    row("an export among other files",
        lambda s: s.main("export", "$DATA", to="nanogpt", output_dir=write(s.tmp / "x" / "mine", "").parent),
        78, path="$TMP/x", found="mine", expected="a fresh folder"),
    row("an export to a path with a blank",
        lambda s: s.main("export", "$DATA", to="megatron", output_dir="$TMP/a b"), 2, path="$TMP/a b",
        found="white space", expected="a folder without it"),
    row("no Slurm here", off_cluster("submit", "$PLANNED"), 66, path="scontrol",
        remedy="shardprep run $PLANNED"),
    row("a retry of nothing", off_cluster("retry", "$PLANNED"), 66, path="$PLANNED",
        remedy="shardprep submit $PLANNED"),
    row("the status of nothing", lambda s: s.main("status", "$NEW"), 66, path="$NEW", expected="plan.json",
        remedy="shardprep plan --input_dir RAW --output_dir $NEW --model_id MODEL --num_shards N"),
    row("tasks without memory", lambda s: s.main("submit", "$PLANNED", mem_gb=0), 2, found="--mem_gb 0.0",
        expected="more than 0"),
    row("two kinds of memory", lambda s: s.main("submit", "$PLANNED", mem_gb=2, mem_per_cpu_gb=2), 2,
        found="--mem_gb and --mem_per_cpu_gb", expected="one of them"),
    row("an array of one's own", lambda s: s.main("submit", "$PLANNED", "--sbatch_args", "--array=1-2"), 2,
        found="--sbatch_args --array=1-2"),
    row("shards past the end to submit", lambda s: s.main("submit", "$PLANNED", shards="9"), 2,
        found="--shards 9", expected="ids of 0 to 2"),
    row("a set-up that is not there", lambda s: s.main("submit", "$PLANNED", setup="$TMP/no.sh"), 2,
        path="$TMP/no.sh"),
    row("the log of a shard past the end", lambda s: s.main("logs", "$PLANNED", 9), 66, found="shard 9",
        expected="0 to 2"),
    row("a layout of a folder that is not there", lambda s: s.main("lustre", "show", "$TMP/nowhere"), 66,
        path="$TMP/nowhere", remedy="shardprep lustre show $TMP"),
    row("a layout of no stripe", lambda s: s.main("lustre", "apply", "$TMP", stripe=0), 2, found="--stripe 0",
        expected="N[,SIZE][,POOL]"),
    row("a command that is nearly one", lambda s: s.main("plann"), 2, found="'plann'", remedy="plan",
        is_text_alone=True),
]  # fmt: skip

LOAD_ROWS = [
    row("no data set", lambda s: s.load(s.tmp / "nowhere"), NotFound, path="$TMP/nowhere",
        expected="a folder, an index.json, tars"),
    row("raw text to load", lambda s: s.load(s.raw), NotFound, path="$RAW",
        remedy="shardprep plan --input_dir $RAW --output_dir DATA --model_id MODEL"),
    row("shards to load that are not made", lambda s: s.load(s["PLANNED"]), NotFound, path="$PLANNED",
        remedy="shardprep run $PLANNED"),
    row("a file to load that is no tar", lambda s: s.load(s.raw / "0.txt"), UsageError, path="$RAW/0.txt",
        expected="a tar, a folder or an index.json"),
    row("nothing to load", lambda s: s.load([]), UsageError, expected="a folder, an index.json, tars"),
    row("a number to load", lambda s: s.load(5), UsageError, found="input_shards=5", expected="a folder"),
    row("a data set to load twice", lambda s: s.load([s["DATA"], s["DATA"]]), UsageError, path="$DATA",
        expected="once"),
    row("a pattern that fits nothing", lambda s: s.load(f"{s['DATA']}/x-*.tar"), NotFound,
        path="$DATA/x-*.tar"),
    row("a range past the end", lambda s: s.load(f"{s['DATA']}/shard-{{00000..00009}}.tar"), NotFound,
        path="$DATA/shard-00003.tar"),
    row("braces without a range", lambda s: s.load(f"{s['DATA']}/shard-{{0}}.tar"), UsageError,
        path="$DATA/shard-{0}.tar", found="{0}",
        expected="{00000..00009} or {a,b}"),
    row("a URL without a place for copies", lambda s: s.load("http://127.0.0.1:9/x.tar"), UsageError,
        path="http://127.0.0.1:9/x.tar", remedy="cache_dir="),
    row("a manifest is missing to load",
        loaded(without_index(lambda x: (x / "shard-00001.json").unlink())), MissingShard,
        path="$BROKEN", found="2 of 3 shards", remedy="shardprep run $BROKEN"),
    row("a tar is missing to read",
        loaded(lambda x: (x / "shard-00001.tar").unlink(), reads=True), MissingShard,
        path="$BROKEN/shard-00001.tar", remedy=REMAKE, heals=True),
    row("a tar is cut to read",
        loaded(lambda x: cut(x / "shard-00001.tar", 5120), reads=True), BrokenShard,
        path="$BROKEN/shard-00001.tar", found="5120", remedy=REMAKE, heals=True),
    row("a shard by its name that the index has not",
        lambda s: s.load(s.breaks(lambda x: copy_shard(x, 1, x, 7)) / "shard-00007.tar"), NotFound,
        path="$BROKEN/shard-00007.tar", expected="3 shards"),
    row("an idx that is damaged",
        loaded(lambda x: flip(x / "shard-00001.idx", 100), reads=True), BrokenShard,
        path="$BROKEN/shard-00001.idx", heals=True,
        remedy=UNMAKE),
    row("an idx of another version",
        loaded(lambda x: flip(x / "shard-00001.idx", 11), reads=True), UnknownVersion,
        path="$BROKEN/shard-00001.idx"),
    row("an idx that is none",
        loaded(lambda x: write(x / "shard-00001.idx", "x" * 999), reads=True), BrokenShard,
        path="$BROKEN/shard-00001.idx", found="b'xxxxxxxx'", heals=True,
        remedy=UNMAKE),
    row("ids that are none", loaded(spoil_ids, reads=True), BrokenShard,
        path="$BROKEN/shard-00001.tar"),
    row("an index of a newer version", loaded(lambda x: set_version(x / "index.json", 9)),
        UnknownVersion, path="$BROKEN/index.json", found="9"),
    row("an index that is cut", loaded(lambda x: cut(x / "index.json", 100)), BrokenShard,
        path="$BROKEN/index.json", expected="JSON", remedy="shardprep verify $BROKEN", heals=True),
    row("a manifest of a newer version to load",
        loaded(without_index(lambda x: set_version(x / "shard-00001.json", 9))),
        UnknownVersion, path="$BROKEN/shard-00001.json", found="9"),
    row("a shard of another data set",
        lambda s: s.load(s.breaks(without_index(lambda x: copy_shard(s["OTHER"], 1, x, 1)))), OtherPlan,
        path="$BROKEN/shard-00001.json", heals=True,
        remedy=UNMAKE),
    row("a shard too many",
        loaded(without_index(lambda x: copy_shard(x, 1, x, 7))), OtherPlan,
        path="$BROKEN/shard-00007.json", expected="0 to 2"),
    row("no tokenizer in the data set", loaded(lambda x: shutil.rmtree(x / "tokenizer")),
        NotFound, path="$BROKEN/tokenizer", remedy="model_id='$MODEL'", heals=True),
    row("another tokenizer than the data set's", lambda s: s.load(s["DATA"], model_id=s["NO_EOS"]),
        OtherTokenizer, path="$DATA", found="model_id='$NO_EOS'"),
    row("data sets of two tokenizers", lambda s: s.load([s["DATA"], s["OTHER"]]), OtherTokenizer,
        path="$OTHER"),
    row("a tokenizer that is not there", lambda s: s.load(tar_of(s, {"a.token_ids.json": b"[1]"}),
        model_id=s.tmp / "nowhere"), NotFound, path="$TMP/nowhere", expected="tokenizer.json"),
    row("a tar of others without a tokenizer", lambda s: s.load(tar_of(s, {"a.token_ids.json": b"[1]"})),
        UsageError, remedy="model_id="),
    row("a tar of others without ids", lambda s: s.load(tar_of(s, {"a.json": b"[1]"}), model_id=s["MODEL"]),
        BrokenShard, path="$TMP/others.tar", found="json", expected="token_ids.json or token_ids.npy"),
    row("a tar of others that is cut", lambda s: s.load(cut_tar(s, 2048), model_id=s["MODEL"]), BrokenShard,
        path="$TMP/others.tar", found="2048", expected="two zero blocks"),
    row("a tar of others that is none", lambda s: s.load(write(s.tmp / "others.tar", "x" * 10240)),
        BrokenShard, path="$TMP/others.tar"),
    row("an id that no tokenizer has",
        lambda s: s.load(tar_of(s, {"a.token_ids.json": b"[9999999]"}), model_id=s["MODEL"], batch_size=1,
                         reads=True), BrokenShard, path="$TMP/others.tar"),
    row("a batch of less than nothing", lambda s: s.load(s["DATA"], batch_size=-1), UsageError,
        found="batch_size=-1", expected="at least 1"),
    row("a part of a sample", lambda s: s.load(s["DATA"], batch_size=2.5), UsageError, found="batch_size=2.5",
        expected="a whole number"),
    row("a step that is no multiple", lambda s: s.load(s["DATA"], global_batch_size=6), UsageError,
        found="global_batch_size=6", expected="multiple of batch_size 4 x 1 ranks"),
    row("a step of more samples than anybody counts",
        lambda s: s.load(s["DATA"], global_batch_size=(1 << 60) + 1), UsageError,
        found=f"global_batch_size={(1 << 60) + 1}", expected="multiple of batch_size 4"),
    row("a step that the ranks cannot share",
        lambda s: s.load(s["DATA"], global_batch_size=16, rank=0, world_size=3), UsageError,
        found="global_batch_size=16", expected="4 x 3 ranks"),
    row("more ranks than samples", lambda s: s.load(s["DATA"], rank=0, world_size=99), UsageError,
        found="120 samples", expected="396"),
    row("a rank past the last", lambda s: s.load(s["DATA"], rank=3, world_size=3), UsageError,
        found="rank 3 of 3", expected="0 <= rank < world_size"),
    row("a rank alone", lambda s: s.load(s["DATA"], rank=1), UsageError, found="rank=1", expected="both"),
    row("rows of another length than packed", lambda s: s.load(s["PACKED"], seq_len=16), UsageError,
        found="seq_len=16", expected="packed rows of 8 tokens", remedy="--seq_len"),
    row("rows longer than all text", lambda s: s.load(s["DATA"], seq_len=100_000), UsageError,
        found="seq_len=100000"),
    row("packed and padded at once", lambda s: s.load(s["DATA"], seq_len=8, max_length=4), UsageError,
        found="seq_len=8"),
    row("packed rows that are cut", lambda s: s.load(s["PACKED"], max_length=4), UsageError,
        found="max_length=4", expected="packed rows of 8 tokens", remedy="--seq_len"),
    row("packed rows by their length", lambda s: s.load(s["PACKED"], group_by_length=True), UsageError,
        found="group_by_length", expected="packed rows of 8 tokens", remedy="--seq_len"),
    row("groups that do not divide", lambda s: s.load(s["DATA"], group_by_length=3), UsageError,
        found="3", expected="the global batch of 4"),
    row("boundaries of no kind", lambda s: s.load(s["DATA"], boundaries="flash"), UsageError,
        found="boundaries=['flash']", expected="position_ids segment_ids cu_seqlens"),
    row("boundaries of rows and documents",
        lambda s: s.load([s["PACKED"], s["DATA"]], boundaries="segment_ids"), UsageError,
        expected="rows of one length"),
    row("targets of no kind", lambda s: s.load(s["DATA"], targets="next"), UsageError, found="targets='next'",
        expected="'same' or 'shifted'"),
    row("targets that are shifted twice",
        lambda s: s.load(s["DATA"], seq_len=8, targets="shifted", boundaries="transformers"), UsageError,
        found="targets='shifted'", expected="other boundaries than 'transformers'"),
    row("padding of no kind", lambda s: s.load(s["DATA"], padding="left"), UsageError, found="padding='left'",
        expected="'longest' or 'max_length'"),
    row("a width that nobody says", lambda s: s.load(s["DATA"], padding="max_length"), UsageError,
        found="padding='max_length'", expected="max_length"),
    row("a side of no name", lambda s: s.load(s["DATA"], split="test"), UsageError, found="split='test'",
        expected="'train' or 'validation'"),
    row("a side of a set without sides", lambda s: s.load(s["DATA"], split="train"), UsageError, path="$DATA",
        found='split="train"', remedy="--validation_fraction"),
    row("a seed of letters", lambda s: s.load(s["DATA"], seed="x"), UsageError, found="seed='x'",
        expected="a whole number"),
    row("an argument that is nearly one", lambda s: s.load(s["DATA"], bacth_size=4), TypeError,
        found="'bacth_size'", remedy="'batch_size'"),
    row("sizes by step from no step", lambda s: s.load(s["DATA"], global_batch_size=[(1, 8)]), UsageError,
        found="global_batch_size [1]", expected="whole numbers that ascend from 0"),
    row("workers' reads without workers", lambda s: s.load(s["DATA"], prefetch_factor=2), UsageError,
        found="prefetch_factor=2", remedy="num_workers"),
    row("weights of one set", lambda s: s.load(s["DATA"], weights={"a": 1}), UsageError, found="weights",
        remedy='input_shards={"web": ..., "code": ...}'),
    row("sources without weights", lambda s: s.load(s.mix()), UsageError, expected="weights="),
    row("a weight below nothing", lambda s: s.load(s.mix(), weights={"a": -1, "b": 2}), UsageError,
        found="'a': -1", expected="non-negative numbers for a, b"),
    row("a weight of no source", lambda s: s.load(s.mix(), weights={"a": 1, "c": 1}), UsageError,
        found="'c': 1", expected="numbers for a, b"),
    row("a weight too small", lambda s: s.load(s.mix(), weights={"a": 1, "b": 1e-9}), UsageError,
        found="b", expected="one of 65536 samples"),
    row("weights in another unit", lambda s: s.load(s.mix(), **MIX, weights_in="bytes"), UsageError,
        found="weights_in='bytes'", expected="'tokens' or 'samples'"),
    row("weights from no step", lambda s: s.load(s.mix(), weights=[(5, {"a": 1})]), UsageError,
        found="weights [5]", expected="whole numbers that ascend from 0"),
    row("a mixture of nothing", lambda s: s.load({}, weights={}), UsageError, found="[]",
        expected="names with shards for each"),
    row("sources of documents and rows", lambda s: s.load({"a": s["DATA"], "b": s["PACKED"]}, **MIX),
        UsageError, found="a 0, b 8", expected="one length"),
    row("one set in two sources", lambda s: s.load({"a": s["DATA"], "b": s["DATA"]}, **MIX), UsageError,
        path="$DATA", expected="once"),
    row("a mixture to validate with", lambda s: s.load(s.mix(), **MIX, split="validation"), UsageError,
        found='split="validation"', expected="one loader for each source"),
    row("no state", lambda s: s.resume({"format": None}), BrokenShard, found="None",
        expected="shardprep-loader-state", remedy="state_dict()"),
    row("a state by its file", lambda s: s.load_state("x.pt"), UsageError, found="'x.pt'",
        remedy="loader.load_state_dict(torch.load(PATH))"),
    row("a state without a fingerprint", lambda s: s.resume({"fingerprint": None}), BrokenShard,
        found="fingerprint None", expected="an object"),
    row("a state of a newer order", lambda s: s.resume({"order_version": 99}), UnknownVersion, found="99"),
    row("a state of another data set", lambda s: s.resume({}, "OTHER"), OtherRun, found="data tokenizer"),
    row("a state of another seed", lambda s: s.resume({}, seed=5), OtherRun, found="seed 0",
        expected="seed 5"),
    row("a state of other global batches", lambda s: s.resume({}, global_batch_size=8), OtherRun,
        found="global_batch_size", remedy="amend=True", heals=True),
    row("a state of a smaller step", lambda s: s.resume({}, batch_size=8), OtherRun,
        found="global_batch_size=4", expected="multiple of batch_size 8"),
    row("a state past the end", lambda s: s.resume({"step": 10**9}), BrokenShard, found="1000000000",
        expected="a step below 30"),
    row("a state of letters", lambda s: s.resume({"step": "x"}), BrokenShard, found="step 'x'",
        expected="a whole number"),
]  # fmt: skip

ROWS = [*PLAN_ROWS, *SHARD_ROWS, *CHECK_ROWS, *LOAD_ROWS]


def params_of(rows: Iterable[Refusal]) -> list[Any]:
    """Return the rows as pytest's parameters, named by their wrong use."""
    params = []
    for each in rows:
        marks = [pytest.mark.processes] if each.starts_process else []
        if each.needs_user:
            marks.append(pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere"))
        params.append(pytest.param(each, id=each.what, marks=marks))
    return params


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole data sets of one text, made once and only read."""
    root = tmp_path_factory.mktemp("refusals")
    World(root).raw({"0.txt": "\n".join(LINES[:70]) + "\n", "1.txt": "\n".join(LINES[70:]) + "\n"})
    shutil.copytree(tokenizer_dir(), root / "model")
    save_tokenizer(root / "no_eos")
    config = json.loads((root / "no_eos" / "tokenizer_config.json").read_text())
    del config["eos_token"]
    write(root / "no_eos" / "tokenizer_config.json", json.dumps(config))
    tokens = json.loads((root / "no_eos" / "tokenizer.json").read_text())
    tokens["model"]["merges"] = tokens["model"]["merges"][:5]
    write(root / "no_eos" / "tokenizer.json", json.dumps(tokens))
    write(root / "records" / "a.jsonl", "".join(json.dumps(record) + "\n" for record in RECORDS))
    write(root / "talks" / "a.jsonl", json.dumps({"messages": TALK}) + "\n")
    for name, options in (
        ("data", {}),
        ("packed", PACKED),
        ("other", {"model_id": root / "no_eos"}),
        ("mixed", {"append_eos": True}),
    ):
        World(root, tokenizer=root / "model", data_dir=root / name).make(num_shards=NUM_SHARDS, **options)
    World(root, tokenizer=root / "model", data_dir=root / "planned").plan(num_shards=NUM_SHARDS)
    return root


@pytest.fixture
def scene(shared: Path, tmp_path: Path) -> Scene:
    return Scene(shared, tmp_path)


def ending(scene: Scene, refusal: Refusal) -> tuple[ShardprepError | None, str]:
    """Use it wrongly; returns the error, and what a person reads."""
    if not isinstance(refusal.ends, int):
        with pytest.raises(refusal.ends) as raised:
            refusal.use(scene)
        assert type(raised.value) is refusal.ends
        return (raised.value if isinstance(raised.value, ShardprepError) else None), str(raised.value)
    ended = refusal.use(scene)
    assert ended.code == refusal.ends, ended.text
    assert "Traceback" not in ended.text
    return ended.error, ended.err


def words(text: str) -> list[str]:
    """``batch_size=-1, of x`` -> batch_size, -1, of, x."""
    return [word for word in re.split(r"[\s=,;:]+", text) if word]


def has_words(text: str, wanted: str) -> bool:
    return all(re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", text) for word in words(wanted))


@pytest.mark.parametrize("refusal", params_of(ROWS))
def test_a_refusal_names_the_thing_at_fault_and_what_to_type(scene: Scene, refusal: Refusal) -> None:
    error, text = ending(scene, refusal)
    facts = {name: getattr(refusal, name) for name in ("path", "found", "expected", "remedy")}
    facts = {name: None if value is None else scene.filled(value) for name, value in facts.items()}
    assert any(facts.values())
    if error is not None:
        assert not refusal.is_text_alone
        assert (error.path, error.remedy) == (facts["path"], facts["remedy"]), text
        assert has_words(error.found or "", facts["found"] or ""), error.found
        assert has_words(error.expected or "", facts["expected"] or ""), error.expected
        assert error.remedy is None or error.remedy in text
        facts |= {"found": error.found, "expected": error.expected}
    else:
        assert refusal.is_text_alone or refusal.ends is TypeError, text
    for fact in facts.values():
        assert has_words(text, fact or ""), f"{fact} is not told: {text}"


@pytest.mark.parametrize("refusal", params_of(each for each in ROWS if each.heals))
def test_what_is_to_be_typed_helps(scene: Scene, refusal: Refusal) -> None:
    error, _ = ending(scene, refusal)
    assert error is not None
    assert error.remedy is not None
    remedy = scene.filled(re.sub(r"\bNEW\b", "$NEW", error.remedy))
    if not remedy.startswith(("rm ", "shardprep ")):
        assert scene.repeat(remedy).code == 0
        return
    for command in remedy.split(" && "):
        program, *arguments = shlex.split(command)
        if program == "rm":
            Path(*arguments).unlink()
        else:
            assert call_main(*arguments).code == 0
    ended = refusal.use(scene)
    assert ended is None or ended.code == 0, ended


@pytest.mark.parametrize(
    "refusal", params_of(each for each in ROWS if (each.remedy or "").startswith("shardprep "))
)
def test_a_command_that_is_to_be_typed_is_one(scene: Scene, refusal: Refusal) -> None:
    """Its flags are known, and what stands for a value of the user's is left to be filled in."""
    error, _ = ending(scene, refusal)
    assert error is not None
    assert error.remedy is not None
    program, command, *rest = shlex.split(re.sub(r"\bN\b", "2", error.remedy))
    assert program == "shardprep"
    assert call_main(command, *rest, "--help").code == 0


@pytest.mark.parametrize("kind", [ShardprepError, UsageError, BrokenShard, OtherTokenizer, OtherRun])
def test_what_an_error_says_goes_into_other_processes(kind: type[ShardprepError]) -> None:
    error = kind("it is cut", path=Path("DATA"), found=3, expected=4, remedy="shardprep verify DATA")
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is kind
    assert (copied.path, copied.found, copied.expected, copied.remedy) == (
        "DATA", "3", "4", "shardprep verify DATA",
    )  # fmt: skip
    assert str(copied) == str(error)


def test_a_command_to_type_stands_once_in_what_is_read() -> None:
    remedy = "shardprep verify DATA"
    for message in ("it is cut", f"it is cut, so type {remedy}"):
        assert str(ShardprepError(message, remedy=remedy)).count(remedy) == 1


@pytest.mark.processes
def test_an_error_in_a_worker_of_the_loader_says_what_it_says_without_workers(scene: Scene) -> None:
    broken = scene.breaks(spoil_ids)
    told = []
    for num_workers in (0, 2):
        with pytest.raises(BrokenShard) as raised:
            scene.load(broken, reads=True, num_workers=num_workers)
        assert raised.value.path == str(broken / "shard-00001.tar")
        told.append(str(raised.value))
    assert told[0] == told[1]
