"""A tokenizer as transformers loads and saves it, for those that nothing smaller can be trusted with.

transformers imports torch where that is installed, 1-2 s and 200 MB for nothing, and neither of them belongs
in a process that makes shards. So a process of its own loads and saves, without torch, and ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shardprep.errors import CannotWrite, ReadWriteError, ShardprepError, UsageError
from shardprep.hub import no_tokenizer
from shardprep.signals import start_child


def save_in_own_process(model_id: str, folder: Path) -> None:
    """``save_tokenizer`` in a process that ends with it; raises what that raises, or ReadWriteError."""
    ours, theirs = Pipe(duplex=False)
    process = start_child(_save, model_id, folder, theirs)
    theirs.close()
    try:
        outcome: ShardprepError | None = ours.recv()
    except EOFError:
        process.join()
        raise ReadWriteError(
            f"the process that loads the tokenizer of {model_id} ended with {process.exitcode} and without a "
            "word; is there too little memory? Run this again"
        ) from None
    finally:
        ours.close()
        process.terminate()
        process.join()
    if outcome is not None:
        raise outcome


def _save(model_id: str, folder: Path, pipe: Connection) -> None:
    """Body of the process."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    outcome = None
    try:
        save_tokenizer(model_id, folder)
    except ShardprepError as error:
        outcome = error
    with contextlib.suppress(BrokenPipeError):
        pipe.send(outcome)


def save_tokenizer(model_id: str, folder: Path) -> None:
    """Write the files of a model's tokenizer, and nothing else of the model, into ``folder``.

    Raises NotFound (no such model, or no network), UsageError (a slow tokenizer), CannotWrite.
    """
    tokenizer = _auto_tokenizer(model_id)
    if not getattr(tokenizer, "is_fast", False):
        raise UsageError(
            f"the tokenizer of {model_id} is a slow one ({type(tokenizer).__name__}); a fast one is needed: "
            "look for a copy of the model with a tokenizer.json, or convert it with transformers"
        )
    try:
        # Several chat templates would stand in a folder of their own; in tokenizer_config.json all do.
        several = isinstance(getattr(tokenizer, "chat_template", None), dict)
        tokenizer.save_pretrained(str(folder), **({"save_jinja_files": False} if several else {}))
    except Exception as error:  # tokenizers' own writer raises a bare one
        reason = getattr(error, "strerror", None) or error
        raise CannotWrite(
            f"tokenizer files cannot be written to {folder}: {reason}; free some space there (df), or "
            "let TMPDIR name another folder"
        ) from None


def _auto_tokenizer(model_id: str) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_id, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:400]
        raise no_tokenizer(model_id, f"{type(error).__name__}: {reason}") from None
    if tokenizer.get_vocab().keys() <= tokenizer.get_added_vocab().keys():  # as transformers 5.0 makes one up
        raise no_tokenizer(model_id, f"{type(tokenizer).__name__} without a vocabulary: a file is missing")
    return tokenizer
