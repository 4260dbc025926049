"""A torch-zip whose end is missing: how many tensors are whole. Sizes stand in the pickle, since `torch.save` writes none in
the headers before the records. `ckpt repair` saves what is whole."""

from __future__ import annotations

from ckpt_tools.errors import CkptError, DamagedFileError, PickleError
from ckpt_tools.formats.zip_directory import LOCAL, SIGNATURE_LOCAL, LocalHeader
from ckpt_tools.io.content import Literal
from ckpt_tools.io.output import Source
from ckpt_tools.pickling.checks import validate
from ckpt_tools.pickling.machine import Machine
from ckpt_tools.pickling.stream import Part, Pickles
from ckpt_tools.pickling.torch_objects import MAKERS, Storages
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.tree.visit import walk

_SMALL = 4096  # bytes between what is known of a record and the header of the next: descriptor, small records


def describe_cut(source: Source) -> DamagedFileError:
    """The error for a torch-zip without a directory, with how many of its tensors are complete."""
    what = "The zip directory at the end of the file is missing"
    ends = f"The file ends after {source.size} bytes"
    try:
        whole, count, last = _count(source)
    except CkptError as error:
        why = f"{ends}. {error.what}"
        return DamagedFileError(f"{what}; no tensor can be told from what is left.", why=why, whole=0)
    why = f"{ends}, in the record {last!r}." if last else f"{ends}."
    return DamagedFileError(f"{what}: {whole} of {count} tensors complete.", why=why, whole=whole)


def _count(source: Source) -> tuple[int, int, str]:
    """How many tensors are whole, how many there are, and the record that is cut ("" when none is)."""
    sizes: dict[str, int] = {}
    entries: list[str] | None = None
    storages = Storages(lambda _key, _nbytes: Literal(b""))
    whole: set[str] = set()
    at, name, end = 0, "", 0
    while 0 <= at <= source.size - LOCAL.size:
        header = LocalHeader.at(source, at)
        name = source.read(at + LOCAL.size, min(header.name_length, source.size - at - LOCAL.size)).decode("utf-8", "replace")
        data = at + header.length
        if entries is None:
            if data > source.size or not name.endswith("/data.pkl"):
                break
            folder = name.removesuffix(".pkl")
            pickles = Pickles(Part(source, data, source.size))
            try:
                root = pickles.load(lambda stream, offset: Machine(stream, MAKERS, storages.storage, offset))[1]
            except PickleError:
                break
            validate(root)
            entries = [f"{folder}/{node.storage.key}" for _, node in walk(root, plain=False) if type(node) is Entry]
            sizes = {f"{folder}/{key}": storage.nbytes for key, (_, storage) in storages.by_key.items()}
            sizes[name] = pickles.position - data
        end = data + sizes.get(name, header.compressed)
        if end > source.size:
            break
        whole.add(name)
        found = source.read(end, min(_SMALL, source.size - end)).find(SIGNATURE_LOCAL)
        at = end + found if found >= 0 else -1
    if entries is None:
        raise DamagedFileError("The pickle that lists them is cut off or missing.")
    return sum(entry in whole for entry in entries), len(entries), name if end > source.size else ""
