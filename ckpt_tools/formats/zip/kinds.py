"""What a damaged zip was, told from the names in it: `ckpt repair` mends neither programs nor arrays."""

from __future__ import annotations

import re

from ckpt_tools.formats.zip.headers import LOCAL, SIGNATURE_LOCAL, LocalHeader
from ckpt_tools.io.output import Source

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
    data = source.read(0, min(_SEARCHED, source.size))
    if SIGNATURE_LOCAL in data and source.size <= _SEARCHED and b"data.pkl" not in data:
        return False
    names: list[str] = []
    at = data.find(SIGNATURE_LOCAL)
    while 0 <= at <= len(data) - LOCAL.size and len(names) < _NAMES:
        start = at + LOCAL.size
        name = data[start : start + LocalHeader._make(LOCAL.unpack_from(data, at)).name_length]
        names.append(name.decode(errors="replace"))
        at = data.find(SIGNATURE_LOCAL, at + 1)
    return not any(PROGRAM.search(name) or _ARRAY.search(name) for name in names)
