"""Evidence from what models compute: which layer feeds which, and how. It decides what names and shapes leave open."""
