"""`python -m tests.net.payloads NAME FILE`: the row of a file, as `scan` sees it now, to be read and put into a table."""

import sys
from pathlib import Path

from tests.net.payloads import judged

print(judged(Path(sys.argv[2]), sys.argv[1]).line)
