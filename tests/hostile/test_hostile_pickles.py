"""The pickle in a checkpoint: rows 46 to 68."""

import contextlib
import json
import struct
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import ConvertError, ObjectsError
from tests.hostile import pickles as p
from tests.hostile.pickles import CALLS, COMMAND, SYSTEM
from tests.hostile.refusals import expect_convert_refused, expect_warned, info, safetensors, write
from tests.hostile.zips import torch_zip
from tests.support.commands import ckpt

FLOATS = {"0": struct.pack("<6f", *range(6))}


def beside(value: bytes) -> bytes:
    """A torch-zip with a tensor `a.w` and this value `x` beside it."""
    return raw(p.dict_of(**{"a.w": p.tensor(), "x": value}))


def raw(opcodes: bytes, *, protocol: bytes = p.PROTO2) -> bytes:
    """A torch-zip with these opcodes between PROTO and STOP."""
    return torch_zip(protocol + opcodes + p.STOP, FLOATS)


def expect_listed(path: Path, name: str) -> None:
    """`inspect` lists the global; `convert` refuses until it is told what to do, and then does it, without the global."""
    assert name in ckpt_tools.inspect(path).globals
    assert name in ckpt_tools.inspect(path).weights_only["refused"]
    said = "not plain data" if name == "collections.UserDict" else "is dangerous: "
    expect_convert_refused(path, ObjectsError, said, name, "`objects`")
    ckpt_tools.convert(path, path.parent / "drop.pth", objects="drop")
    assert name not in ckpt_tools.inspect(path.parent / "drop.pth").globals
    ckpt_tools.convert(path, path.parent / "plain.pth", objects="plain")
    loaded = torch.load(path.parent / "plain.pth", weights_only=True)
    assert torch.equal(loaded["a.w"], torch.arange(6.0).reshape(2, 3))


# --- 46 to 53: globals and calls


@pytest.mark.parametrize("case", CALLS)
def test_46_47_50_52_globals_are_listed(case: str, tmp_path: Path) -> None:
    """However a global is named or called, it is listed, nothing runs, and the user decides."""
    opcodes, name = CALLS[case]
    expect_listed(write(tmp_path, beside(opcodes)), name)


@pytest.mark.parametrize("after", [b"\0", p.pickle(SYSTEM, COMMAND, p.REDUCE), b"garbage"])
def test_48_bytes_after_stop(after: bytes, tmp_path: Path) -> None:
    """A second pickle, or anything, behind the first: mentioned, examined, not written."""
    path = write(tmp_path, torch_zip(p.pickle(p.dict_of(**{"a.w": p.tensor()})) + after, FLOATS))
    found = expect_warned(path, "trailing-pickle-bytes")
    assert ("os.system" in found.globals) == (found.safety.verdict == "dangerous") == (b"system" in after)
    assert after not in (tmp_path / "out.pth").read_bytes() or after == b"\0"


# --- 54 to 57: the stream


def test_57_python2_strings(tmp_path: Path) -> None:
    """Escapes in the strings of protocol 0, without a warning of Python's; what is not text stays bytes."""
    body = p.list_of(b"S'a\\tb\\x41\\101\\q\\\\\\''\n", b'S"\\377"\n', b"U\x01\xff")
    expected = [b"a\tbAA\\q\\'".decode(), "1 bytes", "1 bytes"]
    path = write(tmp_path, beside(body))
    values = ckpt_tools.inspect(path).values
    assert [values[f"x.{index}"] for index in range(3)] == expected


# --- 58 to 68: values


def test_58_depth_that_passes(tmp_path: Path) -> None:
    """Two thousand levels are read, converted and read again."""
    deep = p.EMPTY_LIST * 2000 + p.APPEND * 1999
    path = write(tmp_path, beside(deep))
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert ckpt_tools.inspect(tmp_path / "out.pth").totals["tensors"] == 1


def test_63_long_numbers(tmp_path: Path) -> None:
    """A number of megabytes as value, in a row, as key: never converted to text."""
    number = p.integer((1 << 8_000_000) - 1)
    path = write(tmp_path, beside(p.list_of(number + p.put(0), p.get(0), p.EMPTY_DICT + p.get(0) + p.NONE + p.SETITEM)))
    found = ckpt_tools.inspect(path)
    assert found.values["x.0"] == "int of 8000000 bits"
    assert found.values["x.2.<int of 8000000 bits>"] is None
    for target in ("out.pth", "out.safetensors"):
        assert ckpt_tools.convert(path, tmp_path / target).tensors == 1


def test_63_long_numbers_in_objects(tmp_path: Path) -> None:
    """Long numbers as the parts of a complex number, as value and as key, and as the names in a module: no text, no float."""
    number = p.integer(1 << 100_000)
    complex_ = p.call("builtins", "complex", number, b"K\x00")
    path = write(tmp_path, beside(p.list_of(complex_, p.EMPTY_DICT + complex_ + b"K\x07" + p.SETITEM)))
    report = ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain")
    assert [row.became for row in report.objects if row.name == "builtins.complex"] == ["text", "dropped"]
    assert torch.load(tmp_path / "out.pth", weights_only=True)["x"] == [{"builtins.complex": 7}]
    empty = p.EMPTY_DICT
    inner = p.glob("my", "Net") + p.EMPTY_TUPLE + b"\x81" + p.dict_of(
        _parameters=empty + number + p.tensor() + p.SETITEM, _buffers=empty, _modules=empty) + p.BUILD  # fmt: skip
    outer = p.glob("my", "Net") + p.EMPTY_TUPLE + b"\x81" + p.dict_of(
        _parameters=empty, _buffers=empty, _modules=empty + number + inner + p.SETITEM) + p.BUILD  # fmt: skip
    path = write(tmp_path, raw(outer))
    name = "<int of 100001 bits>.<int of 100001 bits>"
    assert [row["name"] for row in ckpt_tools.inspect(path).tensors] == [name]
    ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain", overwrite=True)
    assert list(torch.load(tmp_path / "out.pth", weights_only=True)) == [name]


NASTY = "\x1b[2J\x1b]0;owned\x07\u202e\u200f\x00\x7f\x9b31m\r\n\u2028\ud800<b>[red]\U000e0041"


def test_66_names_never_reach_the_terminal_raw(tmp_path: Path) -> None:
    """Every place where a file's text is shown: names, keys, values, devices, globals, keys of objects, messages."""
    nasty, device = p.text(NASTY), NASTY.replace("\ud800", "")
    rows = [
        p.text(f"{NASTY}.w") + p.tensor(), nasty + p.dict_of(w=p.tensor(on=p.storage("1", 6, device=device))),
        p.text("value") + nasty, p.text("tied") + p.EMPTY_DICT + nasty + p.tensor() + p.SETITEM,
        p.text("object") + p.text(f"mod{NASTY}") + p.text(f"{NASTY}Name") + b"\x93" + p.EMPTY_TUPLE + p.REDUCE,
        p.text("global") + nasty + nasty + b"\x93", p.text("twice") + p.NONE, p.text("twice") + p.NONE,
    ]  # fmt: skip
    good = torch_zip(p.pickle(p.EMPTY_DICT, p.MARK, *rows, p.SETITEMS), FLOATS | {"1": bytes(24)})
    write(tmp_path, good, "good.pth")
    write(tmp_path, raw(p.tensor(on=p.storage(NASTY, 6))), "bad.pth")
    bad_name = NASTY.translate(dict.fromkeys(map(ord, "/\x00\ud800"))) + ".pth"
    write(tmp_path, b"x", bad_name)
    for command in (
        ["inspect", "good.pth"], ["inspect", "--all", "good.pth"], ["inspect", "--tree", "--all", "good.pth"],
        ["inspect", "--json", "good.pth"], ["inspect", "--depth", "1", "good.pth"],
        ["inspect", "bad.pth"], ["inspect", "--json", "bad.pth"], ["inspect", bad_name],
        ["convert", "good.pth", "out.pth"], ["convert", bad_name, "out.pth"],
        ["convert", "good.pth", "out.pth", "--objects", "drop"], ["convert", "good.pth", "o.safetensors", "--objects", "plain"],
        ["convert", "good.pth", "o.safetensors", "--objects", "plain", "--select", "tied", "--json"],
        ["stats", "good.pth"], ["diff", "--all", "good.pth", "out.pth"], ["repair", "good.pth", "repaired.pth"],
    ):  # fmt: skip
        expect_escaped(command, tmp_path)


def expect_escaped(command: list[str], folder: Path) -> None:
    """What the command line prints on both streams holds no character that a terminal would obey, and some text."""
    with contextlib.chdir(folder):
        shown = ckpt(*command, code=None).output
    assert shown, command
    for character in "\x1b\x07\u202e\u200f\x00\x7f\x9b\r\u2028\U000e0041":
        assert character not in shown, (command, character, shown)


def test_66_names_in_a_safetensors_header(tmp_path: Path) -> None:
    """The same for the other container."""
    name = NASTY.replace("\ud800", "")
    header = {"__metadata__": {name: name, "m": name}, name: info()}
    write(tmp_path, safetensors(json.dumps(header), bytes(8)), "names.safetensors")
    expect_escaped(["inspect", "--all", "names.safetensors"], tmp_path)
    expect_escaped(["inspect", "--json", "names.safetensors"], tmp_path)
    expect_escaped(["convert", "names.safetensors", "out.pth"], tmp_path)


def test_68_pickle_in_bytes(tmp_path: Path) -> None:
    """A pickle inside bytes or text is only bytes or text."""
    inner = p.pickle(SYSTEM, COMMAND, p.REDUCE)
    encoded = p.call("_codecs", "encode", p.text(inner.decode("latin1")), p.text("latin1"))
    path = write(tmp_path, beside(p.list_of(encoded, b"B" + struct.pack("<I", len(inner)) + inner)))
    found = ckpt_tools.inspect(path)
    assert "os.system" not in found.globals
    assert found.values["x.0"] == f"{len(inner)} bytes"
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth", weights_only=True)["x"] == [inner, inner]


# --- what a fuzzer found: outputs that could not be read again


def test_52_state_that_is_dropped(tmp_path: Path) -> None:
    """The state of a known object is an unknown one: with `drop` the step goes, and the rest is written."""
    namespace = p.glob("argparse", "Namespace") + b")\x81" + SYSTEM + COMMAND + p.REDUCE + p.BUILD
    path = write(tmp_path, beside(namespace))
    ckpt_tools.convert(path, tmp_path / "out.pth", objects="drop")
    assert "os.system" not in ckpt_tools.inspect(tmp_path / "out.pth").globals


def test_52_items_of_a_class(tmp_path: Path) -> None:
    """A state and items set on a known class itself: no plain data, so `drop` leaves all of it out."""
    steps = SYSTEM + COMMAND + p.REDUCE + p.BUILD + p.text("k") + p.integer(1) + p.SETITEM
    path = write(tmp_path, beside(p.glob("collections", "OrderedDict") + steps))
    ckpt_tools.convert(path, tmp_path / "out.pth", objects="drop")
    assert list(torch.load(tmp_path / "out.pth")) == ["a.w"]


def test_65_keys_that_look_alike_above_a_state_dict(tmp_path: Path) -> None:
    """Two keys of the same text, one above the state dict: which values lie beside it is not guessed."""
    inner = p.dict_of(**{"b.w": p.tensor()})
    keys = [p.tuple_of(p.sizes(number)) for number in (1, 2)]
    body = p.EMPTY_DICT + p.MARK + keys[0] + inner + keys[1] + p.NONE + p.SETITEMS
    expect_convert_refused(
        write(tmp_path, raw(body)), ConvertError, "Two keys of the checkpoint are written", target="out.safetensors"
    )


def test_63_array_of_odd_length(tmp_path: Path) -> None:
    """A NumPy array whose bytes are not whole elements is refused, not written as a tensor that nobody can read."""
    numbers = (b"K\x03", p.text("<"), p.NONE, p.NONE, p.NONE, b"J\xff\xff\xff\xff", b"J\xff\xff\xff\xff", b"K\x00")
    dtype = p.call("numpy", "dtype", p.text("f8"), p.FALSE, p.TRUE) + p.tuple_of(*numbers) + p.BUILD
    empty = p.call("numpy._core.multiarray", "_reconstruct", p.glob("numpy", "ndarray"), p.sizes(0), b"C\x01b")
    for size in (8, 7, 10, 16):
        state = p.tuple_of(b"K\x01", p.sizes(1), dtype, p.FALSE, b"C" + bytes([size]) + bytes(size))
        path = write(tmp_path, beside(empty + state + p.BUILD))
        if size == 8:
            ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain")
            assert ckpt_tools.inspect(tmp_path / "out.pth").totals["tensors"] == 2
        else:
            with pytest.raises(ObjectsError, match="would be lost: x"):
                ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain", overwrite=True)
