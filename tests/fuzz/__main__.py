"""`python -m tests.fuzz`: mutated files for a minute, or for as long as it is told; exit code 1 when something was found."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz.worker import said

# Cases of one worker: torch leaks a little when it refuses a file, and after 30,000 cases the heap reached the limit on memory.
_A_WORKER = 20_000


def main() -> int:
    """Run workers one after another, and another one from where one died."""
    options = _options()
    save = Path(options.save or tempfile.mkdtemp(prefix="ckpt-fuzz-"))
    total: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    first, last, stop = options.first, options.first + options.cases, time.monotonic() + options.seconds
    while first < last and time.monotonic() < stop:
        at, asked, done = first, "us", False
        now = (options.seed, first, min(last - first, _A_WORKER), stop - time.monotonic(), options.convert, options.only)
        for row in said("tests.fuzz.worker", *now):
            if "at" in row:
                at, asked = row["at"], "us"
            elif "asking" in row:
                asked = row["asking"]
            elif "found" in row:
                _report(row, options.seed, save, seen)
            elif "done" in row:
                total.update(row["counts"])
                first, done = first + row["done"], True
            elif not done:
                total["cases"] += at + 1 - first
                first = at + 1
                who = "torch" if asked == "torch" else "the process"
                total["deaths of torch"] += asked == "torch"
                _report({"found": f"{who} died: {row['ended']}", "case": at, "trace": row["trace"]}, options.seed, save, seen)
    print(", ".join(f"{count} {name}" for name, count in total.items()))
    print(f"{len(seen)} kinds of findings" + (f", files in {save}" if seen else ""))
    return 1 if seen else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="stop after so long (60)")
    parser.add_argument("--cases", type=int, default=10**12, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other cases")
    parser.add_argument("--first", type=int, default=0, help="the first case; with --cases 1 a finding is run again")
    parser.add_argument("--convert", type=int, default=16, help="every n-th case is also checked, converted and so on (16)")
    parser.add_argument("--only", default="", help="only samples and kinds of inputs with this in their names")
    parser.add_argument("--save", help="folder for the files that found something")
    return parser.parse_args()


def _report(row: dict[str, Any], seed: int, save: Path, seen: Counter[str]) -> None:
    """Print a finding of a kind that is new, and keep its number."""
    kind = row["found"][:60] + row["trace"].strip().rpartition("\n")[0][-80:]
    seen[kind] += 1
    if seen[kind] <= 3:
        save.mkdir(parents=True, exist_ok=True)
        with open(save / "findings.txt", "a") as file:
            file.write(f"--seed {seed} --first {row['case']} --cases 1\n{row['found']}\n{row['trace']}\n")
        print(f"--seed {seed} --first {row['case']}: {row['found']}\n{row['trace']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
