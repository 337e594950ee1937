"""What must not be trained on: equal documents. No other room imports this one."""
