"""Read raw input: files to records, records to texts, texts to batches of documents.

Begin with ``documents``, which reads a shard's byte ranges. ``formats`` has the interface ``Format`` and the
table of formats, and ``json_lines`` and others read one each. ``fields`` chooses what takes texts out of
records. Then the user's function (``transform``), or a chat template (``chat``), makes other texts of them.
"""
