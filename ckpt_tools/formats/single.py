"""One file that stands for itself: its container found by content and decoded, and what is something else refused."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, DamagedFileError, exhausted, out_of_memory
from ckpt_tools.formats.base import Decoded, is_tar, is_zip
from ckpt_tools.formats.polyglots import refuse_polyglot
from ckpt_tools.formats.registry import containers
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Files
from ckpt_tools.tree.findings import getting_again

HEAD = 4096


def decode_file(source: Source) -> Decoded:
    with naming(source), limits.of_file(source.size):
        return decode_content(source)


def decode_content(source: Source) -> Decoded:
    head = source.read(0, min(HEAD, source.size))
    refuse_polyglot(source, head)
    for container in containers():
        if container.sniff(head):
            return container.decode(source)
    from ckpt_tools.formats import safetensors
    from ckpt_tools.formats.foreign import recognise, unknown

    if error := recognise(source, head):
        raise error
    if source.path.suffix.lower() == ".safetensors":  # damaged, and like nothing else: say what is wrong with its header
        return safetensors.decode(source)
    raise unknown(source, head)


def may_be_packed(head: bytes) -> bool:
    """Whether a file that starts so may be compressed, or a tar; what reads those is imported only then."""
    if is_zip(head):
        return False
    from ckpt_tools.formats.compressed import kind_of

    return kind_of(head) is not None or is_tar(head) or head[257:262] == b"ustar"


@contextlib.contextmanager
def naming(source: Source) -> Iterator[None]:
    """Errors inside the block say which file they are about."""
    try:
        with out_of_memory():
            yield
    except CkptError as error:
        if str(source.path) not in error.what:
            error.what = f"{source.path}: {error.what}"
        if isinstance(error, DamagedFileError) and error.whole is not None:
            error.fix = error.fix or getting_again(str(source.path), error.whole)
        if "ckpt repair" in error.fix and not isinstance(source, Files):
            error.fix = _without_repair(source, error.fix)
        raise
    except (MemoryError, RecursionError) as error:
        raise exhausted(error, str(source.path)) from None


def _without_repair(source: Source, fix: str) -> str:
    """The advice, where repair takes such a file."""
    from ckpt_tools.formats.zip_directory import is_mended

    with contextlib.suppress(CkptError):  # the disk failed
        return fix if is_mended(source) else "Get it again."
    return fix


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Python's cyclic garbage collector at rest: a large tree is all alive, and scanning it again and again costs a third."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
