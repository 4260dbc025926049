"""Files that two programs read as two: torch and we, torch in two ways, or two of torch's loaders. Ours is torch's, or none."""

import io
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

import ckpt_tools
from tests.hostile.pickles import dict_of, pickle, storage, tensor, tuple_of
from tests.hostile.refusals import write
from tests.hostile.zips import Rec, build
from tests.support import tars
from tests.support.legacy import floats, saved

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
SIX = floats(0, 1, 2, 3, 4, 5)
GOOD_TAR = tars.torch_tar(
    dict_of(w=tars.persistent(2)), tars.storages((1, "FloatStorage", SIX)), tars.tensors((2, 1, (6,), (1,), 0))
)


def records(data: bytes) -> list[Rec]:
    """The records of a zip, to be written anew."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return [Rec(info.filename.encode(), file.read(info)) for info in file.infolist()]


def named(path: Path) -> list[str]:
    """The names of a file's tensors."""
    return [row["where"][0] for row in ckpt_tools.inspect(path).tensors]


# --- one file, two formats


def test_names_in_the_metadata(tmp_path: Path) -> None:
    """Tied names that our own files carry are put back, and it is said that safetensors knows nothing of them."""
    path = write(
        tmp_path, save({"w": torch.ones(2)}, {f"{ckpt_tools.__name__}.aliases": '{"tied":{"of":"w"}}'}), "a.safetensors"
    )
    found = ckpt_tools.inspect(path)
    assert ([*load_file(path)], named(path)) == (["w"], ["w", "tied"])
    assert [(row.code, row.severity) for row in found.findings] == [("tied-names", "info")]
    assert found.findings[0].found == "1 tied name is only in the metadata; safetensors itself does not return them"
    plain = write(tmp_path, save({"w": torch.ones(2)}), "b.safetensors")
    assert ckpt_tools.inspect(plain).findings == []


# --- names and places in a zip


def under(root: bytes, *more: bytes) -> bytes:
    """A checkpoint that says it is big-endian, under another root, with more records."""
    rows = records(saved({"a.w": torch.ones(2)}))
    for row in rows:
        row.data = b"big" if row.name.endswith(b"/byteorder") else row.data
        row.name = root + row.name.removeprefix(b"archive")
    return build([*rows, *(Rec(root + b"/" + name) for name in more)])


def test_archives_of_one_length(tmp_path: Path) -> None:
    """In a part of a distributed checkpoint torch may find the first archive, as it happens: that is said, and it is read."""
    one = saved({"a.w": torch.ones(2)})
    path = write(tmp_path, one + saved({"bb.w": torch.zeros(70)}) + one)
    assert list(torch.load(path)) == ["a.w"]
    found = ckpt_tools.inspect(path)
    assert [row["where"] for row in found.tensors] == [[0, "a.w"], [1, "bb.w"], [2, "a.w"]]
    assert "torch.load gives the first of them alone" in found.findings[0].found


class Small(torch.nn.Module):
    """A buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.arange(6.0).reshape(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


SETSTATE = b"""\
  def __setstate__(self: SELF,
    state: Dict[str, Tensor]) -> NoneType:
    self.w = torch.mul(state["w"], 100)
    self.training = True
    return None
  def __getstate__(self: SELF) -> Dict[str, Tensor]:
    return {"w": self.w}
"""
NEW = b"NEW)\x81"  # an object of the class, in a pickle


def scripted(tmp_path: Path, *, code: tuple[bytes, bytes] = (b"", b""), more: bytes = b"", state: bytes | None = None) -> Path:
    """The program of a module with its code changed, or with another state."""
    torch.jit.save(torch.jit.script(Small()), buffer := io.BytesIO())
    rows = records(buffer.getvalue())
    data = next(row for row in rows if row.name.endswith(b"/data.pkl"))
    found = re.search(rb"c(__torch__\S*)\n(\w+)\n", data.data)
    assert found is not None
    if state is not None:
        data.data = pickle(NEW, state, b"b").replace(b"NEW", found[0])
    for row in rows:
        if row.name.endswith(b"polyglots.py"):
            row.data = row.data.replace(*code) + more.replace(b"SELF", found[1] + b"." + found[2])
    return write(tmp_path, build(rows), "bad.pt")


def jit_loaded(path: Path) -> dict[str, torch.Tensor]:
    """The state dict that torch.jit.load gives."""
    state: dict[str, torch.Tensor] = torch.jit.load(path).state_dict()
    return state


SHORT = storage(numel=b"K\6")  # torch.jit reads no other whole numbers of one byte
W, V = (tensor(tuple_of(*shape), tuple_of(*shape[1:], b"K\1"), on=SHORT) for shape in ((b"K\2", b"K\3"), (b"K\3",)))
FLAGS = {"training": b"\x88", "_is_full_backward_hook": b"N"}


def test_a_state_that_code_computes_from(tmp_path: Path) -> None:
    """A dict like a plain module's under a class that makes its own of it: it is not shown as the module's."""
    path = scripted(tmp_path, more=SETSTATE, state=dict_of(w=W))
    assert jit_loaded(path)["w"].flatten().tolist()[-1] == 500
    found = ckpt_tools.inspect(path)
    assert [row["name"] for row in found.tensors] == [None]
    assert "computed-tensors" in [row.code for row in found.findings]


def test_attributes_in_another_order(tmp_path: Path) -> None:
    """The order of the code is the one that counts."""
    path = scripted(tmp_path, code=(b"  w : Tensor\n", b"  v : Tensor\n  w : Tensor\n"), state=dict_of(w=W, v=V, **FLAGS))
    assert [row["name"] for row in ckpt_tools.inspect(path).tensors if row["name"]] == list(jit_loaded(path))


# --- members of a tar


def without_ends(data: bytes) -> bytes:
    """The tar without its empty blocks."""
    cut = data.rstrip(b"\0")
    return cut + bytes(-len(cut) % 512)


def prefixed() -> bytes:
    """A second pickle whose header has a prefix, which is a folder: a part of its name."""
    evil = tars.tar({"pickle": pickle(dict_of(evil=tars.persistent(2)))})[:1024]
    header = evil[:345] + b"folder" + evil[351:512]
    return without_ends(GOOD_TAR) + tars.checksummed(header) + evil[512:] + bytes(1024)


def sized_by_pax() -> bytes:
    """What is larger than 8 GB has its size in a pax header; it counts, as for torch."""
    whole = without_ends(GOOD_TAR)
    at = whole.index(b"pickle\0") // 512 * 512
    header = tars.checksummed(whole[at : at + 124] + b"%011o\0" % 0 + whole[at + 136 : at + 512])
    size = len(pickle(dict_of(w=tars.persistent(2))))
    pax = tarfile.TarInfo("x").create_pax_global_header({"size": str(size)})
    pax = tars.checksummed(pax[:156] + b"x" + pax[157:512]) + pax[512:]
    return whole[:at] + pax + header + whole[at + 512 :] + bytes(1024)


def without_magic() -> bytes:
    """The oldest tars lack "ustar": the checksum makes it one to torch, and to us."""
    blocks = [GOOD_TAR[at : at + 512] for at in range(0, len(GOOD_TAR), 512)]
    return b"".join(
        tars.checksummed(block[:257] + bytes(8) + block[265:]) if block[257:262] == b"ustar" else block for block in blocks
    )


@pytest.mark.parametrize("make", [prefixed, sized_by_pax, without_magic])
def test_odd_tars(make: Callable[[], bytes], tmp_path: Path) -> None:
    """They are to us what they are to torch."""
    path = write(tmp_path, make())
    assert list(torch.load(path, weights_only=False)) == ["w"] == named(path)
