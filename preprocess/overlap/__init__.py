"""What must not be trained on: documents that share n-grams with an evaluation. No other room imports this one.

``rules`` names the published rules; ``shard_documents`` reads a shard back; ``token_texts`` and ``units`` turn
ids into texts and words; ``ngrams`` finds what two sides share; ``overlap`` is the command.
"""
