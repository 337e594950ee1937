"""A table of wrong uses of the commands and the loader, and the errors that refuse them.

A row is a wrong use, how it ends, and the fields of its error: path, found, expected, and what to type. No
row has a whole sentence. ``$DATA`` and other names stand for folders of the scene: RAW is text, and DATA
(documents), PACKED (rows of 8), MIXED (another set of documents) and OTHER (another tokenizer) are made from
it. PLANNED has no shard yet. MY_DATA is a copy of DATA that the row changes, TMP is the row's own folder, and
NEW does not exist.
"""

from __future__ import annotations

import ast
import functools
import gzip
import io
import json
import re
import shlex
import shutil
import string
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from loader import BrokenShard, MissingShard, NotFound, OtherRun, OtherTokenizer, UnknownVersion, UsageError
from shardprep.errors import OtherPlan, ShardprepError, UnknownMember
from tests.forged import checksum_of_state, rewrite_json
from tests.world import Ended, World, call_main, open_loader, save_tokenizer, tokenizer_dir, type_in

LINES = [f"the kettle of store {number}" for number in range(120)]
TALK = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "kettle"}]
# Flags that are added if a row does not have them.
USUAL_FLAGS = {
    "plan": {"--input_dir": "$RAW", "--output_dir": "$NEW", "--model_id": "$MODEL"},
    "--shard_id": {"--output_dir": "$PLANNED"},
}


class Scene:
    """The folders of a row."""

    def __init__(self, shared: Path, tmp: Path) -> None:
        self._folders = {folder.name.upper(): str(folder) for folder in shared.iterdir()}
        self._folders |= {f"MY_{name}": str(tmp / name) for name in self._folders}
        self._folders |= {"TMP": str(tmp), "NEW": str(tmp / "new")}

    def filled(self, value: Any) -> Any:
        """Replace names by folders in a value, at any depth."""
        return ast.literal_eval(string.Template(repr(value)).safe_substitute(self._folders))

    def prepare(self, refusal: Refusal) -> None:
        """Write the files of a row, and make and change its copy."""
        if refusal.copy:
            shutil.copytree(self.filled(refusal.copy.replace("MY_", "")), self.filled(refusal.copy))
        for folder, files in (("$TMP", refusal.files), (refusal.copy, refusal.changes)):
            for name, new in files.items():
                change(Path(self.filled(folder), name), self.filled(new) if isinstance(new, tuple) else new)

    def run(self, line: str) -> Ended:
        """Run a command line, without Slurm."""
        words = shlex.split(line)
        for flag, folder in USUAL_FLAGS.get(words[0], {}).items():
            if flag not in words:
                words += [flag, folder]
        return call_main(*self.filled(words), environ={"PATH": "/nowhere"})


@dataclass(frozen=True)
class Use:
    """A use of a command or of the loader."""

    text: str
    call: Callable[[Scene, str], Ended | None]  # the second argument is a remedy to add, or ""


def load(data: Any = "$DATA", /, *, reads: bool = False, state: Any = None, **arguments: Any) -> Use:
    """Make a loader, and read an epoch if ``reads``, or load a ``state``.

    If ``state`` is a dict, its values replace those of a state of DATA or of its fingerprint, and the
    checksum fits them.
    """

    def call(scene: Scene, remedy: str) -> None:
        name, _, value = remedy.partition("=")  # a remedy like "amend=True" is one more argument
        more = {name: ast.literal_eval(value)} if remedy else {}
        held = state
        if isinstance(state, dict):
            held = open_loader(scene.filled("$DATA")).state_dict()
            for values in (held, held["fingerprint"]):
                values |= {name: state[name] for name in state.keys() & values.keys()}
            held["checksum"] = checksum_of_state(held)  # what is refused is the value, not that it was edited
        with open_loader(scene.filled(data), **{**scene.filled(arguments), **more}) as loader:
            if state is not None:
                loader.load_state_dict(held)
            for _ in loader if reads else ():
                pass

    return Use(f"load {data} {arguments}" if state is None else f"resume {state} {data} {arguments}", call)


load_tars = functools.partial(load, model_id="$MODEL")  # external tars


def resume(state: Any, data: Any = "$DATA", **arguments: Any) -> Use:
    """Load a state; see ``load``."""
    return load(data, state=state, **arguments)


@dataclass(frozen=True)
class Refusal:
    """A row of the table."""

    use: Use
    ends: int | type[BaseException]  # exit code of a command, or class of a call's error
    path: str | None
    copy: str  # the copy that the row changes, such as $MY_DATA, or ""
    found: str | None = None  # words of the field; None: anything
    expected: str | None = None
    remedy: str | None = None
    heals: str = ""  # a remedy with which the same use succeeds
    files: Mapping[str, bytes | str] = field(default_factory=dict)  # below TMP
    changes: Mapping[str, Any] = field(default_factory=dict)  # file of the copy -> argument of ``change``
    starts_process: bool = False
    is_text_alone: bool = False  # the command line itself is refused, without an error object

    def __str__(self) -> str:
        return " ".join([self.use.text, *self.files, *self.changes])


def row(use: Use | str, ends: Any, path: str | None = None, **facts: Any) -> Refusal:
    """Return a row of the table. A string is a command line.

    ``path``: by default the file of the last change, or else the first file that is written; "" for none.
    """
    if isinstance(use, str):
        line = use
        use = Use(line, lambda scene, remedy: scene.run(f"{line} {remedy}"))
    named = re.search(r"\$MY_[A-Z]+", use.text)
    copy = named[0] if named else ""
    if path is None:
        written = [f"$TMP/{name}" for name in facts.get("files", ())]
        changed = [f"{copy}/{name}" for name in facts.get("changes", ())]
        path = "".join(changed[-1:] or written[:1])
    return Refusal(use, ends, path or None, copy, **facts)


def change(path: Path, new: Any) -> None:
    """Change a file: None removes it (or a folder), text and bytes replace it, a dict changes JSON values and
    updates the hash, a function transforms its content, and a tuple copies a shard or makes a link."""
    match new:
        case None:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        case dict():
            rewrite_json(path, **new)
        case ("shard", folder, shard_id):
            for suffix in (".tar", ".idx", ".json"):
                shutil.copy(f"{folder}/shard-{shard_id:05d}{suffix}", path.with_suffix(suffix))
        case ("link", target):
            path.unlink(missing_ok=True)
            path.symlink_to(target)
        case str() | bytes():
            World(path.parent, raw_dir=path.parent).raw({path.name: new})
        case _:
            path.write_bytes(new(path.read_bytes()))


def flipped(place: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def tar(members: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as writer:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            writer.addfile(info, io.BytesIO(content))
    return file.getvalue()


TAR, IDX, MANIFEST = (f"shard-00001.{suffix}" for suffix in ("tar", "idx", "json"))
TOKENIZER = "tokenizer/tokenizer.json"
OTHERS = tar({"a.token_ids.json": b"[1]"})
REMAKE = "shardprep --shard_id 1 --output_dir $MY_DATA"
AGAIN = f"{REMAKE} --again"
OTHERS_FOLDER = "${MY_DATA}_other_plan"
MOVE = f"mkdir -p {OTHERS_FOLDER} && mv $MY_DATA/shard-00001.* {OTHERS_FOLDER} && {REMAKE}"
PLAN = "shardprep plan --input_dir RAW --output_dir {} --model_id MODEL --num_shards N"
PACKED = "plan --record packed --seq_len 8"
TRAIN = "train_tokenizer --output_dir $NEW"
BLANK, OVERLAP = "blank $DATA --output $NEW", "overlap $DATA --output $NEW"
MADE_OF_MINE = "--shard_id 0 --input_dir $MY_RAW"
CHAT = "plan --record chat --input_dir $TALKS"
SOURCES = {"a": "$DATA", "b": "$MIXED"}
MIX: dict[str, Any] = {"weights": {"a": 1, "b": 1}}
ASCENDING = "whole numbers that ascend from 0"

LINES_OF_JSON = (
    r"(set -o pipefail; cd $TMP/x && sed -s '1s/^\xef\xbb\xbf//' a.json | jq -cn 'inputs | .[]' "
    "> a.lines.jsonl.part && ln a.lines.jsonl.part a.lines.jsonl && unlink a.lines.jsonl.part "
    "&& mv --backup=numbered a.json a.json.whole) && shardprep plan --input_dir $TMP/x"
)
NO_IDS = (
    "[1,,2]", "[1,]", "[,]", "[1 2]", "[1, 2", "[-1]", "[1.5]", "[true]", "[[1]]", "[000000001]",
    "[12345678901]", "[9999999]", "[1, 2x",
)  # fmt: skip

ROWS = [
    # Plans.
    row("plan --input_dir $TMP/nowhere", 66, "$TMP/nowhere"),
    row("plan --input_dir raw", 66, "raw"),
    row("plan --input_dir a/b/c", 66, "a/b/c"),
    row("plan --input_dir ../a", 66, "../a"),
    row("plan --input_dir $RAW/0.txt", 66, "$RAW/0.txt"),
    row(f"plan --input_dir $TMP/{300 * 'x'}", 66, f"$TMP/{300 * 'x'}", expected="a folder that you can read"),
    row("plan --input_dir $TMP/x", 66, "$TMP/x", files={"x/.a": ""}, expected=".txt .jsonl .parquet"),
    row("plan --input_dir $TMP/x", 66, "$TMP/x", files={"x/a.md": "the"}, expected=".txt .jsonl"),
    row("plan --model_id $TMP/nowhere", 66, "$TMP/nowhere", expected="tokenizer.json"),
    row("plan --model_id hf://a/b", 66, "hf://a/b", found="a URL", expected="a name", remedy="a/b"),
    row("plan --model_id $MODEL/tokenizer.json", 66, "$MODEL/tokenizer.json",
        expected="folder of tokenizer.json", remedy="$MODEL"),
    row("plan --output_dir $RAW/made --recursive", 2, "$RAW/made", expected="a folder outside of it"),
    row("plan --output_dir $RAW/0.txt", 73, "$RAW/0.txt", expected="a folder that you can write to"),
    row("plan --output_dir $RAW/0.txt/new", 73, "$RAW/0.txt/new", expected="a folder that you can write to"),
    row("plan --num_shard 3", 2, found="--num_shard", remedy="--num_shards", is_text_alone=True),
    row("plan --packing", 2, found="--packing", remedy="--record packed --seq_len 8192", is_text_alone=True),
    row("plan --record pack", 2, found="'pack'", expected="documents packed chat", is_text_alone=True),
    row("plan --validation_fraction x", 2, found="--validation_fraction 'x'", is_text_alone=True),
    row("plan --num_shards 2 --shard_bytes 1M", 2, found="--shard_bytes --num_shards", is_text_alone=True),
    row("plan --record packed --seq_len 0", 2, found="--seq_len 0", expected="1 to"),
    row("plan --seq_len 8", 2, found="--seq_len", heals="--record packed"),
    row(f"{PACKED} --token_format json", 2, found="--token_format json", heals="--token_format npy"),
    row(f"{PACKED} --keep_text", 2, found="--keep_text", remedy="--record documents"),
    row("plan --text_field a --text_template {b}", 2, found="--text_field --text_template", expected="one"),
    row("plan --text_template {a", 2, found="--text_template '{a'", expected=r"'{input}\n\n{output}'"),
    row("plan --text_template abc", 2, found="--text_template 'abc'", expected=r"'{input}\n\n{output}'"),
    row("plan --validation_fraction 2", 2, found="--validation_fraction 2.0", expected="1e-06 to 0.5"),
    row("plan --max_bad_fraction 2", 2, found="--max_bad_fraction 2.0", expected="0 to 1"),
    row("plan --limit=-1", 2, found="--limit -1", expected="1 to"),
    row("plan --num_shards 0", 2, found="--num_shards 0", expected="at least 1"),
    row("plan --num_shards 100000", 2, found="100000", expected="99999", remedy="--num_shards 99999"),
    row("plan --shard_bytes 12x", 2, found="--shard_bytes 12x", expected="512M or 2G"),
    row("plan --encoding nope", 2, found="--encoding nope", expected="utf-8 cp949"),
    row("plan --encoding utf-7", 2, found="--encoding utf-7", remedy="iconv -f utf-7 -t utf-8"),
    row("plan --follow_links", 2, found="--follow_links", heals="--recursive"),
    row("plan --limit 3 --hash_inputs", 2, found="--limit --hash_inputs"),
    row(f"{PACKED} --model_id $NO_EOS", 2, "$NO_EOS", expected="eos_token", heals="--no-append_eos"),
    row("plan --record chat", 2, "$RAW/0.txt", found="text", expected="JSON lines and tables"),
    row(CHAT, 2, expected="chat template", remedy="--chat_template_file", starts_process=True),
    row(f"{CHAT} --chat_template_file $TMP/no.jinja", 2, "$TMP/no.jinja",
        expected="the file of a Jinja template", starts_process=True),
    row("plan --record chat --append_eos", 2, found="--append_eos"),
    row("plan --record chat --engine gigatoken", 2, found="--engine gigatoken", remedy="--engine tokenizers"),
    row("plan --input_dir $RECORDS", 65, "$RECORDS/a.jsonl", found="body", expected="'text'",
        heals="--text_field body"),
    row("plan --input_dir $TALKS", 65, "$TALKS/a.jsonl", found="messages", remedy="--record chat"),
    row("plan --input_dir $TMP/x", 65, "$TMP/x/talk.jsonl", found="talk",
        remedy="--record chat --text_field talk", files={"x/talk.jsonl": json.dumps({"talk": TALK})}),
    row("plan --output_dir $DATA --num_shards 2", 78, "$DATA", heals="--output_dir NEW"),
    row("plan --input_dir $MY_RAW", 66, changes={"9.txt": ("link", "$TMP/gone.txt")}),
    row("plan --input_dir $TMP/x", 65, expected="an intact file",
        files={"x/cut.txt.gz": gzip.compress(b"the\n" * 999)[:-9]}),
    row("plan --input_dir $TMP/x", 65, found="b'the", expected=r"b'\x1f\x8b'",
        files={"x/a.txt.gz": "the kettle\n"}),
    row("plan --input_dir $TMP/x", 65, expected="an intact file", files={"x/a.parquet": "the kettle\n" * 9}),
    row("plan --input_dir $TMP/x", 65, found="one list of JSON", expected="an object in each line",
        remedy=f"{LINES_OF_JSON} --output_dir $NEW --model_id $MODEL", files={"x/a.json": '[{"text": "a"}]'}),
    row("plan --input_dir $TMP/x --keep_text --no-append_eos", 65, "$TMP/x/a.json",
        found="one list of JSON", expected="an object in each line",
        remedy=f"{LINES_OF_JSON} --keep_text --no-append_eos --output_dir $NEW --model_id $MODEL"
        " --encoding auto --text_field body",
        files={"x/a.json": json.dumps([{"body": "a text"}], indent=1),
               "x/b.txt": "바닷가 마을의 겨울은 길다.\n".encode("cp949") * 9}),
    row("plan --stripe x", 2, found="--stripe x", expected="N[,SIZE][,POOL]"),
    # Shards.
    row("--shard_id 9", 66, found="shard 9", expected="0 to 2", remedy="--array=0-2"),
    row("--shard_id -1", 66, found="shard -1", expected="0 to 2", remedy="--array=0-2"),
    row("--shard_id 0 --output_dir $NEW --planned", 66, "$NEW", remedy=PLAN.format("$NEW")),
    row("--shard_id 0 --output_dir $NEW --input_dir $TMP/nowhere", 66, "$TMP/nowhere"),
    row("--shard_id 2 --output_dir $NEW --input_dir $RAW --model_id $MODEL", 66, found="shard 2",
        expected="0 to 1", remedy="--array=0-1"),
    row("--shard_id 0 --append_eos", 78, "$PLANNED", found="--append_eos", remedy="--output_dir"),
    row("--shard_id 0 --model_id $NO_EOS", 78, "$PLANNED", found="--model_id $NO_EOS", remedy="--output_dir"),
    row(MADE_OF_MINE, 78, changes={"0.txt": flipped(0)}),
    row(MADE_OF_MINE, 66, remedy="--input_dir", changes={"0.txt": None}),
    row(MADE_OF_MINE, 66, remedy="--input_dir", changes={"0.txt": ("link", "/dev/zero")}),
    row(MADE_OF_MINE, 66, remedy="--input_dir", changes={"0.txt": ("link", "/")}),
    row(f"{MADE_OF_MINE} --check_inputs", 78, "$MY_RAW", found="9.txt", expected="2 planned input files",
        remedy="--output_dir", changes={"9.txt": "the\n"}),
    row(f"{MADE_OF_MINE} --check_inputs", 78, "$MY_RAW", found="0.txt 6993", remedy="--output_dir",
        changes={"0.txt": "longer\n" * 999}),
    row(f"{MADE_OF_MINE} --check_inputs", 78, "$MY_RAW", found="0.txt missing", remedy="--output_dir",
        changes={"0.txt": None}),
    row("--shard_id 0 --input_dir $TMP/nowhere --check_inputs", 78, "$TMP/nowhere", remedy="--output_dir"),
    row("--shard_id 0 --output_dir $MY_PLANNED", 66, changes={TOKENIZER: None}),
    row("--shard_id 0 --output_dir $MY_PLANNED", 78, changes={TOKENIZER: flipped(99)}),
    row("--shard_id 0 --output_dir $NEW --input_dir $TMP/x --model_id $MODEL", 65,
        "$NEW/quarantine/shard-00000.jsonl", found="50.00%", expected="1.00%",
        remedy="head -n 3 $NEW/quarantine/shard-00000.jsonl",
        files={"x/a.jsonl": '{"text": "the kettle"}\n{"text": 7}\n' * 10}),
    row("--shard_id 0 --memory_gb 0", 2, found="--memory_gb 0", expected="more than 0"),
    row("run $MY_DATA", 78, found="9", changes={"plan.json": {"version": 9}}),
    row("run $MY_DATA", 78, found="1", changes={"plan.json": {"version": 1}}, remedy=PLAN.format("NEW")),
    row("run $MY_DATA", 65, expected="JSON", changes={"plan.json": lambda data: data[:100]}),
    row("run $MY_DATA", 65, changes={"plan.json": lambda data: data.replace(b'"line"', b'"file"', 1)}),
    row("run $MY_DATA", 65, changes={"findings.json": "{"}, remedy="shardprep verify $MY_DATA --deep all"),
    row("run $MY_DATA", 78, changes={MANIFEST: ("shard", "$OTHER", 1)}, remedy=MOVE),
    row("--shard_id 1 --output_dir $MY_DATA", 78, changes={MANIFEST: ("shard", "$OTHER", 1)}, remedy=MOVE),
    row("run $RAW", 66, "$RAW", expected="plan.json",
        remedy="shardprep plan --input_dir $RAW --output_dir ${RAW}_shards --model_id MODEL --num_shards N"),
    row("run $RAW/0.txt", 66, "$RAW/0.txt", expected="the folder of a data set"),
    row("run $PLANNED --shards 5-9", 2, found="--shards 5-9", expected="ids from 0 to 2"),
    row("run $PLANNED --num_proc 0", 2, found="--num_proc 0", expected="1 or more"),
    # Checks, looks, exports and Slurm.
    row("verify $MY_PLANNED --fast", 66, "$MY_PLANNED", remedy="shardprep run $MY_PLANNED"),
    row("verify $MY_DATA", 66, changes={TAR: None}, heals=REMAKE),
    row("verify $MY_DATA", 66, changes={IDX: None}, heals=REMAKE),
    row("verify $MY_DATA", 66, changes={MANIFEST: None}, heals=REMAKE),
    row("verify $MY_DATA", 65, changes={TAR: lambda data: data[:5120]}, found="5120", heals=REMAKE),
    row("verify $MY_DATA", 65, changes={TAR: flipped(3000)}, heals=AGAIN),
    row("verify $MY_DATA", 65, changes={MANIFEST: flipped(300)}, heals=REMAKE),
    row("verify $MY_DATA", 78, found="shard 0", expected="shard 1", changes={MANIFEST: ("shard", "$DATA", 0)},
        heals=MOVE),
    row("verify $MY_DATA", 78, changes={MANIFEST: ("shard", "$OTHER", 1)}, heals=MOVE),
    row("verify $MY_DATA", 65, found="shardprep-plan", expected="shardprep-manifest",
        changes={MANIFEST: '{"format": "shardprep-plan"}'}, heals=REMAKE),
    row("verify $MY_DATA", 65, found="-1", expected="a whole number", changes={MANIFEST: {"shard_id": -1}},
        heals=REMAKE),
    row("verify $MY_DATA", 78, found="9", changes={MANIFEST: {"version": 9}}),
    row("verify $PLANNED --deep=0", 2, found="--deep 0", expected="a number of shards from 1"),
    row("verify $DATA --fast --deep", 2, found="--deep --fast", is_text_alone=True),
    row("verify $DATA --deep --input_dir $MY_RAW", 66, remedy="--input_dir", changes={"1.txt": None}),
    row("verify $DATA --deep --input_dir $MY_RAW", 78, changes={"1.txt": "the"}),
    row("clean $TMP/nowhere", 66, "$TMP/nowhere", expected="a data set"),
    row("clean $TMP", 66, "$TMP", expected="the folder of a data set"),
    row("clean $RAW/0.txt", 66, "$RAW/0.txt", expected="the folder of a data set"),
    row("peek $PLANNED", 66, "$PLANNED", remedy="shardprep run $PLANNED"),
    row("peek $DATA 0:999", 66, found="0:999", expected="samples 0 to"),
    row("peek $PLANNED 1:0", 66, f"$PLANNED/{MANIFEST}", remedy="shardprep run $PLANNED --shards 1"),
    row("peek $DATA 9:0", 2, found="9", expected="ids of 0 to 2"),
    row("peek $MY_DATA 1:0", 66, changes={IDX: None}, heals=REMAKE),
    row("peek $DATA zzz", 2, found="zzz", expected="SHARD:SAMPLE FILE:BYTE"),
    row("peek $DATA no.txt:3", 66, found="no.txt", expected="0.txt"),
    row("peek $DATA 0.txt:99999", 66, "0.txt", found="99999", expected="0 to"),
    row("peek $DATA id:7", 2, "$DATA", expected="SHARD:SAMPLE or FILE:BYTE"),
    row("peek $DATA --grep '('", 2, found="--grep '('", expected="regular expression"),
    row("peek $DATA 0:1 --grep a", 2, found="--grep"),
    row("peek $DATA --chars -1", 2, found="--chars -1"),
    row("peek $DATA --num 0", 2, found="--num 0", expected="from 1"),
    row("export $PLANNED --to nanogpt --output_dir $NEW", 66, "$PLANNED/shard-00000.json",
        remedy="shardprep --shard_id 0 --output_dir $PLANNED"),
    row("export $DATA --to nanogpt --output_dir $NEW --split train", 2, "$DATA", found="--split",
        remedy="--validation_fraction"),
    row("export $DATA --to nanogpt --output_dir $TMP/x", 78, "$TMP/x/mine", found="a file of somebody else",
        files={"x/mine": ""}),
    row("export $DATA --to megatron --output_dir '$TMP/a b'", 2, "$TMP/a b", found="white space"),
    row(f"{BLANK} --ids $TMP/none", 66, "$TMP/none"),
    row(f"{BLANK} --ids $TMP/blank", 65, expected="a line for each", files={"blank": "\n \n"}),
    row(f"{BLANK} --ids $TMP/short", 65, found="sha256:12", files={"short": "sha256:12\n"}),
    row(f"{BLANK} --ids $TMP/no_utf8", 65, found="line 2", files={"no_utf8": b"at:a:1\n\xff\n"}),
    row("plan --exclude $TMP/no_byte", 65, expected="FILE:BYTE", files={"no_byte": "at:a.txt\n"}),
    row("plan --exclude $TMP/negative", 65, expected="FILE:BYTE", files={"negative": "at:a.txt:-1\n"}),
    row("plan --exclude $TMP/no_file", 65, expected="FILE:BYTE", files={"no_file": "at::5\n"}),
    row("plan --exclude $TMP/an_id", 2, found="line 1", remedy="--id_field", files={"an_id": "web/17\n"}),
    row("duplicates $DATA --output $NEW", 2, "$DATA", found="no digests", remedy="--digests"),
    row(f"{OVERLAP} --against $TMP/x", 66, "$TMP/x", files={"x/README.md": "the"}),
    row(f"{OVERLAP} --against $TMP/x", 65, "", remedy="--ngram", files={"x/a.txt": "the"}),
    row(f"{OVERLAP} --against $RECORDS", 65, "$RECORDS/a.jsonl", remedy="--text_field body"),
    row(f"{OVERLAP} --against $RAW --ngram 1", 2, found="--ngram 1", expected="2 or more"),
    row(f"{OVERLAP} --against $RAW --shards 9", 2, found="--shards 9", expected="ids from 0 to 2"),
    row(f"{OVERLAP} --against $DATA --text_field a", 2, "$DATA", found="--text_field"),
    row(f"{TRAIN} --input_dir $TMP/x", 66, "$TMP/x", files={"x/in/deep/a.txt": "here"}),
    row(f"{TRAIN} --input_dir $TMP/x", 65, files={"x/cut.txt.gz": gzip.compress(b"the\n" * 999)[:-9]}),
    row(f"{TRAIN} --input_dir $RAW --vocab_size 255", 2, found="--vocab_size 255"),
    row(f"{TRAIN} --input_dir $RAW --max_bytes 10", 2, found="--max_bytes 10"),
    row(f"{TRAIN} --input_dir $RAW --text_field a --text_template {{a}}", 2, found="--text_field"),
    row("train_tokenizer --input_dir $RAW --output_dir $MODEL", 78, "$MODEL"),
    row("train_tokenizer --input_dir $RAW --output_dir $RAW/0.txt", 73, "$RAW/0.txt"),
    row("train_tokenizer --input_dir $RAW --output_dir $RAW/0.txt/x", 73, "$RAW/0.txt"),
    row("submit $PLANNED", 66, "scontrol", remedy="shardprep run $PLANNED"),
    row("retry $PLANNED", 66, "$PLANNED", remedy="shardprep submit $PLANNED"),
    row("status $NEW", 66, "$NEW", expected="plan.json", remedy=PLAN.format("$NEW")),
    row("submit $MY_PLANNED", 66, changes={TOKENIZER: None}),
    row("submit $PLANNED --mem_gb 0", 2, found="--mem_gb 0.0", expected="more than 0"),
    row("submit $PLANNED --mem_gb 2 --mem_per_cpu_gb 2", 2, found="--mem_gb --mem_per_cpu_gb"),
    row("submit $PLANNED --sbatch_args --array=1-2", 2, found="--sbatch_args --array=1-2"),
    row("submit $PLANNED --sbatch_args -Jmine", 2, found="--sbatch_args -Jmine"),
    row("submit $PLANNED --max_parallel -1", 2, found="--max_parallel -1", expected="more than 0"),
    row(f"submit $PLANNED --time_min {10**40}", 2, found=f"--time_min {10**40}", expected="at most"),
    row("submit $PLANNED --cpus_per_task all", 2, found="--cpus_per_task all", expected="a number, or: node"),
    row("submit $PLANNED --shards 9", 2, found="--shards 9", expected="ids from 0 to 2"),
    row("submit $PLANNED --setup $TMP/no.sh", 2, "$TMP/no.sh"),
    row("logs $PLANNED 9", 66, found="shard 9", expected="0 to 2"),
    row("submit $PLANNED --time_min soon", 2, found="'soon'", expected="1:30:00", is_text_alone=True),
    row("report $DATA --output $RAW", 73, "$RAW", found="a folder", expected="a file"),
    row("where $DATA --state $TMP/s.pt", 65, found="no checkpoint of torch.save", files={"s.pt": "x"}),
    row("lustre show $TMP/nowhere", 66, "$TMP/nowhere", remedy="shardprep lustre show $TMP"),
    row("lustre apply $TMP --stripe 0", 2, found="--stripe 0", expected="N[,SIZE][,POOL]"),
    row("plann", 2, found="'plann'", remedy="plan", is_text_alone=True),
    # Input of a loader.
    row(load("$TMP/nowhere"), NotFound, "$TMP/nowhere", expected="a folder, an index.json, tars"),
    row(load("$RAW"), NotFound, "$RAW",
        remedy=PLAN.replace("RAW", "$RAW").format("DATA")),
    row(load("$PLANNED"), NotFound, "$PLANNED", remedy="shardprep run $PLANNED"),
    row(load("$RAW/0.txt"), UsageError, "$RAW/0.txt", expected="a tar, a folder or an index.json"),
    row(load([]), UsageError, expected="a folder, an index.json, tars"),
    row(load(5), UsageError, found="input_shards=5", expected="a folder"),
    row(load(["$DATA", "$DATA"]), UsageError, "$DATA", expected="once"),
    row(load("$DATA/x-*.tar"), NotFound, "$DATA/x-*.tar"),
    row(load("$DATA/shard-{00000..00009}.tar"), NotFound, "$DATA/shard-00003.tar"),
    row(load("$DATA/shard-{0}.tar"), UsageError, "$DATA/shard-{0}.tar", expected="{00000..00009} or {a,b}"),
    row(load("http://127.0.0.1:9/x.tar"), UsageError, "http://127.0.0.1:9/x.tar", remedy="cache_dir="),
    row(load("$MY_DATA"), MissingShard, "$MY_DATA", found="2 of 3 shards", remedy="shardprep run $MY_DATA",
        changes={"index.json": None, MANIFEST: None}),
    row(load("$MY_DATA", reads=True), MissingShard, changes={TAR: None}, heals=REMAKE),
    row(load("$MY_DATA", reads=True, num_workers=2), MissingShard, changes={TAR: None}, heals=REMAKE,
        starts_process=True),
    row(load("$MY_DATA", reads=True, num_workers=2), BrokenShard, found="b'xxxxxxxx'",
        changes={IDX: "x" * 999}, heals=AGAIN, starts_process=True),
    row(load("$MY_DATA", reads=True), BrokenShard, found="5120", changes={TAR: lambda data: data[:5120]},
        heals=REMAKE),
    row(load("$MY_DATA/shard-00007.tar"), NotFound, "$MY_DATA/shard-00007.tar", expected="3 shards",
        changes={"shard-00007.json": ("shard", "$DATA", 1)}),
    row(load("$MY_DATA", reads=True), BrokenShard, changes={IDX: flipped(100)}, heals=AGAIN),
    row(load("$MY_DATA", reads=True), UnknownVersion, changes={IDX: flipped(11)}),
    row(load("$MY_DATA", reads=True), BrokenShard, found="b'xxxxxxxx'", changes={IDX: "x" * 999},
        heals=AGAIN),
    row(load("$MY_DATA", reads=True), BrokenShard, changes={TAR: lambda data: data.replace(b"[", b"x", 1)}),
    row(load("$MY_DATA"), UnknownVersion, found="9", changes={"index.json": {"version": 9}}),
    row(load("$MY_DATA"), BrokenShard, expected="JSON", changes={"index.json": lambda data: data[:100]},
        heals="shardprep verify $MY_DATA"),
    row(load("$MY_DATA"), UnknownVersion, found="9", changes={"index.json": None, MANIFEST: {"version": 9}}),
    row(load("$MY_DATA"), OtherPlan, changes={"index.json": None, MANIFEST: ("shard", "$OTHER", 1)},
        heals=MOVE),
    row(load("$MY_DATA"), OtherPlan, expected="0 to 2",
        changes={"index.json": None, "shard-00007.json": ("shard", "$DATA", 1)}),
    row(load("$MY_DATA"), NotFound, changes={"tokenizer": None}, heals="model_id='$MODEL'"),
    row(load(model_id="$NO_EOS"), OtherTokenizer, "$DATA", found="model_id='$NO_EOS'"),
    row(load(["$DATA", "$OTHER"]), OtherTokenizer, "$OTHER"),
    row(load("$TMP/o.tar", model_id="$TMP/nowhere"), NotFound, "$TMP/nowhere", expected="tokenizer.json",
        files={"o.tar": OTHERS}),
    row(load(["$DATA", "$TMP/o.tar"]), UsageError, "", remedy="model_id=", files={"o.tar": OTHERS}),
    row(load_tars("$TMP/o.tar"), BrokenShard, found="json", expected="token_ids.json or token_ids.npy",
        files={"o.tar": tar({"a.json": b"[1]"})}),
    row(load_tars("$TMP/ids.tar"), BrokenShard, found="'a'",
        files={"ids.tar": tar({"a.tokens.json": b"[1]", "a.text.txt": b"a"})}),
    # webdataset makes one sample of these two: what stands before the first dot is the key.
    row(load_tars("$TMP/dots.tar"), BrokenShard, found="'part-0'",
        files={"dots.tar": tar({"part-0.8_1.token_ids.json": b"[1]", "part-0.8_2.token_ids.json": b"[1]"})}),
    row(load_tars("$TMP/twice.tar"), BrokenShard, found="'a'", files={"twice.tar": OTHERS[:1024] + OTHERS}),
    row(load_tars("$TMP/mask.tar"), UnknownMember, found="loss_mask.npy",
        files={"mask.tar": tar({"a.token_ids.json": b"[1]", "a.loss_mask.npy": b""})}),
    row(load_tars("$MY_DATA/x.tar"), BrokenShard, changes={"x.tar": ("link", "/dev/zero")}),
    row(load_tars("$TMP/o.tar.gz"), UsageError, files={"o.tar.gz": OTHERS}),
    row(load_tars("$TMP/x"), UsageError, "$TMP/x/o.tar.gz", files={"x/o.tar": OTHERS, "x/o.tar.gz": OTHERS}),
    row(load_tars(["$TMP/o.tar", "$TMP/*.tar"]), UsageError, files={"o.tar": OTHERS}),
    row(load_tars("$TMP/cut.tar"), BrokenShard, found="1024", expected="two zero blocks",
        files={"cut.tar": OTHERS[:1024]}),
    row(load("$TMP/none.tar"), BrokenShard, files={"none.tar": "x" * 10240}),
    *(row(load_tars(f"$TMP/{n}.tar", batch_size=1, reads=True), BrokenShard, f"$TMP/{n}.tar",
          files={f"{n}.tar": tar({"a.token_ids.json": text.encode()})}) for n, text in enumerate(NO_IDS)),
    row("stage $DATA --to $RAW/0.txt/node", 73, "$RAW/0.txt"),
    row("stage $TMP/o.tar --to $NEW", 2, files={"o.tar": OTHERS}),
    row("stage $DATA/shard-00000.tar --to $NEW", 2, "$DATA/shard-00000.tar"),
    row("stage $DATA --to $DATA/inside", 2, found="--to $DATA/inside", expected="outside of $DATA"),
    row("stage $TMP/none --to $NEW", 66, "$TMP/none"),
    # Arguments of a loader.
    row(load(batch_size=-1), UsageError, found="batch_size=-1", expected="at least 1"),
    row(load(batch_size=2.5), UsageError, found="batch_size=2.5", expected="a whole number"),
    row(load(global_batch_size=6), UsageError, found="6", expected="multiple of batch_size 4 x 1 ranks"),
    row(load(global_batch_size=[(0, 8), (10, 6)]), UsageError, found="global_batch_size=6 step 10",
        expected="multiple of batch_size 4"),
    row(load(pad_to_multiple_of=0), UsageError, found="pad_to_multiple_of=0", expected="at least 1"),
    row(load(drop_last=True), TypeError, found="'drop_last'", expected="global_batch_size"),
    row(load(global_batch_size=(1 << 60) + 1), UsageError, found=f"global_batch_size={(1 << 60) + 1}",
        expected="multiple of batch_size 4"),
    row(load(global_batch_size=16, rank=0, world_size=3), UsageError, found="16", expected="4 x 3 ranks"),
    row(load(rank=0, world_size=99), UsageError, found="120 samples", expected="396"),
    row(load(rank=3, world_size=3), UsageError, found="rank 3 of 3", expected="0 <= rank < world_size"),
    row(load(rank=1), UsageError, found="rank=1", expected="both"),
    row(load("$PACKED", seq_len=16), UsageError, found="16", expected="rows of 8 tokens", remedy="--seq_len"),
    row(load(seq_len=100_000), UsageError, found="seq_len=100000"),
    row(load(seq_len=8, max_length=4), UsageError, found="seq_len=8"),
    row(load("$PACKED", max_length=4), UsageError, found="max_length=4", expected="packed rows of 8 tokens",
        remedy="--seq_len"),
    row(load("$PACKED", group_by_length=True), UsageError, found="group_by_length",
        expected="packed rows of 8 tokens", remedy="--seq_len"),
    row(load(group_by_length=3), UsageError, found="3", expected="the global batch of 4"),
    row(load(boundaries="flash"), UsageError, found="['flash']", expected="position_ids segment_ids"),
    row(load(["$PACKED", "$DATA"], boundaries="segment_ids"), UsageError, expected="rows of one length"),
    row(load(targets="next"), UsageError, found="targets='next'", expected="'same' or 'shifted'"),
    row(load(seq_len=8, targets="shifted", boundaries="transformers"), UsageError, found="targets='shifted'",
        expected="other boundaries than 'transformers'"),
    row(load(padding="left"), UsageError, found="padding='left'", expected="'longest' or 'max_length'"),
    row(load(padding="max_length"), UsageError, found="padding='max_length'", expected="max_length"),
    row(load(split="test"), UsageError, found="split='test'", expected="'train' or 'validation'"),
    row(load(split="train"), UsageError, "$DATA", found='split="train"', remedy="--validation_fraction"),
    row(load(seed="x"), UsageError, found="seed='x'", expected="a whole number"),
    row(load(bacth_size=4), TypeError, found="'bacth_size'", remedy="'batch_size'"),
    row(load(global_batch_size=[(1, 8)]), UsageError, found="global_batch_size [1]", expected=ASCENDING),
    row(load(global_batch_size=[(0, 8), (9, 4), (9, 8)]), UsageError, found="[0, 9, 9]", expected=ASCENDING),
    row(load(global_batch_size=[(0, 8), (-1, 4)]), UsageError, found="global_batch_size=-1"),
    row(load(global_batch_size=[(0, 8), (2.5, 4)]), UsageError, found="global_batch_size=2.5"),
    row(load(prefetch_factor=2), UsageError, found="prefetch_factor=2", remedy="num_workers"),
    row(load(weights={"a": 1}), UsageError, found="weights", remedy='input_shards={"web": ..., "code": ...}'),
    row(load(SOURCES), UsageError, expected="weights="),
    row(load(SOURCES, weights={"a": -1, "b": 2}), UsageError, found="'a': -1",
        expected="non-negative numbers for a, b"),
    row(load(SOURCES, weights={"a": 1, "c": 1}), UsageError, found="'c': 1", expected="numbers for a, b"),
    row(load(SOURCES, weights={"a": 1, "b": 1e-9}), UsageError, found="b", expected="one of 65536 samples"),
    row(load(SOURCES, **MIX, weights_in="bytes"), UsageError, found="weights_in='bytes'",
        expected="'tokens' or 'samples'"),
    row(load(SOURCES, weights=[(5, {"a": 1})]), UsageError, found="weights [5]", expected=ASCENDING),
    row(load(SOURCES, weights=[(0, {"a": 1}), (9, {"b": 1}), (5, {"a": 1})]), UsageError, found="[0, 9, 5]",
        expected=ASCENDING),
    row(load({}, weights={}), UsageError, found="[]", expected="names with shards for each"),
    row(load({"a": "$DATA", "b": "$PACKED"}, **MIX), UsageError, found="a 0, b 8", expected="one length"),
    row(load({"a": "$DATA", "b": "$DATA"}, **MIX), UsageError, "$DATA", expected="once"),
    row(load(SOURCES, **MIX, split="validation"), UsageError, expected="one loader for each source"),
    # States.
    row(resume({"format": None}), BrokenShard, found="None", remedy="state_dict()"),
    row(resume("x.pt"), UsageError, found="'x.pt'", remedy="loader.load_state_dict(torch.load(PATH))"),
    row(resume({"fingerprint": None}), BrokenShard, found="fingerprint None", expected="an object"),
    row(resume({"order_version": 99}), UnknownVersion, found="99"),
    row(resume({}, "$OTHER"), OtherRun, found="data tokenizer"),
    row(resume({}, "$MIXED"), OtherRun, found="data"),
    row(resume({}, "$PACKED"), OtherRun, found="data"),
    row(resume({}, ["$DATA", "$MIXED"]), OtherRun, found="data"),
    row(resume({}, SOURCES, **MIX), OtherRun, found="is_mixture"),
    row(resume({}, seed=5), OtherRun, found="seed 0", expected="seed 5"),
    row(resume({}, shuffle=False), OtherRun, found="shuffle"),
    row(resume({}, group_by_length=2), OtherRun, found="group_by_length"),
    row(resume({}, max_length=5), OtherRun, found="max_length"),
    row(resume({}, seq_len=8), OtherRun, found="seq_len"),
    row(resume({}, global_batch_size=[(0, 8), (70, 4)]), OtherRun, found="global_batch_size 4",
        heals="amend=True"),
    row(resume({}, global_batch_size=8), OtherRun, found="global_batch_size", heals="amend=True"),
    row(resume({}, batch_size=8), OtherRun, found="global_batch_size=4", expected="multiple of batch_size 8"),
    row(resume({"step": 10**9}), BrokenShard, found="1000000000", expected="a step below 30"),
    row(resume({"step": "x"}), BrokenShard, found="step 'x'", expected="a whole number"),
    row(resume({"step": -1}), BrokenShard, found="step -1"),
    row(resume({"epoch": -1}), BrokenShard, found="epoch -1"),
    row(resume({"num_micro": -1}), BrokenShard, found="num_micro -1"),
    row(resume({"num_micro": 9}), UsageError, found="9", expected="1"),
]  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets of one text, made once and never written to."""
    root = tmp_path_factory.mktemp("refusals")
    World(root).raw({"0.txt": "\n".join(LINES[:70]) + "\n", "1.txt": "\n".join(LINES[70:]) + "\n"})
    World(root, raw_dir=root / "records").raw({"a.jsonl": [{"body": line} for line in LINES[:20]]})
    World(root, raw_dir=root / "talks").raw({"a.jsonl": [{"messages": TALK}]})
    shutil.copytree(tokenizer_dir(), root / "model")
    other = save_tokenizer(root / "no_eos", without="eos_token")
    tokens = json.loads((other / "tokenizer.json").read_text())
    tokens["model"]["merges"] = tokens["model"]["merges"][:5]
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    sets: dict[str, dict[str, Any]] = {
        "data": {},
        "packed": {"record": "packed", "seq_len": 8},
        "other": {"model_id": root / "no_eos"},
        "mixed": {"append_eos": True},
    }
    for name, options in sets.items():
        World(root, tokenizer=root / "model", data_dir=root / name).make(num_shards=3, **options)
    World(root, tokenizer=root / "model", data_dir=root / "planned").plan(num_shards=3)
    return root


def has_words(text: str, wanted: str) -> bool:
    """Return whether ``text`` has all words of ``wanted``; white space and ``=,;:`` separate words."""
    words = filter(None, re.split(r"[\s=,;:]+", wanted))
    return all(re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", text) for word in words)


@pytest.mark.parametrize(
    "refusal",
    [
        pytest.param(each, id=f"{number} {each}", marks=[pytest.mark.processes] * each.starts_process)
        for number, each in enumerate(ROWS)
    ],
)
def test_a_refusal_names_what_is_wrong_and_its_remedy_works(
    shared: Path, tmp_path: Path, refusal: Refusal
) -> None:
    error: Any
    scene = Scene(shared, tmp_path)
    scene.prepare(refusal)
    if isinstance(refusal.ends, int):
        ended = refusal.use.call(scene, "")
        assert ended is not None
        error, text = ended.ends(refusal.ends).error, ended.err
        assert "Traceback" not in ended.text
    else:
        with pytest.raises(refusal.ends) as raised:
            refusal.use.call(scene, "")
        assert type(raised.value) is refusal.ends
        error, text = raised.value, str(raised.value)
    facts = [refusal.path, refusal.found, refusal.expected, refusal.heals or refusal.remedy]
    path, found, expected, remedy = scene.filled(facts)
    assert path or found or expected or remedy
    if isinstance(error, ShardprepError):
        assert not refusal.is_text_alone
        assert (error.path, error.remedy) == (path, remedy), text
        assert has_words(error.found or "", found or ""), error.found
        assert has_words(error.expected or "", expected or ""), error.expected
        found, expected = error.found, error.expected
    else:
        assert refusal.is_text_alone or refusal.ends is TypeError, text
    for fact in (path, found, expected, remedy):
        assert has_words(text, fact or ""), f"{fact} is not in: {text}"
    if (remedy or "").startswith("shardprep "):
        # The message has the command once and its flags exist. N is a placeholder for the user's value.
        assert text.count(remedy) == 1
        _, *words = shlex.split(re.sub(r"\bN\b", "2", remedy))
        call_main(*words, "--help").ends(0)
    if refusal.heals:
        typed = scene.filled(re.sub(r"\bNEW\b", "$NEW", remedy))
        if typed.startswith(("mkdir ", "shardprep ")):
            type_in(typed).ends(0)
            typed = ""
        ended = refusal.use.call(scene, typed)
        assert ended is None or ended.ends(0)
