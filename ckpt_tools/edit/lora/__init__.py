"""Low-rank adapters: read, matched with the tensors of a base, and merged into them."""
