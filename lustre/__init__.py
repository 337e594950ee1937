"""Shows the layout that new files on Lustre will get, and sets it for a folder without harm to any file.

The one rule: ``lfs setstripe`` is run on existing, empty directories only. From Lustre 2.16 on, where
``llite.*.enable_setstripe_gid`` is set (LU-17628), it can empty an existing file and exit 0. Off Lustre
everything here does nothing and says why. ``python -m lustre show PATH`` is the way in.
"""

from lustre.directory_layout import LayoutChange, apply_stripe, check_stripe, set_directory_layout
from lustre.layout import Component, Layout
from lustre.osts import first_osts
from shardprep.errors import LustreError, LustreUsageError

__all__ = [
    "Component",
    "Layout",
    "LayoutChange",
    "LustreError",
    "LustreUsageError",
    "apply_stripe",
    "check_stripe",
    "first_osts",
    "set_directory_layout",
]
