"""Raw text to token shards to batches. ``shardprep --help`` is the way in.

The other packages build on this one. It imports none of them until one of their names is used.
"""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 10):  # noqa: UP036  before any syntax that they cannot parse
    raise ImportError(
        f"shardprep needs Python 3.10 or newer, and {sys.executable} is Python {sys.version.split()[0]}. "
        "Make the virtual environment with a newer one: python3.12 -m venv .venv"
    )

if TYPE_CHECKING:
    from loader import get_llama3_dataloader as get_llama3_dataloader

__version__ = "0.1.0"
HOME = Path(__file__).parents[1]  # our packages are side by side, installed or not


class LeaveOut(Exception):
    """Raise it in a function of ``plan --transform`` to leave a document out, counted by this reason."""


def main() -> int:
    """Run the command of this process. Ctrl-C during the imports waits until it can stop cleanly."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    from shardprep.__main__ import main as run

    return run()


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
    found = spec.origin or (places[0] if places else package)
    message = (
        f"{found} hides shardprep's package of the same name, which is needed here; rename it, or keep it "
        "away from the script that you start and from the folder that you start it in"
    )
    if sys.argv[:1] == ["-m"]:  # while Python looks for the package to run
        from shardprep.console import say

        say(f"error: {message}")
        raise SystemExit(2)
    raise ImportError(message, name=package, path=found)


def __getattr__(name: str) -> Any:
    """Return ``get_llama3_dataloader``. Its import takes seconds (torch), which commands do not pay."""
    if name == "get_llama3_dataloader":
        import loader

        return loader.get_llama3_dataloader
    raise AttributeError(f"module 'shardprep' has no attribute {name!r}")
