"""A model's tokenizer, resolved once at planning into files that tasks read with the hub off."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from preprocess.shard_format import (
    TOKENIZER_DIR,
    CannotWrite,
    NotFound,
    OtherTokenizer,
    TokenizerSpec,
    UsageError,
    tokenizer_fingerprint,
)

TOKENIZER_FILE = "tokenizer.json"


def resolve_tokenizer(model_id: str, folder: Path) -> TokenizerSpec:
    """Write the files of a model's tokenizer, and nothing else of the model, into ``folder``.

    transformers resolves it, because training will: what it changes about a tokenizer.json (a BOS
    switched on in the configuration, say) is in the files written. Takes 2-3 s for the import.
    Raises NotFound (no such model, or no network), UsageError (a slow tokenizer).
    """
    tokenizer = _auto_tokenizer(model_id)
    if not getattr(tokenizer, "is_fast", False):
        raise UsageError(
            f"the tokenizer of {model_id} is a slow one ({type(tokenizer).__name__}); a fast one is needed: "
            "look for a copy of the model with a tokenizer.json, or convert it with transformers"
        )
    try:
        tokenizer.save_pretrained(str(folder))
    except Exception as error:  # tokenizers' own writer raises a bare one
        reason = getattr(error, "strerror", None) or error
        raise CannotWrite(
            f"tokenizer files cannot be written to {folder}: {reason}; free some space there (df), or "
            "let TMPDIR name another folder"
        ) from None
    return describe_tokenizer(folder, model_id)


def _auto_tokenizer(model_id: str) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_id, trust_remote_code=False)
    except Exception as error:
        where = (
            f"in the folder {model_id}"
            if Path(model_id).is_dir()
            else f"{model_id!r} on the hub or in its cache"
        )
        reason = " ".join(str(error).split())[:400]
        raise NotFound(
            f"no usable tokenizer was found {where} ({type(error).__name__}: {reason}); expected a folder "
            "with a tokenizer.json, or a model's name and a way to the hub (a gated model needs `hf auth "
            "login`, a node without network a cache filled elsewhere); pass it as --model_id"
        ) from None


def describe_tokenizer(folder: Path, model_id: str) -> TokenizerSpec:
    """What shards remember of the tokenizer whose files are in ``folder``."""
    from tokenizers import Tokenizer

    text = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
    vocab = Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_bytes()) if config_path.exists() else {}

    def token_id(name: str) -> int | None:
        token = config.get(name)
        return vocab.get(str(token["content"] if isinstance(token, dict) else token))

    return TokenizerSpec(
        model_id=model_id,
        fingerprint=tokenizer_fingerprint(text),
        vocab_size=max(vocab.values()) + 1,
        bos_token_id=token_id("bos_token"),
        eos_token_id=token_id("eos_token"),
        pad_token_id=token_id("pad_token"),
    )


def publish_tokenizer(resolved: Path, output_dir: Path, spec: TokenizerSpec) -> Path:
    """Move resolved files to ``output_dir/tokenizer`` in one step; returns that folder.

    The first of several planners wins; the others compare. Raises OtherTokenizer or CannotWrite.
    """
    target = output_dir / TOKENIZER_DIR
    try:
        staging = Path(tempfile.mkdtemp(prefix=f".{TOKENIZER_DIR}.", suffix=".tmp", dir=output_dir))
    except OSError as error:
        raise CannotWrite(f"--output_dir {output_dir} cannot be written to: {error.strerror}") from None
    try:
        for path in sorted(resolved.iterdir()):
            shutil.copyfile(path, staging / path.name)
        umask = os.umask(0)
        os.umask(umask)
        staging.chmod(0o777 & ~umask)
        staging.rename(target)
    except OSError as error:
        if not target.is_dir():
            raise CannotWrite(f"{target} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    found = describe_tokenizer(target, spec.model_id)
    if found != spec:
        raise OtherTokenizer(
            f"{target} holds a tokenizer with fingerprint {found.fingerprint[:12]}, --model_id "
            f"{spec.model_id} has {spec.fingerprint[:12]}; use a new --output_dir for another tokenizer"
        )
    return target
