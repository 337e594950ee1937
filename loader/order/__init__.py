"""The order of samples: pure arithmetic, which reads nothing."""
