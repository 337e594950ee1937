"""The plan: inputs and their ledger, byte ranges of the shards, options, the tokenizer, and plan.json."""
