"""What `ckpt scan` found, as text."""
