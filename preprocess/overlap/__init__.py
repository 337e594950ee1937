"""What must not be trained on. No other room imports this one, so it can go as a whole.

``shard_documents`` reads a shard back, ``token_texts`` turns ids into texts, ``ngrams`` and ``words`` find
what documents share with an evaluation, which ``evals`` reads; ``overlap`` is the command, ``page`` its page.
"""
