"""Where commands read from and print to beside files: standard input, a pager."""
