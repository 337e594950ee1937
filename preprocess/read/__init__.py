"""Read raw input. documents.py defines the interface ``Format``, and finds a file's format by its name."""
