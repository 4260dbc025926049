"""What unpicklers read differently: frames that are not kept to, lines without an end, numbers of C."""

import io
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ckpt_tools

CALL = b"cos\nsystem\n(S'true'\ntR"


def frame(length: int) -> bytes:
    return b"\x95" + struct.pack("<Q", length)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


# "os", "system", "torch" and "Size" at 1, 2, 11, 12: to C `g11` behind a frame of `N0g1` reads `1`.
MEMO = b"".join(text(name) + b"p%d\n0" % at for at, name in ((1, "os"), (2, "system"), (11, "torch"), (12, "Size")))
CROSSED = b"\x80\x04" + MEMO + frame(4) + b"N0g11\n" + frame(4) + b"N0g12\n\x93."

# (the bytes, the verdict)
READ_TWO_WAYS = {
    "a line behind its frame": (CROSSED, "unexamined"),
    "the same without a protocol": (CROSSED[2:], "unexamined"),
    "counted text behind its frame": (b"\x80\x04" + frame(8) + text("abcdef") + b".", "unexamined"),
    "an argument behind its frame": (b"\x80\x04" + frame(2) + b"M\0\1.", "unexamined"),
    "an index of the memo behind its frame": (b"\x80\x04N\x94" + frame(3) + b"0j\0\0\0\0.", "unexamined"),
    "a frame behind the end of another": (b"\x80\x04" + frame(12) + b"N0" + frame(9) + b"N0N0N0N0N.", "unexamined"),
    "a frame that goes on behind STOP": (b"\x80\x04" + frame(6) + b"N.\xff\xff\xff\xff" + CALL + b".", "unexamined"),
    "a frame in a frame": (b"\x80\x04" + frame(13) + b"N0" + frame(2) + b"N.", "unexamined"),
    "a call behind a line that goes on": (b"\x80\x04" + frame(3) + b"I1234\n0" + CALL + b".", "dangerous"),
    "a frame that is too long": (b"N" + frame(99) + CALL + b".", "dangerous"),
    "INST whose line does not end": (b"(S'true'\nios\nsystem.", "dangerous"),
    "a name whose line does not end": (b"\x80\x02cmodels\nNetx", "unexamined"),
    "a list of arguments": (b"\x80\x02cos\nsystem\n]X\4\0\0\0trueaR.", "dangerous"),
    "octal with many zeros": (b"I0000000000000000000000000000012\n0" + CALL + b".", "dangerous"),
    "a number that is a NUL": (b"I\0\n0" + CALL + b".", "dangerous"),
    "a number of 5000 digits": (b"I" + b"9" * 5000 + b"\n0" + CALL + b".", "dangerous"),
    "a pickle in a state, behind a value": (
        b"\x80\x04\x8c\x06models\x8c\x03Net\x93)\x81}X\1\0\0\0aC\x19N0" + CALL + b".sb.", "dangerous"),
    "frames that are kept to": (b"\x80\x04" + frame(3) + b"N0N" + frame(2) + b"0N" + frame(1) + b".", "plain"),
    "an empty frame": (b"\x80\x04" + frame(0) + frame(2) + b"N.", "plain"),
    "text that begins as a pickle": (b"(in words)", "nothing"),
    "a word": (b"config", "nothing"),
}  # fmt: skip


@pytest.mark.parametrize("in_zip", [False, True], ids=["bare", "torch-zip"])
@pytest.mark.parametrize("name", READ_TWO_WAYS)
def test_what_readers_read_differently(name: str, in_zip: bool, tmp_path: Path) -> None:
    """A pickle that unpicklers read in two ways is dangerous or could not be examined."""
    data, verdict = READ_TWO_WAYS[name]
    path = tmp_path / "a.pth"
    path.write_bytes(data)
    if in_zip:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", data)
            archive.writestr("a/version", b"3")
    found = ckpt_tools.scan(path)[0].safety
    assert found.verdict == (verdict if not in_zip or verdict != "nothing" else "unexamined"), found.text


def test_c_takes_another_name() -> None:
    """What the first row is about: C's unpickler, on a stream, resolves a name that stands nowhere as it is read."""
    found = []

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            found.append((module, name))
            return None

    Reader(io.BytesIO(CROSSED)).load()
    assert found == [("os", "system")]


@pytest.mark.parametrize("protocol", range(6))
def test_honest_frames_are_plain(protocol: int, tmp_path: Path) -> None:
    """What both picklers write, with many frames and long bytes between them, is plain."""
    value = {"a": [bytes(70_000), "x" * 70_000, list(range(50_000))], "b": ["layer", 1.5, None] * 15_000}
    for number, dump in enumerate((pickle.dump, pickle._dump)):  # type: ignore[attr-defined]
        path = tmp_path / f"{number}.pkl"
        with open(path, "wb") as file:
            dump(value, file, protocol)
        assert ckpt_tools.scan(path)[0].verdict == "plain"


def test_four_readers_beside_scan() -> None:
    """Of 800 pickles, most of them wrong: what one of four unpicklers resolves or calls is shown, or not called plain."""
    command = [sys.executable, "-m", "tests.fuzz.readers", "--cases", "800", "--seed", "7"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == 0, said.stdout[-3000:] + said.stderr[-1000:]
    assert "'readings': 3200" in said.stdout
