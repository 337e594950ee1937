"""The files of a model that decide the ids of its tokenizer."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson

from preprocess.read.inputs import fetch_command
from shardprep import errors, files
from shardprep.format import names
from shardprep.format.names import CHAT_TEMPLATES_DIR, TOKENIZER_FILE

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
MODEL_CONFIG = "config.json"
COPIED = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, "chat_template.jinja")
Files = dict[Annotated[str, msgspec.Meta(pattern=r"\A[\w.-]+\Z")], bytes]  # contents by name


def write_files(contents: Files, folder: Path) -> None:
    """Write the files of a tokenizer. Raises CannotWrite."""
    try:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        found = f"the tokenizer's files cannot be written there: {error.strerror}"
        raise errors.CannotWrite(path=folder, found=found, expected="some space (df; TMPDIR)") from None


def read_files(folder: Path) -> Files | None:
    """Read the files of a model that decide its tokenizer's ids, or return None if others do, too."""
    if files.is_folder(folder / CHAT_TEMPLATES_DIR):
        return None
    contents = {}
    for name in (TOKENIZER_FILE, ADDED_TOKENS, MODEL_CONFIG, *COPIED):
        with contextlib.suppress(*files.NOT_THERE):
            contents[name] = files.read_regular(folder / name, max_bytes=names.MAX_TOKENIZER_BYTES)
            command = fetch_command(contents[name])
            if command is not None:
                expected = "the file itself"
                advice = f"run in its repository: {command}"
                raise errors.NotFound(
                    path=folder / name, found="a pointer to a file", expected=expected, advice=advice
                )
    return contents if TOKENIZER_FILE in contents else None


def json_object(contents: Files, name: str) -> dict[str, Any]:
    """Parse a file with a JSON object, which is empty if there is no such file. Raises BrokenShard."""
    try:
        data = orjson.loads(contents.get(name, b"{}"))
    except ValueError as error:
        raise errors.BrokenShard(f"the tokenizer's {name} is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise errors.BrokenShard(f"the tokenizer's {name} is a {type(data).__name__}, expected an object")
    return data


def special_tokens_of(config: dict[str, Any]) -> dict[str, str | None]:
    """Return the BOS, EOS and pad token of a tokenizer_config.json, None for each that it does not name."""
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token")}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
