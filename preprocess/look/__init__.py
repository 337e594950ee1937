"""What a person looks with: ``peek``, ``doctor``, ``export``; and ``train_tokenizer``."""
