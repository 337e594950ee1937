"""The bytes of a user's file and of the files that it names, read and hashed; nothing here runs them."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import shlex
from pathlib import Path

from shardprep.console import quoted
from shardprep.errors import NotFound, Refused, UsageError
from shardprep.files import NOT_THERE, is_folder, read_with_status

MAX_FILE_BYTES = 64 << 20
_MAX_FILES = 1000


class CodeFiles:
    """The bytes of a user's file and of the files that it names, and their hash."""

    def __init__(self, path: Path, names: str) -> None:
        """Read them. Raises NotFound, UsageError, BrokenShard or ReadWriteError.

        ``names``: other files and folders that the code uses, such as "words.txt,helpers.py,rules". They are
        beside ``path``, or if it is a link, beside the file that it names.
        """
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
        self.folders = list(dict.fromkeys([self.path.parent, path.resolve().parent]))
        self.names = [name for name in map(str.strip, names.split(",")) if name]
        self.contents: dict[str, bytes] = {}  # by name, relative to the folder; the main file comes first
        self.paths: dict[str, Path] = {}  # where each was found
        self._stats: dict[str, tuple[int, ...]] = {}
        self._read(self.path.name, self.path)
        for name in self.names:
            self._add(name)
        # Both forms of each path, because an import may follow links or not.
        self.name_of_path = {os.path.realpath(found): name for name, found in self.paths.items()}
        self.name_of_path |= {str(found): name for name, found in self.paths.items()}
        self.sha256 = self._hash()

    def _hash(self) -> str:
        """Return the hash of all files and of their names. The name of the main file does not count."""
        hashes = {name: hashlib.sha256(raw).hexdigest() for name, raw in self.contents.items()}
        main_hash = hashes.pop(self.path.name)
        listed = json.dumps([main_hash, hashes], sort_keys=True)
        return hashlib.sha256(listed.encode()).hexdigest()

    def _add(self, name: str) -> None:
        relative = Path(name)
        if relative.is_absolute() or ".." in relative.parts or relative.as_posix() in self.contents:
            expected = f"names of other files or folders beside {self.path}"
            raise UsageError.of_value("--transform_files", name, expected)
        path = next((folder / name for folder in self.folders if os.path.lexists(folder / name)), None)
        if path is None:
            missing = self.path.parent / name
            raise NotFound(f"{missing}, of --transform_files, does not exist", path=missing)
        if not is_folder(path):
            self._read(relative.as_posix(), path)
            return
        for folder, subfolders, files in os.walk(path):
            # Hidden files, caches and backups of editors come and go.
            subfolders[:] = sorted(each for each in subfolders if each[0] != "." and each != "__pycache__")
            inside = relative / Path(folder).relative_to(path)
            for file in sorted(files):
                if file[0] != "." and not file.endswith(("~", ".pyc")):
                    self._read((inside / file).as_posix(), Path(folder, file))

    def _read(self, name: str, path: Path) -> None:
        if len(self.contents) == _MAX_FILES:
            expected = f"at most {_MAX_FILES} files"
            advice = "name a smaller folder"
            raise UsageError(found="--transform_files", expected=expected, advice=advice)
        try:
            content, status = read_with_status(path, max_bytes=MAX_FILE_BYTES)
        except NOT_THERE:
            raise NotFound(f"{path}, of --transform, does not exist", path=path) from None
        self.contents[name] = content
        self.paths[name] = path
        self._stats[name] = (status.st_size, status.st_mtime_ns, status.st_ino)

    def check_unchanged(self) -> None:
        """Raise Refused if a file has other bytes now. The code may read tables whenever it is called."""
        for name, path in self.paths.items():
            try:
                status = os.stat(path)  # noqa: PTH116
                if (status.st_size, status.st_mtime_ns, status.st_ino) == self._stats[name]:
                    continue
                is_equal = self.is_as_hashed(name)
            except NOT_THERE:
                is_equal = False
            if not is_equal:
                raise self.changed(name)

    def is_as_hashed(self, name: str) -> bool:
        """Return whether a file on the disk has the hashed bytes. Raises NOT_THERE and ReadWriteError."""
        return read_with_status(self.paths[name], max_bytes=MAX_FILE_BYTES)[0] == self.contents[name]

    def changed(self, name: str) -> Refused:
        """Build the error for a file that changed while the code was in use."""
        expected = "the same bytes as at the start; restore the file and run this again, or plan again"
        return Refused(path=self.paths[name], found="other bytes while it was in use", expected=expected)

    def name_of(self, path: str) -> str | None:
        """Return the name of a file among the named ones, or None."""
        return self.name_of_path.get(path, self.name_of_path.get(os.path.realpath(path)))

    def module_file(self, name: str) -> str | None:
        """Return the named file of a module such as "rules.words", or None. A package wins, as in Python."""
        path = name.replace(".", "/")
        candidates = (f"{path}/__init__.py", f"{path}.py")
        return next((each for each in candidates if each in self.contents), None)

    def has_modules_in(self, folder: str) -> bool:
        """Return whether a named file is a module below a folder."""
        return any(name.startswith(f"{folder}/") and name.endswith(".py") for name in self.contents)

    def imported_names(self) -> set[str]:
        """Return the top-level modules that import statements in the files name."""
        imported: set[str] = set()
        for name, content in self.contents.items():
            if not name.endswith(".py") and name != self.path.name:
                continue
            with contextlib.suppress(SyntaxError, ValueError, RecursionError):
                for node in ast.walk(ast.parse(content)):
                    if isinstance(node, ast.Import):
                        imported |= {each.name.partition(".")[0] for each in node.names}
                    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                        imported.add(node.module.partition(".")[0])
        return imported

    def not_named(self, path: str) -> UsageError:
        """Build the error for code of the user that was not named, with the flag that names it."""
        found = f"{self.path} imports {path}, which is not planned"
        flag = self.flag_to_name(path)
        root = self._root_of(path)
        is_beside = any(root.is_relative_to(each) for each in self.folders)
        copied = "" if is_beside else f"copy {quoted(root)} beside {quoted(self.path)}, and "
        message = f"{found}; {copied}plan with {flag}"
        return UsageError(message, path=path, found=f"{path}, which is not planned", remedy=flag)

    def flag_to_name(self, path: str) -> str:
        """Return ``--transform_files`` with the names so far and that of a file or of its package."""
        root = self._root_of(path)
        folder = next((each for each in self.folders if root.is_relative_to(each)), None)
        name = root.name if folder is None else root.relative_to(folder).as_posix()
        return f"--transform_files {shlex.quote(','.join([*self.names, name]))}"

    def _root_of(self, path: str) -> Path:
        """Return the whole package that a module is in, because its modules import each other."""
        root = Path(path)
        while (root.parent / "__init__.py").exists() and root.parent not in self.folders:
            root = root.parent
        return root
