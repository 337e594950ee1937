"""DATA/tokenizer: the files that a plan stamped, read only if they are as they were."""

from __future__ import annotations

import hashlib

from shardprep import errors, files
from shardprep.files import FileStamp
from shardprep.format import names
from shardprep.format.data_folder import DataFolder
from shardprep.format.plan import Plan


def check_tokenizer_files(folder: DataFolder, planned: dict[str, FileStamp], wanted: str = "") -> bytes:
    """Check that DATA/tokenizer has the planned files and no others. Return the contents of file ``wanted``.

    Hidden files are ignored. Hashing Llama 3's files takes 18 ms of CPU. Raises NotFound for a missing file,
    OtherTokenizer for another one, and BrokenShard for a link.
    """
    content = b""
    listed = {name for name in folder.names(names.TOKENIZER_DIR) if not name.startswith(".")}
    for name in sorted(planned.keys() | listed):
        stamp = planned.get(name)
        found = "no such file"
        kind: type[errors.ShardprepError] = errors.NotFound
        if stamp is None:  # not read: its size says nothing
            found = "a file that the plan does not have"
            kind = errors.OtherTokenizer
        elif name in listed:
            raw, found = _read_stamped(folder, f"{names.TOKENIZER_DIR}/{name}", stamp, keeps=name == wanted)
            content = raw or content
            kind = errors.OtherTokenizer
        if not found:
            continue
        planned_text = "no such file" if stamp is None else _stamp_text(stamp)
        raise kind(
            path=folder.path_of(f"{names.TOKENIZER_DIR}/{name}"),
            found=found,
            expected=f"{planned_text}, as planned",
            advice="restore it, or plan again with the same inputs, options and libraries",
        )
    return content


def read_tokenizer(folder: DataFolder, plan: Plan) -> dict[str, bytes]:
    """Return the contents of DATA/tokenizer by name. Raises as ``check_tokenizer_files``."""
    return {name: check_tokenizer_files(folder, plan.tokenizer_files, name) for name in plan.tokenizer_files}


def refuse_other_tokenizer(folder: DataFolder, wanted: dict[str, FileStamp]) -> None:
    """Raise Refused if a folder without a plan has another tokenizer, which a plan would replace."""
    if folder.status_of(names.TOKENIZER_DIR) is None:
        return
    try:
        check_tokenizer_files(folder, wanted)
    except (errors.OtherTokenizer, errors.NotFound, errors.BrokenShard) as error:
        found = f"{error.found}, in a folder of somebody else, or of another plan"
        expected = f"no {names.TOKENIZER_DIR} there, or the same"
        advice = "move it away, or use another folder"
        raise errors.Refused(path=error.path, found=found, expected=expected, advice=advice) from None


def _read_stamped(folder: DataFolder, name: str, stamp: FileStamp, *, keeps: bool) -> tuple[bytes, str]:
    """Read a file. Returns its content if it ``keeps`` it, and how it differs from its stamp, or ""."""
    raw = b""
    with files.errors_named(folder.path_of(name)), folder.open_hashed(name) as file:
        if file.num_bytes != stamp.num_bytes:
            return raw, f"{file.num_bytes} bytes"
        if keeps:
            raw = files.read_whole(file, max_bytes=names.MAX_TOKENIZER_BYTES)
            sha256 = hashlib.sha256(raw).hexdigest()
        else:
            sha256 = file.sha256()
    now = FileStamp(num_bytes=stamp.num_bytes, sha256=sha256)
    return raw, "" if now == stamp else _stamp_text(now)


def _stamp_text(stamp: FileStamp) -> str:
    return f"{stamp.num_bytes} bytes of sha256 {stamp.sha256[:12]}"
