"""What `ckpt check` and `ckpt scan` do beyond a page: one path, and reports for other programs."""
