"""What is checked of finished shards: ``verify``, ``verify --deep``, ``clean``."""
