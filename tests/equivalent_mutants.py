"""Changes that no test can notice: (file, line as it is, line as it would be, reason)."""

from __future__ import annotations

EQUIVALENT: tuple[tuple[str, str, str, str], ...] = ()
