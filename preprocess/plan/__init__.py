"""Make a plan: list and divide the inputs, resolve the tokenizer, estimate the cost, write plan.json."""
