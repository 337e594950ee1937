"""Flags, commands and arguments that went in version 0.1, and what to do instead: one line each.

Kept for one release, so that who used one of them is told. Nothing else depends on it.
"""

from __future__ import annotations

_STRIPE = "one flag names the layout: --stripe N[,SIZE][,POOL], or --stripe '-c 8' as for lfs setstripe"

_PEEK = "peek takes addresses, such as 3:17, FILE:BYTE or id:ID, or --random; the report names the sources"

FLAGS = {  # by their names, or by command and name where another command has a flag of this name
    "--stripe_size": _STRIPE,
    "--stripe_pool": _STRIPE,
    "--count": _STRIPE,
    "--size": _STRIPE,
    "--pool": _STRIPE,
    "--pfl": _STRIPE,
    "--dom": _STRIPE,
    "--num_readers": "docs/lustre.md says which layout to choose; --stripe sets it",
    "--crcs": "verify and stage compare hashes; Lustre has checksums of its own on the wire",
    "--keep_fields": "--id_field keeps an id of each document, by which its record is found in the input",
    "--longest": _PEEK,
    "peek --shard": _PEEK,
    "peek --input": _PEEK,
    "peek --source": _PEEK,
    "peek --seed": _PEEK,
    "--text": "the report is a page for a browser, or --json",
    "--card": "the report is a page for a browser, or --json",
    "--lang": "the report is in English",
}

COMMANDS = {
    "restore": "bring files back with lfs hsm_restore, see docs/lustre.md",
}
