"""What the codes of quantised tensors mean: numbers worked out of codes and scales, a few rows at a time."""
