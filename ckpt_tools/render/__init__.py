"""Reports as text (rich) or JSON. Names from files are escaped before they reach a terminal."""
