"""What must not be trained on. No other room imports this one, so it can go as a whole."""
