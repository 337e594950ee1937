"""DATA/tokenizer: the files of a tokenizer that a data set carries, which stay as they were at planning."""

from __future__ import annotations

import contextlib
from pathlib import Path

from shardprep.errors import NotFound, OtherTokenizer
from shardprep.files import NOT_THERE, FileStamp, names_in, stamp_file
from shardprep.format.names import TOKENIZER_DIR

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
MAX_TOKENIZER_BYTES = 256 << 20  # the largest known have 40 MB


def stamp_tokenizer(folder: Path) -> dict[str, FileStamp]:
    """Size and sha256 of each file in a tokenizer's folder, by name; hidden files are left out.

    Llama 3's 17.2 MB cost a worker 18 ms of CPU. Raises BrokenShard for what is no regular file.
    """
    stamps = {}
    for name in names_in(folder):
        if not name.startswith("."):
            with contextlib.suppress(*NOT_THERE):  # a link to nothing
                stamps[name] = stamp_file(folder / name)
    return stamps


def check_tokenizer_files(output_dir: Path, planned: dict[str, FileStamp]) -> None:
    """That DATA/tokenizer holds the files that were there at planning, and no others.

    Raises NotFound where one is missing, OtherTokenizer naming those that differ, ReadWriteError.
    """
    folder = output_dir / TOKENIZER_DIR
    found = stamp_tokenizer(folder)
    again = (
        "bring it back as it was, or run the plan command again with the same --model_id, inputs and "
        "options, and the versions of its libraries that planned"
    )
    if missing := sorted(planned.keys() - found.keys()):
        raise NotFound(path=folder / missing[0], found="missing", expected=f"the planned file; {again}")
    if added := sorted(found.keys() - planned.keys()):
        expected = "no such file, as the plan's tokenizer has none; take it away"
        raise OtherTokenizer(path=folder / added[0], found="a file", expected=expected)
    for name, stamp in planned.items():
        if found[name] != stamp:
            what = f"{found[name].num_bytes} bytes of sha256 {found[name].sha256[:12]}"
            expected = f"{stamp.num_bytes} of {stamp.sha256[:12]}, as planned; {again}"
            raise OtherTokenizer(path=folder / name, found=what, expected=expected)
