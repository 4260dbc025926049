"""Remote inputs and how they are asked for: https:// through Python's own urllib, everything else through fsspec."""
