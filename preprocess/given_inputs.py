"""Find the function and the input folder of each of several data sets, among those that a user names.

``--transform`` and ``--input_dir`` may be repeated, in any order: a function belongs to the data sets whose
plans have its hash, and a folder to those whose planned inputs are in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from preprocess.make.settings import InputSettings
from preprocess.read.code_files import CodeFiles
from preprocess.read.documents import DocumentBatch, DocumentReader
from preprocess.read.inputs import OpenInput, sample_sha256
from shardprep.console import quoted
from shardprep.errors import NotFound, Refused, UsageError
from shardprep.format import commands, names
from shardprep.format.blanked import read_blanked
from shardprep.format.data_folder import DataFolder
from shardprep.format.plan import Plan


def add_given_inputs(parser: argparse.ArgumentParser) -> None:
    """Add the flags of GivenInputs."""
    text = "folder of the raw input files, if they moved; repeat it for other data sets (default: the plan's)"
    parser.add_argument("--input_dir", metavar="PATH", type=Path, action="append", default=[], help=text)
    text = (
        "the file of the plan's --transform, unchanged; required if the plan has one; repeat it for other "
        "data sets (default: none)"
    )
    parser.add_argument("--transform", metavar="PATH", type=Path, action="append", default=[], help=text)


class GivenInputs:
    """The functions and input folders that a user named."""

    def __init__(self, functions: Sequence[Path], folders: Sequence[Path]) -> None:
        self._functions = functions
        self._folders = folders
        self._used: set[Path] = set()

    def of(self, data_dir: DataFolder, plan: Plan) -> InputSettings:
        """Return those of a data set.

        Raises UsageError or Refused if its function is not among them, NotFound if its inputs are nowhere.
        """
        folder = self._folder_of(data_dir, plan)
        function = self._function_of(data_dir, plan)
        settings = InputSettings(input_dir=folder, transform=function)
        self._used |= {each for each in (settings.input_dir, settings.transform) if each is not None}
        return settings

    def check_all_used(self) -> None:
        """Raise UsageError if a function or a folder belongs to none of the data sets."""
        flags = [("--transform", path, "the function of one of the plans") for path in self._functions]
        flags += [("--input_dir", path, "a folder with a plan's inputs") for path in self._folders]
        for flag, path, expected in flags:
            if path not in self._used:
                raise UsageError(found=f"{flag} {path}", expected=f"{expected}, or no such flag")

    def _folder_of(self, data_dir: DataFolder, plan: Plan) -> Path | None:
        holder = next((folder for folder in self._folders if _has_inputs(folder, plan)), None)
        if holder is not None or not self._folders or _has_inputs(plan.input_dir, plan):
            return holder
        if len(self._folders) == 1 and not self._used:
            return self._folders[0]  # reading it says what is wrong
        folders = ", ".join(quoted(folder) for folder in (*self._folders, plan.input_dir))
        remedy = "--input_dir FOLDER"
        found_now = f"its input {plan.inputs[0].path} is not, as it was planned, in any of {folders}"
        expected = f"its folder: add {remedy} for this data set"
        raise NotFound(path=data_dir, found=found_now, expected=expected, remedy=remedy)

    def _function_of(self, data_dir: DataFolder, plan: Plan) -> Path | None:
        planned = plan.options.transform_sha256
        if not planned:
            return None
        functions = []
        for path in self._functions:
            try:
                sha256 = CodeFiles(path, plan.options.transform_files).sha256
            except (NotFound, UsageError) as error:  # another plan's, with other --transform_files
                if not path.exists():
                    raise
                functions.append(f"{path} ({error})")
                continue
            if sha256 == planned:
                return path
            functions.append(f"{path} with sha256 {sha256[:12]}")
        what = f"a plan with a function for documents (sha256 {planned[:12]})"
        remedy = "--transform FILE"
        if not functions:
            raise UsageError(
                path=data_dir, found=f"{what}, but no file with it", expected=remedy, remedy=remedy
            )
        expected = f"the planned function: add {remedy} for this data set"
        raise Refused(
            path=data_dir, found=f"{what}, but {', '.join(functions)}", expected=expected, remedy=remedy
        )


def blank_command(data_dir: DataFolder, ids: Path, where: InputSettings) -> str:
    """Return the command that blanks the documents of a list. ``where``: of this data set."""
    # The flags of this process may be those of other data sets, too.
    flags = {"input_dir": where.input_dir, "transform": where.transform}
    return commands.blank(data_dir, ids, flags=flags)


def _has_inputs(folder: Path, plan: Plan) -> bool:
    """Return whether a folder has the first and the last input of a plan, by their sizes and samples."""
    for item in {plan.inputs[0].path: plan.inputs[0], plan.inputs[-1].path: plan.inputs[-1]}.values():
        try:
            file = OpenInput(folder / item.path)
        except NotFound:
            return False
        if file.stamp.num_bytes != item.num_bytes or sample_sha256(file) != item.sha256:
            return False
    return True


def unblanked_documents(
    plan: Plan, folder: DataFolder, shard_id: int, reader: DocumentReader
) -> Iterator[DocumentBatch]:
    """Read the documents of a shard that are not blanked. Raises the errors of reading the input."""
    blanked = None
    if plan.options.blanked and shard_id in names.ids_of_ranges(plan.options.blanked):
        blanked = read_blanked(folder, plan, shard_id)
    for documents in reader.read_shard(plan.shard(shard_id)):
        if blanked is not None:
            is_gone = blanked.are_at(documents.input_number, documents.offsets)
            documents = documents.only(np.flatnonzero(~is_gone))
        yield documents
