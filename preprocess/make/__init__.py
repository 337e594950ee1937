"""A shard is made here: text to token ids, to members of a tar, to a published shard.

Begin with ``worker``, which makes one shard. It reads batches of documents (``preprocess.read.documents``),
has them encoded (``encoding``) in threads (``in_order``) or in processes (``helpers``), and appends them to a
shard (``writer``).

* To token ids: ``engine`` says what an engine is, ``chosen_engine`` chooses ``fast`` or ``reference``.
* To pieces of a tar: ``members`` for documents, ``packing`` and ``rows`` for rows.
* Several shards: ``many`` on this machine, ``parts`` by several equal processes.
"""
