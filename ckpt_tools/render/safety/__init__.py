"""What `ckpt scan` found: as text, and as SARIF."""
