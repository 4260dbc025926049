"""`python -m tests.golden [GROUP ...]`, or `make golden`: write anew what is kept. A change of it is a diff to be read."""

import sys
import tempfile
from pathlib import Path

from tests.golden.rows import PLACE, groups
from tests.golden.running import run
from tests.golden.workplace import prepared

with tempfile.TemporaryDirectory() as folder, prepared(Path(folder)) as names:
    for group, rows in groups().items():
        if not sys.argv[1:] or group in sys.argv[1:]:
            (PLACE / f"{group}.txt").write_text("\n\n".join(run(row, names) for row in rows) + "\n", "utf-8")
            sys.stderr.write(f"{group}: {len(rows)} rows\n")
