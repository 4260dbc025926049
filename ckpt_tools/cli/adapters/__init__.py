"""Commands about low-rank adapters."""
