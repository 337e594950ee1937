"""What shards remember of a tokenizer, given its files; the folder of them that a data set carries."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardprep.errors import BrokenShard, CannotWrite, NotFound, OtherTokenizer, ShardprepError
from shardprep.files import NOT_THERE, FileStamp, PublishedFolder, names_in, read_regular
from shardprep.format.dataset_spec import TokenizerSpec, fingerprint_of
from shardprep.format.names import TOKENIZER_DIR
from shardprep.format.tokenizer_files import (
    MAX_TOKENIZER_BYTES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    stamp_tokenizer,
)
from shardprep.hub import is_library_fault

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def describe_tokenizer(folder: Path, model_id: str) -> TokenizerSpec:
    """What shards remember of the tokenizer in ``folder``. Raises NotFound, BrokenShard, ReadWriteError."""
    from tokenizers import Tokenizer

    text = _text_of(folder / TOKENIZER_FILE)
    try:
        config = json.loads(_text_of(folder / TOKENIZER_CONFIG) or "{}")
        return spec_of_tokenizer(Tokenizer.from_str(text), json.loads(text), config, model_id)
    except ShardprepError:
        raise
    except BaseException as error:
        if not is_library_fault(error):
            raise
        raise BrokenShard(
            f"the files in {folder} are no tokenizer's: {' '.join(str(error).split())[:300]}"
        ) from None


def spec_of_tokenizer(
    tokenizer: Tokenizer, data: dict[str, Any], config: dict[str, Any], model_id: str
) -> TokenizerSpec:
    """The same of a tokenizer that is loaded, given its two files parsed."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    names = special_tokens_of(config)

    def token_id(name: str) -> int | None:
        token = names[name]
        return vocab.get(token) if isinstance(token, str) else None

    return TokenizerSpec(
        model_id=model_id,
        fingerprint=fingerprint_of(data),
        vocab_size=max(vocab.values()) + 1,
        bos_token_id=token_id("bos_token"),
        eos_token_id=token_id("eos_token"),
        pad_token_id=token_id("pad_token"),
    )


def special_tokens_of(config: dict[str, Any]) -> dict[str, str | None]:
    """BOS, EOS and pad as a tokenizer_config.json names them, None for each that it does not."""
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token")}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}


def _text_of(path: Path) -> str:
    """The text of a tokenizer's file; of a configuration that is not there, none."""
    try:
        return read_regular(path, max_bytes=MAX_TOKENIZER_BYTES).decode("utf-8")
    except NOT_THERE:
        if path.name == TOKENIZER_CONFIG:
            return ""
        raise NotFound(f"{path} is missing") from None
    except UnicodeDecodeError as error:
        raise BrokenShard(f"{path} is not UTF-8 ({error})") from None


def publish_tokenizer(
    resolved: Path, output_dir: Path, spec: TokenizerSpec, frozen: dict[str, FileStamp] | None
) -> dict[str, FileStamp]:
    """Make ``output_dir/tokenizer`` hold the tokenizer of ``resolved``; returns its files' stamps.

    ``frozen``: the files that a plan in the folder names. They are kept where they are whole, else put back.
    Without a plan an equal tokenizer is kept, so that planners that race agree, and another is replaced.
    Raises OtherTokenizer where the resolved files are not ``frozen``, CannotWrite or ReadWriteError.
    """
    target = output_dir / TOKENIZER_DIR

    def is_there() -> bool:
        try:
            if frozen is not None:
                return stamp_tokenizer(target) == frozen
            return describe_tokenizer(target, spec.model_id) == spec
        except (NotFound, BrokenShard):
            return False

    if is_there():
        return stamp_tokenizer(target)
    if frozen is not None and stamp_tokenizer(resolved) != frozen:
        raise OtherTokenizer(
            f"{target} is damaged, and the files of {spec.model_id} are not those of the plan, to the byte: "
            "plan with the versions of transformers and tokenizers that planned, or into a new folder"
        )
    with PublishedFolder(target) as folder:
        for name in names_in(resolved):
            try:
                shutil.copyfile(resolved / name, folder.temporary / name)
            except OSError as error:
                raise CannotWrite(f"{target / name} cannot be written: {error.strerror}") from None
        if not folder.publish_first() and not is_there():  # another planner may have been faster
            folder.publish()
    return stamp_tokenizer(target)
