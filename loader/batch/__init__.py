"""From chunks to the batches of a rank, in order.

``stream`` yields the batches, and starts the workers. Each of these reads chunks (``run_reader``).
``batches`` makes batches of a chunk, with the fields of the table in ``fields``.
"""
