"""The commands that golden rows print."""

import re

from tests.golden.rows import groups, kept

_COMMANDS = "convert|repair|inspect|check|scan|stats|diff|match|show"
_PRINTED = re.compile(  # what comes first behind the command is an option or has a dot or a slash in it: it is no word of prose
    rf"(?:^(?:2> )? *|: |  )(ckpt (?:{_COMMANDS}) (?:-|[^ ]*[./])\S.*?(?: --strip-prefix \S+)?)"
    r"(?:\.?$|; | \(| takes | lists |</| &&)"
)
_STANDS_FOR = re.compile(r"\b[A-Z]{2,}\b|<here>|<port>|\.\.\.|[`|…]|\[")  # a word for a name, and what is cut
_HELP = re.compile(r"--help|-h\b|explain|completion")


def printed() -> list[str]:
    """The commands in what is kept, once each, without those whose names stand for others."""
    found: dict[str, None] = {}
    for group in groups():
        for row, block in kept(group).items():
            if not row.startswith("ckpt ") or _HELP.search(row) or "--json" in row:
                continue
            for line in block.splitlines()[1:]:
                match = _PRINTED.search(line)
                if match is not None and not _STANDS_FOR.search(match[1]):
                    found.setdefault(match[1].strip())
    return list(found)
