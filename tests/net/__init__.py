"""What must stay while the code changes: each subject through the public face, against torch, pickle or a computation by hand."""
