"""Pickles in texts, in every way that a text may hold one, and pickles that unpicklers read differently."""

import base64
import gzip
import hashlib
import io
import json
import marshal
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.package.package_exporter import PackageExporter

import ckpt_tools
from tests.support.commands import ckpt
from tests.support.terminal import run


class Runs:
    """Runs a command when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


EVIL = pickle.dumps({"x": Runs()}, 4)
OLD = pickle.dumps({"x": Runs()}, 0)
TEXT = base64.b64encode(EVIL).decode()


def archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return made.getvalue()


def tar(name: str, data: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as file:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        file.addfile(info, io.BytesIO(data))
    return made.getvalue()


def in_json(text: str) -> bytes:
    """A text where stable-baselines3 keeps a pickle."""
    return json.dumps({"verbose": 0, "policy_class": {":type:": "<class 'abc.ABCMeta'>", ":serialized:": text}}).encode()


HEADER = json.dumps({"__metadata__": {"x": TEXT}, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
HIDDEN = {
    "a member of a zip": archive({"data": in_json(TEXT)}),
    "a deflated member of a zip": archive({"data": in_json(TEXT) + b" " * 9000}, zipfile.ZIP_DEFLATED),
    "a member of a tar": tar("algorithm.json", in_json(TEXT)), "a file of JSON": in_json(TEXT),
    "JSON with escapes": in_json(TEXT).replace(TEXT[:4].encode(), "".join(f"\\u{ord(sign):04x}" for sign in TEXT[:4]).encode()),
    "lines of base64 in JSON": in_json(base64.encodebytes(EVIL).decode()),
    "what base64 passes over": in_json("!".join(TEXT)),
    "the other alphabet of base64": in_json(base64.urlsafe_b64encode(pickle.dumps({"\u07ff?>": Runs()}, 4)).decode()),
    "protocol 0": in_json(base64.b64encode(OLD).decode()), "without PROTO": in_json(base64.b64encode(EVIL[2:]).decode()),
    "hexadecimal digits": in_json(EVIL.hex()), "a character for each byte": in_json(EVIL.decode("latin-1")),
    "protocol 0 as it is": in_json(OLD.decode()), "zlib in base64": in_json(base64.b64encode(zlib.compress(EVIL)).decode()),
    "gzip in base64": in_json(base64.b64encode(gzip.compress(EVIL)).decode()), "a key": json.dumps({TEXT: 1}).encode(),
    "in a longer text": json.dumps({"source": f"load('{TEXT}')"}).encode(),
    "YAML": f"model: !!binary |\n  {base64.encodebytes(EVIL).decode()}\n".encode(),
    "no quotes": f"model = {TEXT}\n".encode(), "behind a quote without an end": f'5" x\nmodel = {TEXT}\n'.encode(),
    "across blocks of the reader": b'["' + b'","'.join([b"ab cd"] * 524_286) + b'","' + TEXT.encode() + b'"]',
    "metadata of safetensors": struct.pack("<Q", len(HEADER)) + HEADER + bytes(4),
    "a small file that is no text": b"\x0a\x02\x08\x01\xff" + in_json(TEXT),
    "an attribute of HDF5": b"\x89HDF\r\n\x1a\n" + bytes(2 << 20) + in_json(TEXT) + bytes(99),
}  # fmt: skip


def scanned(tmp_path: Path, data: bytes) -> ckpt_tools.Scanned:
    (tmp_path / "file").write_bytes(data)
    (report,) = ckpt_tools.scan(tmp_path / "file")
    return report


@pytest.mark.parametrize("name", HIDDEN)
def test_pickles_in_texts_are_looked_through(name: str, tmp_path: Path) -> None:
    """The call is named, wherever the text stands and however it says the pickle."""
    report = scanned(tmp_path, HIDDEN[name])
    assert report.verdict == "dangerous", report
    assert f"{os.system.__module__}.system('true')" in [call.text for _, call in report.safety.calls]


BEHIND = b"cos\nsystem\n(S'true'\ntR."
ESCAPED = "".join(f"\\u{ord(letter):04x}" for letter in "os"), "".join(f"\\u{ord(letter):04x}" for letter in "system")


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (f"V{ESCAPED[0]}\nV{ESCAPED[1]}\n\x93Vtrue\n\x85R.".encode("latin-1"), "dangerous"),
        (f"N0V{ESCAPED[0]}\nV{ESCAPED[1]}\n\x93Vtrue\n\x85R.".encode("latin-1"), "dangerous"),
        (b"S'\\157\\163'\nS'\\163\\171\\163\\164\\145\\155'\n\x93(S'true'\ntR.", "dangerous"),
        (b"\x8d\2\0\0\0\0\0\0\0os\x8d\6\0\0\0\0\0\0\0system\x93\x8c\4true\x85R.", "dangerous"),
        (b"\x80\x04" + b"(" * 30000 + b"1" * 30000 + BEHIND, "unexamined"),
        (b"\x80\x02}q\0" + b"h\0" * 200000 + BEHIND, "dangerous"),
    ],
    ids=["escapes", "behind another value", "octal", "long counts", "beyond depth", "many objects"],
)
def test_however_a_pickle_in_a_text_begins(data: bytes, verdict: str, tmp_path: Path) -> None:
    """Names that are escaped, counts of eight bytes and what no limit lets be read are seen in a text as in a file."""
    path = tmp_path / "ppo.zip"
    path.write_bytes(archive({"data": in_json(base64.b64encode(data).decode())}))
    assert ckpt_tools.scan(path)[0].verdict == verdict


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_in_a_zip_may_have_bytes_in_front(compression: int, tmp_path: Path) -> None:
    inner = b"\xff\xfe\0\1" * 2000 + archive({"data": in_json(TEXT)})
    (tmp_path / "outer.zip").write_bytes(archive({"model/best.zip": inner}, compression))
    assert ckpt_tools.scan(tmp_path / "outer.zip")[0].verdict == "dangerous"


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_a_package_of_torch_is_a_program(tmp_path: Path) -> None:
    """torch.package runs the sources in its archive, so that even `collections.OrderedDict` may be a module of it."""
    with PackageExporter(tmp_path / "package.pt") as exporter:
        exporter.save_pickle("model", "model.pkl", {"w": torch.ones(2)})
    assert ckpt_tools.scan(tmp_path / "package.pt")[0].verdict == "needs-code"


def test_an_honest_policy_needs_code(tmp_path: Path) -> None:
    """What stable-baselines3 saves names its own classes: it is as its pickles are."""
    classes = pickle.dumps({"optimizer": torch.optim.Adam}, 4)
    torch.save({"w": torch.ones(2)}, tmp_path / "policy.pth")
    members = {"data": in_json(base64.b64encode(classes).decode()), "policy.pth": (tmp_path / "policy.pth").read_bytes()}
    report = scanned(tmp_path, archive(members))
    assert (report.verdict, report.safety.classes) == ("needs-code", ["torch.optim.adam.Adam"])


def test_code_of_a_lambda_layer_could_not_be_examined(tmp_path: Path) -> None:
    code = base64.b64encode(marshal.dumps((lambda x: x).__code__)).decode()
    report = scanned(tmp_path, archive({"config.json": json.dumps({"class_name": "__lambda__", "code": code}).encode()}))
    assert report.verdict == "unexamined"
    assert "marshal" in report.safety.unexamined[0][1]


WORDS = (
    "group", "label", "last", "learn", "left", "level", "lead", "gAFC", "gAMe", "c", "i", "cat", "config", "class", "input",
)  # fmt: skip
DIGESTS = [hashlib.sha256(bytes([number % 256, number // 256])).digest() for number in range(3000)]
LINES = [base64.b64encode(digest * 2)[:64].decode() for digest in DIGESTS[:300]]
HONEST = {
    **{f"many {name}": f'{{"a": "{text}", "b": {text}}}'.encode() for name, text in
       (("digits", "3" * 300_000), ("signs", "1234567890123456+/-" * 50_000), ("hexadecimal digits", "ab" * 500_000))},
    "lines of a certificate that begin as names of a pickle": "\n".join(
        ["-----BEGIN CERTIFICATE-----", *(f"{'ci'[number % 2]}{line[1:]}" for number, line in enumerate(LINES))]).encode(),
    "digests": json.dumps({digest.hex(): 1 for digest in DIGESTS}).encode(),
    "base64 of numbers": json.dumps([base64.b64encode(digest).decode() for digest in DIGESTS]).encode(),
    "a table": "".join(f"{n},{n / 7},hello world {n}\n" for n in range(3000)).encode(),
    "source code": b'class Net:\n    """A network."""\n\nimport torch\nfrom torch import nn\n' * 99,
    "a vocabulary": json.dumps({f"{'token' * (n % 9)}\u0120{n}": n for n in range(3000)}).encode(),
    "words that are opcodes in base64": json.dumps([f"{a} {b} of the {a}s, {b}" for a in WORDS for b in WORDS]).encode(),
    "a quote without an end": b'"' + b'\\"' * 100_000,
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_honest_texts_hold_nothing_to_run(name: str, tmp_path: Path) -> None:
    """Digests, tables, source code and vocabularies are no pickles, plain or in base64."""
    assert scanned(tmp_path, HONEST[name]).verdict == "nothing"


def test_every_command_sees_the_metadata_of_safetensors(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors", {"x": TEXT})
    verdicts = [ckpt_tools.scan(tmp_path / "m.safetensors")[0].verdict]
    verdicts += [ckpt_tools.inspect(tmp_path / "m.safetensors").safety.verdict]
    assert verdicts == ["dangerous", "dangerous"]
    ckpt("check", tmp_path / "m.safetensors", code=1)


def test_a_line_about_safety_has_at_most_200_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call is given may be long: people see its beginning, JSON has it."""
    monkeypatch.chdir(tmp_path)

    class Long:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("x" * 190, "y" * 190)

    torch.save({"w": torch.ones(2), "x": Long()}, "a.pth")
    for command in ("scan", "inspect", "check"):
        lines = [line for line in run(command, "a.pth").output.splitlines() if "system" in line and "weights_only" not in line]
        assert lines or command == "check"
        assert max(map(len, lines), default=0) <= 200
    assert max(len(line) for line in run("check", "a.pth").output.splitlines() if "dangerous]" in line) <= 200
    report = json.loads(run("scan", "a.pth", "--json").stdout)
    assert len(report["calls"][0]["call"]) > 380


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
