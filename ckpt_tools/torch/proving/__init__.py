"""Whether two models compute the same numbers, and the first module where they part."""
