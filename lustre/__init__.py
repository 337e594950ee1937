"""Shows the layout that new files on Lustre will get, and sets it for a folder without harm to any file.

The one rule: ``lfs setstripe`` is run on existing directories only. From Lustre 2.16 on, where
``llite.*.enable_setstripe_gid`` is set (LU-17628), it can empty a file and exit 0.
"""

from lustre.layout import parse_stripe, stripe_line
from lustre.lfs import Need, space_lines, why_not_usable
from shardprep.errors import LustreError

__all__ = ["LustreError", "Need", "parse_stripe", "space_lines", "stripe_line", "why_not_usable"]
