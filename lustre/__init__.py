"""Show the layout that new files on Lustre get, and set it for a folder without harm to any file.

``lfs setstripe`` is run only on existing directories. From Lustre 2.16 on it can empty an existing file and
exit with 0, where ``llite.*.enable_setstripe_gid`` is set (LU-17628).
"""

# First: under ``python -m`` it takes the current folder off the path of modules.
import shardprep as _shardprep  # noqa: F401  # isort: skip

from lustre.layout import parse_stripe, stripe_line
from lustre.lfs import why_not_usable
from lustre.released import released_lines
from lustre.space import Need, space_lines
from shardprep.errors import LustreError

__all__ = [
    "LustreError",
    "Need",
    "parse_stripe",
    "released_lines",
    "space_lines",
    "stripe_line",
    "why_not_usable",
]
