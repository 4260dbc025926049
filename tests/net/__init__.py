"""What must stay while the code changes: through the public face, against torch, pickle or a computation by hand."""
