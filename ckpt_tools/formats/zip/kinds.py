"""What a damaged zip was, told from the names in it: `ckpt repair` mends neither programs nor arrays."""

from __future__ import annotations

import re
from itertools import islice

from ckpt_tools.formats.zip.headers import LOCAL, SIGNATURE_LOCAL, LocalHeader, signatures
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Window

_SEARCHED = 1 << 20
_NAMES = 64  # of records that are looked at
PROGRAM = re.compile(
    r"/code/|/constants\.pkl$|/archive_format$"  # TorchScript, and exported programs, of torch 2.7 on and before
    r"|/models/[^/]+\.json$|/data/(weights|constants|sample_inputs|aotinductor)/|^serialized_(exported_program|state_dict)"
)
_ARRAY = re.compile(r"\.npy$")


def is_mended(source: Source) -> bool:
    """Whether `ckpt repair` may take a damaged zip: not one of a program or of arrays, as its first names say, nor one without
    the name of a pickle.
    """
    head = Window(source, 0, min(_SEARCHED, source.size))
    data = head.read(0, head.size)
    if SIGNATURE_LOCAL in data and source.size <= _SEARCHED and b"data.pkl" not in data:
        return False
    for _, at in islice(signatures(head, SIGNATURE_LOCAL), _NAMES):
        start = at + LOCAL.size
        if start > head.size:
            break
        name = data[start : start + LocalHeader.at(head, at).name_length].decode(errors="replace")
        if PROGRAM.search(name) or _ARRAY.search(name):
            return False
    return True
