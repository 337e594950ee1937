"""``shardprep doctor``: will this machine, tokenizer and folders do? Asked before the work begins."""
