"""Shows the layout that new files on Lustre will get, and sets it for a folder without harm to any file.

The one rule: ``lfs setstripe`` is run on existing directories only, and on empty ones unless the user says
otherwise. From Lustre 2.16 on, where ``llite.*.enable_setstripe_gid`` is set (LU-17628), it can empty an
existing file and exit 0. Off Lustre
everything here does nothing and says why. ``python -m lustre show PATH`` is the way in.
"""

from lustre.directory_layout import LayoutChange, set_directory_layout
from lustre.file_layouts import Balance, balance_of, first_ost, read_balance, read_file_layouts
from lustre.free_space import Need, is_usable, space_lines
from lustre.layout import Component, Layout
from lustre.stripe_wish import PlannedShards, StripeWish, layout_line, stripe_line
from shardprep.errors import LustreError, LustreUsageError

__all__ = [
    "Balance",
    "Component",
    "Layout",
    "LayoutChange",
    "LustreError",
    "LustreUsageError",
    "Need",
    "PlannedShards",
    "StripeWish",
    "balance_of",
    "first_ost",
    "is_usable",
    "layout_line",
    "read_balance",
    "read_file_layouts",
    "set_directory_layout",
    "space_lines",
    "stripe_line",
]
