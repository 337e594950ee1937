"""Raw text to token shards. ``python -m preprocess --help`` is the way in."""

from shardprep import __version__

__all__ = ["__version__"]
