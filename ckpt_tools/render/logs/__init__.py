"""What `ckpt check` and `ckpt scan` found, in the forms that other programs read: SARIF, GitHub's lines, JUnit XML."""
