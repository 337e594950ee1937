"""What must not be trained on. No other room imports this one, so it can go as a whole.

``documents`` reads a shard back, ``evals`` an evaluation, ``ngrams`` finds what both share; ``overlap`` is
the command. ``duplicates`` is a command of its own.
"""
