"""GGUF: every type as gguf-py dequantises it, the header's texts, models in several files."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools.errors import ConvertError, PartError, UsageError
from tests.hostile.refusals import write
from tests.support.samples import FIXTURES, metadata

HERE = FIXTURES / "frameworks"
TYPES = HERE / "types.gguf"
MEANT = load_file(HERE / "types.safetensors")


def test_every_type(tmp_path: Path) -> None:
    """Each tensor is what gguf-py makes of its blocks, bit for bit, in torch's shape and under its name."""
    report = ckpt_tools.convert(TYPES, tmp_path / "out.safetensors")
    made = load_file(tmp_path / "out.safetensors")
    assert sorted(made) == sorted(MEANT)
    assert len([name for name in made if name.startswith(("q", "iq", "tq", "mx", "nv"))]) == 23
    for name, wanted in MEANT.items():
        assert made[name].shape == wanted.shape
        if name != "bfloat16.weight":  # which is one here
            assert made[name].dtype == wanted.dtype
            assert torch.equal(made[name].view(torch.uint8), wanted.view(torch.uint8)), name
    assert torch.equal(made["bfloat16.weight"].float(), MEANT["bfloat16.weight"])
    assert any("23 tensors are quantised (" in note.text for note in report.notes)


def test_the_header_is_kept(tmp_path: Path) -> None:
    """Texts, numbers, arrays as text in the metadata, with the types of what is not text; a .pth says what it loses."""
    ckpt_tools.convert(TYPES, tmp_path / "out.safetensors")
    found = metadata(tmp_path / "out.safetensors")
    assert (found["general.architecture"], found["general.name"], found["some.flag"]) == ("llama", "every type", "true")
    assert json.loads(found["tokenizer.ggml.tokens"]) == ["<s>", "é", "a"]
    assert json.loads(found["tokenizer.ggml.scores"]) == [0.0, -1.5, 2.25]
    types = json.loads(next(text for key, text in found.items() if key.endswith("gguf_types")))
    assert (types["llama.block_count"], types["tokenizer.ggml.scores"], types["some.sizes"]) == ("u32", "[f32]", "[i32]")
    report = ckpt_tools.convert(TYPES, tmp_path / "out.pth")
    assert "general.name" in [path for path, _ in report.dropped]


def test_numbers_are_what_they_mean(tmp_path: Path) -> None:
    """stats, diff, check, show and average read a quantised tensor as its numbers; a box of it needs its blocks alone."""
    torch.save({name: tensor.clone() for name, tensor in MEANT.items()}, tmp_path / "meant.pth")
    wanted = MEANT["q6_k.weight"]
    (row,) = ckpt_tools.stats(TYPES, filter="q6_k.weight").tensors
    assert row.numbers is not None
    assert row.numbers["mean"] == pytest.approx(wanted.double().mean().item())
    assert ckpt_tools.show(TYPES, "q6_k.weight[1, 250:260]").values == wanted[1, 250:260].tolist()
    difference = ckpt_tools.diff(TYPES, tmp_path / "meant.pth", values=True)
    assert difference.changed == []
    assert [change.where for change in difference.dtypes] == ["bfloat16.weight"]  # which is a float32 there
    assert ckpt_tools.check(TYPES, digest=True).verdict == "healthy"


def test_in_several_files(tmp_path: Path) -> None:
    """A model in three files is one, named by its folder, or by any of the files; what numbers them goes."""
    for name in ("split-00001-of-00003.gguf", "split-00002-of-00003.gguf", "split-00003-of-00003.gguf"):
        shutil.copy(HERE / name, tmp_path / name)
    wanted = load_file(HERE / "split.safetensors")
    for source in (tmp_path, tmp_path / "split-00002-of-00003.gguf"):
        ckpt_tools.convert(source, tmp_path / "out.safetensors", overwrite=True)
        made = load_file(tmp_path / "out.safetensors")
        assert list(made) == list(wanted)
        assert all(torch.equal(made[name], wanted[name]) for name in wanted)
        assert not any(
            "split" in key + text for key, text in metadata(tmp_path / "out.safetensors").items() if key != "general.name"
        )
        (tmp_path / "out.safetensors").unlink()
    (tmp_path / "split-00003-of-00003.gguf").unlink()
    with pytest.raises(PartError, match="1 of 3 parts is missing"):
        ckpt_tools.inspect(tmp_path / "split-00001-of-00003.gguf")
    shutil.copy(HERE / "split-00001-of-00003.gguf", tmp_path / "split-00003-of-00003.gguf")
    with pytest.raises(PartError, match="is not number 3 of 3"):
        ckpt_tools.inspect(tmp_path)


def test_big_endian(tmp_path: Path) -> None:
    """A file of a big-endian machine has the same numbers."""
    ckpt_tools.convert(HERE / "big.gguf", tmp_path / "out.safetensors")
    wanted = load_file(HERE / "split.safetensors")["blk.0.attn_q.weight"]
    assert torch.equal(load_file(tmp_path / "out.safetensors")["a.weight"], wanted)
    assert metadata(tmp_path / "out.safetensors")["some.number"] == "70000"


# --- writing


def test_written_and_read_again(tmp_path: Path) -> None:
    """A GGUF of another becomes the same bytes of tensors, names, order and typed keys, by way of a safetensors file too."""
    ckpt_tools.convert(TYPES, tmp_path / "a.safetensors")
    ckpt_tools.convert(tmp_path / "a.safetensors", tmp_path / "a.gguf")
    ckpt_tools.convert(TYPES, tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    before, after = ckpt_tools.inspect(TYPES), ckpt_tools.inspect(tmp_path / "b.gguf")
    assert after.metadata == before.metadata
    assert [row["name"] for row in after.tensors] == [row["name"] for row in before.tensors]
    assert not ckpt_tools.diff(TYPES, tmp_path / "b.gguf", values=True).changed


def test_dtypes_that_gguf_has(tmp_path: Path) -> None:
    """Each in its own type, a tie as an alias; another dtype is refused with the way out."""
    bias = torch.arange(3.0)
    tensors = {"a": torch.ones(2, 3).bfloat16(), "b": torch.ones(4).half(), "i": torch.arange(5), "s": torch.tensor(2.0)}
    torch.save({**tensors, "x": bias, "y": bias}, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.gguf", set_metadata="general.architecture=llama")
    assert report.container == "gguf"
    assert report.aliases == {"y": "x"}
    again = ckpt_tools.torch.load(tmp_path / "out.gguf")
    assert list(again) == ["a", "b", "i", "s", "x", "y"]
    assert all(torch.equal(again[name], tensor) and again[name].dtype is tensor.dtype for name, tensor in tensors.items())
    torch.save({"flag.x": torch.tensor([True])}, tmp_path / "in.pth")
    with pytest.raises(ConvertError, match=r"'flag\.x' is bool, which GGUF has no type for"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "no.gguf")
    ckpt_tools.torch.save({"w.x": torch.ones(2)}, tmp_path / "saved.gguf")
    assert ckpt_tools.inspect(tmp_path / "saved.gguf").container == "gguf"


def test_q8_0(tmp_path: Path) -> None:
    """Matrices with rows of whole blocks become what gguf-py makes of them; what cannot be held is refused."""
    report = ckpt_tools.convert(HERE / "split-00001-of-00003.gguf", tmp_path / "out.gguf", dtype={"*": "fp32", "": "q8_0"})
    assert any("5 of 5 tensors become Q8_0" in note.text for note in report.notes)
    made, wanted = ckpt_tools.torch.load(tmp_path / "out.gguf"), load_file(HERE / "q8_0.safetensors")
    assert all(torch.equal(made[name], wanted[name]) for name in wanted)
    for odd in (float("nan"), float("inf"), 1e7):
        torch.save({"w.x": torch.full((2, 32), odd)}, tmp_path / "in.pth")
        with pytest.raises(ConvertError, match="Q8_0 cannot hold"):
            ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "no.gguf", dtype="q8_0")
    assert not (tmp_path / "no.gguf").exists()
    with pytest.raises(UsageError, match="`dtype='q8_0'` is for a GGUF"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "no.pth", dtype="q8_0")


@pytest.mark.parametrize(
    ("tensors", "said"),
    [({"x" * 64: torch.ones(1)}, "longer than the 63 bytes"), ({"a.b": torch.ones(1, 1, 1, 1, 1)}, "5 dimensions")],
)
def test_what_gguf_cannot_hold(tmp_path: Path, tensors: dict[str, torch.Tensor], said: str) -> None:
    """Names and dimensions beyond ggml's are refused before anything is written."""
    torch.save(tensors, tmp_path / "in.pth")
    with pytest.raises(ConvertError, match=said):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.gguf")


def test_a_key_that_is_not_of_its_type(tmp_path: Path) -> None:
    """Text in the place of a number cannot become that number's type."""
    with pytest.raises(ConvertError, match=r"'llama\.block_count' is not of the type u32"):
        ckpt_tools.convert(TYPES, tmp_path / "out.gguf", set_metadata="llama.block_count=many")


# --- bytes by hand; tests/net/payloads/refused.txt has those that break a promise


def text(value: bytes) -> bytes:
    """A string as GGUF has it."""
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes = b"w", shape: tuple[int, ...] = (8,), offset: int = 0) -> bytes:
    """What the header says of a tensor of float32."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)


def gguf(*tensors: bytes, keys: tuple[bytes, ...] = (), data: int = 32) -> bytes:
    """A file of these."""
    head = b"GGUF" + struct.pack("<I2Q", 3, len(tensors), len(keys)) + b"".join([*keys, *tensors])
    return head + bytes(-len(head) % 32) + bytes(data)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    """A key and its value."""
    return text(name) + struct.pack("<I", kind) + value


def test_odd_and_whole(tmp_path: Path) -> None:
    """A scalar, an empty tensor, no tensor, room between tensors, text that is not UTF-8: read, the last with a warning."""
    keys = (key(b"k", 8, text(b"a\xffb")), key(b"none", 9, struct.pack("<IQ", 8, 0)))
    data = gguf(tensor(shape=()), tensor(b"none", (0, 3), offset=32), tensor(b"far", (8,), offset=64), keys=keys, data=96)
    found = ckpt_tools.inspect(write(tmp_path, data, "x.bin"))
    assert [(row["name"], row["shape"]) for row in found.tensors] == [("w", []), ("none", [3, 0]), ("far", [8])]
    assert (found.metadata["k"], found.metadata["none"]) == ("a\\xffb", "[]")
    assert [finding.code for finding in found.findings if finding.severity == "warning"] == ["not-utf-8"]
    assert ckpt_tools.inspect(write(tmp_path, gguf(), "none.gguf")).totals["tensors"] == 0


def test_as_many_tensors_as_a_brace_is(tmp_path: Path) -> None:
    """The number of tensors stands where a safetensors file has its brace: 123 of them are a GGUF, and nothing else."""
    data = gguf(*(tensor(b"%d" % number, offset=32 * number) for number in range(123)), data=123 * 32)
    assert data[8:9] == b"{"
    assert ckpt_tools.inspect(write(tmp_path, data, "x.gguf")).totals["tensors"] == 123


@pytest.mark.parametrize("types", [b"[1", b"5", b"[" * 5000])
def test_types_that_the_file_made_up(types: bytes, tmp_path: Path) -> None:
    """A key under the name by which ours are kept is text like any other, also in a model of several files."""
    for number in range(2):
        said = {b"split.count": b"2", b"split.no": b"%d" % number, b"ckpt_tools.gguf_types": types}
        keys = tuple(key(name, 8, text(value)) for name, value in said.items())
        write(tmp_path, gguf(tensor(b"%d" % number), keys=keys), f"x-0000{number + 1}-of-00002.gguf")
    ckpt_tools.convert(tmp_path / "x-00001-of-00002.gguf", tmp_path / "out.gguf")
    assert ckpt_tools.inspect(tmp_path / "out.gguf").totals["tensors"] == 2
