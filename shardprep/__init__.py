"""Raw text to token shards to batches. ``shardprep --help`` is the way in.

The other packages build on this one. It imports none of them until one of their names is used.
"""

import os
import sys

# Until the current folder has left the path, only modules that Python has loaded itself may be used.
_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
PACKAGES = ("shardprep", "preprocess", "loader", "slurm", "lustre")


def path_without_current_folder(path: list[str]) -> list[str]:
    """Return a path of modules without the current folder, unless it is ours or PYTHONPATH spells it out.

    Relative entries are relative to the current folder, so they are left out, too.
    """
    try:
        here = os.getcwd()  # noqa: PTH109
    except OSError:  # the folder is gone
        here = ""
    named = [_HOME, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    is_absolute = os.path.isabs
    return [each for each in path if is_absolute(each) and (each != here or each in named)]


def _runs_as_module() -> bool:
    """Return whether Python is just looking for one of our packages, to run it for ``python -m``."""
    if sys.argv[:1] != ["-m"] or "-m" not in sys.orig_argv:
        return False
    after = sys.orig_argv[sys.orig_argv.index("-m") + 1 :]
    return after[:1] != [] and after[0].partition(".")[0] in PACKAGES


if _runs_as_module():  # ``python -m`` puts the current folder first
    sys.path[:] = path_without_current_folder(sys.path)

import signal  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if sys.version_info < (3, 10):  # noqa: UP036  before any syntax that they cannot parse
    raise ImportError(
        f"shardprep needs Python 3.10 or newer, and {sys.executable} is Python {sys.version.split()[0]}. "
        "Make the virtual environment with a newer one: python3.12 -m venv .venv"
    )

if TYPE_CHECKING:
    from loader import get_llama3_dataloader as get_llama3_dataloader

__version__ = "0.1.0"
HOME = Path(_HOME)  # our packages are side by side, installed or not


class LeaveOut(Exception):
    """Raise it in a function of ``plan --transform`` to leave a document out, counted by this reason."""


def main() -> int:
    """Run the command of this process."""
    begin_command()
    from shardprep.__main__ import main as run

    return run()


def begin_command() -> None:
    """Begin a command, before it imports anything.

    The current folder leaves the path of modules. A signal during the imports waits until the command can
    stop cleanly.
    """
    sys.path[:] = path_without_current_folder(sys.path)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))


def call_started() -> None:
    """Call the function that the first argument names, ``module:name``, and exit with what it returns.

    ``shardprep.processes`` starts Python so.
    """
    from importlib import import_module

    sys.path[:] = path_without_current_folder(sys.path)
    module, _, name = sys.argv.pop(1).partition(":")
    sys.exit(getattr(import_module(module), name)())


def check_not_hidden(package: str) -> None:
    """Raise ImportError if a user's module, such as a preprocess.py, hides one of our packages.

    Under ``python -m`` print the message instead, and exit with code 2.
    """
    from importlib.util import find_spec

    spec = find_spec(package)
    places = list((spec and spec.submodule_search_locations) or ())
    # Python itself reports a package that does not exist.
    if spec is None or any(Path(place).parent.samefile(HOME) for place in places):
        return
    hiding = spec.origin or (places[0] if places else package)
    message = (
        f"{hiding} hides shardprep's package of the same name, which is needed here; rename it, or keep it "
        "away from the script that you start and from the folder that you start it in"
    )
    if sys.argv[:1] == ["-m"]:  # while Python looks for the package to run
        from shardprep.console import say

        say(f"error: {message}")
        raise SystemExit(2)
    raise ImportError(message, name=package, path=hiding)


def __getattr__(name: str) -> Any:
    """Return ``get_llama3_dataloader``. Its import takes seconds (torch), which commands do not pay."""
    if name == "get_llama3_dataloader":
        import loader

        return loader.get_llama3_dataloader
    raise AttributeError(f"module 'shardprep' has no attribute {name!r}")
