"""Import modules from the bytes that were hashed, whatever is on the disk now."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preprocess.read.code_files import CodeFiles
from preprocess.read.library_files import absolute


class HashedModules(importlib.abc.MetaPathFinder):
    """Finds the modules among the named files. In ``sys.meta_path`` it comes before those of any folder."""

    def __init__(self, files: CodeFiles) -> None:
        self.files = files
        self.served: types.CodeType | None = None  # the last module that was compiled from hashed bytes
        self.names: set[str] = set()  # modules that came from ``files``
        self.library_names = files.imported_names()  # top-level modules that the code asked for

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,  # noqa: ARG002 - importlib's signature
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how a module of the files is loaded, or None."""
        files = self.files
        parent = fullname.rpartition(".")[0]
        # By its name, unless it is a module of a library's package.
        if not parent or parent in self.names:
            file = files.module_file(fullname)
            if file is not None:
                return self.spec_of(fullname, file)
            folder = fullname.replace(".", "/")
            if files.has_modules_in(folder):  # a folder without __init__.py
                self.names.add(fullname)
                spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
                spec.submodule_search_locations = [str(each / folder) for each in files.folders]
                return spec
        # By its file, in a folder that the code added to sys.path. Python could take a .pyc of other bytes.
        found_spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found_spec is not None and found_spec.origin:
            file = files.name_of(absolute(found_spec.origin))
            if file is not None and file.endswith(".py"):
                return self.spec_of(fullname, file)
        if path is None:
            self.library_names.add(fullname)
        return None

    def spec_of(self, fullname: str, file: str) -> importlib.machinery.ModuleSpec:
        """Return how a module is loaded from a named file, and remember that it comes from there."""
        self.names.add(fullname)
        loader = _HashedModule(self, file)
        is_package = file.endswith("/__init__.py")
        folders = [str(Path(loader.path).parent)] if is_package else None
        spec = importlib.util.spec_from_file_location(
            fullname, loader.path, loader=loader, submodule_search_locations=folders
        )
        assert spec is not None  # it is None only if there is no loader
        spec.cached = None  # there is no .pyc of hashed bytes
        return spec


class _HashedModule(importlib.abc.InspectLoader):
    """Loads a module from hashed bytes."""

    def __init__(self, modules: HashedModules, name: str) -> None:
        self._modules = modules
        self._files = modules.files
        self._name = name
        self.path = str(self._files.paths[name])

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002 - importlib's signature
        return self.path

    def is_package(self, fullname: str) -> bool:  # noqa: ARG002
        return self._name.endswith("/__init__.py")

    def get_source(self, fullname: str) -> str:  # noqa: ARG002
        return importlib.util.decode_source(self._files.contents[self._name])

    def get_data(self, path: str) -> bytes:
        """Return the bytes of a named file: what pkgutil.get_data asks for."""
        name = self._files.name_of_path.get(os.path.abspath(path))  # noqa: PTH100
        if name is None:
            raise FileNotFoundError(f"{path} is not among --transform_files")
        return self._files.contents[name]

    def get_resource_reader(self, fullname: str) -> Any:  # noqa: ARG002
        from importlib.readers import FileReader

        return FileReader(self)  # type: ignore[arg-type]  # it uses only ``path``

    def exec_module(self, module: types.ModuleType) -> None:
        content = self._files.contents[self._name]
        # dont_inherit: the features that this module imports from __future__ are not the user's.
        compiled = compile(content, self.path, "exec", dont_inherit=True)
        self._modules.served = compiled
        exec(compiled, vars(module))  # noqa: S102
