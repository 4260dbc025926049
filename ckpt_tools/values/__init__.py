"""The one door to torch for work on numbers."""
