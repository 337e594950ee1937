"""Shows the layout that new files on Lustre will get, and sets it for a folder without harm to any file.

The one rule: ``lfs setstripe`` is run on existing directories only, and on empty ones unless the user says
otherwise. From Lustre 2.16 on, where ``llite.*.enable_setstripe_gid`` is set (LU-17628), it can empty an
existing file and exit 0. Off Lustre everything here does nothing and says why. ``python -m lustre show PATH``
is the way in.
"""

from lustre.apply import PlannedShards, StripeRequest, layout_line, stripe_line
from lustre.lfs import file_system_of, why_not_usable
from lustre.show import balance_of, first_ost, read_file_layouts
from lustre.space import Need, space_lines
from shardprep.errors import LustreError, LustreUsageError

__all__ = [
    "LustreError",
    "LustreUsageError",
    "Need",
    "PlannedShards",
    "StripeRequest",
    "balance_of",
    "file_system_of",
    "first_ost",
    "layout_line",
    "read_file_layouts",
    "space_lines",
    "stripe_line",
    "why_not_usable",
]
