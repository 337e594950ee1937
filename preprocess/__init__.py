"""Raw text to token shards. ``python -m preprocess --help`` is the way in."""

__version__ = "0.1.0"
