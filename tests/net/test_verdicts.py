"""What commands say about a file that would run code; what each file is called stands in tests/net/payloads/."""

import gzip
import io
import json
import lzma
import os
import pickle
import random
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_tools
from ckpt_tools import limits
from tests.hostile import pickles as p
from tests.support.commands import ckpt
from tests.support.samples import corpus
from tests.support.servers import Server
from tests.support.zero_files import save_zero, trained


class Payload:
    """Pickled as a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


HARM = Payload("echo owned")
RUNS = f"{os.system.__module__}.system('echo owned')"
CALL = b"cos\nsystem\n(S'id'\ntR."
NOISE = random.Random(0).randbytes(3_000_000)  # which cannot be packed


def verdict(path: Path, data: bytes) -> str:
    """What `scan` calls these bytes."""
    path.write_bytes(data)
    return ckpt_tools.scan(path)[0].verdict


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (zlib.compress(p.pickle(b"N") + NOISE, 1)[:-4] + b"abcd", "unexamined"),
        (b"ZF" + b"0x%-17x" % 9 + zlib.compress(NOISE)[:-4] + b"abcd", "unexamined"),
        (zlib.compress(CALL + NOISE, 1)[:-4] + b"abcd", "dangerous"),
        (zlib.compress(CALL + NOISE, 1)[:-400] + b"\xff" * 400, "dangerous"),
        (lzma.compress(CALL + NOISE, lzma.FORMAT_ALONE)[:-400] + b"\xff" * 400, "dangerous"),
    ],
    ids=["checksum", "joblib 0.8", "a call before a checksum", "a call before a wrong byte", "the same in lzma"],
)
def test_what_is_damaged_far_behind(data: bytes, expected: str, tmp_path: Path) -> None:
    """Loaders read what comes before the damage: it counts, and without a call the file is never plain."""
    assert verdict(tmp_path / "file", data) == expected


def test_more_than_is_looked_at(tmp_path: Path) -> None:
    """A function behind more parts than are looked at is a danger too."""
    parts = b"".join(p.text(f"a{number}") + b"]" for number in range(2000))
    partial = p.call("functools", "partial", p.glob("models", "run"), p.text("id"))
    state = p.glob("types", "SimpleNamespace") + b")\x81}(" + parts + b"u" + p.text("keys") + partial + b"sb"
    assert verdict(tmp_path / "file", p.pickle(p.call("builtins", "dict", state))) == "dangerous"


def test_a_long_history_is_examined(tmp_path: Path) -> None:
    """NumPy pickles each number as a call on one dtype: whoever logs a loss at every step saves thousands of them."""
    losses = [np.float64(step) / 7 for step in range(40_000)]
    assert verdict(tmp_path / "a.pkl", pickle.dumps({"losses": losses}, 4)) == "needs-code"


@pytest.mark.parametrize("padding", [b"](" * 2000, b"]0" * 2000], ids=["lists", "popped"])
def test_a_call_behind_a_limit(padding: bytes, tmp_path: Path) -> None:
    """What is too much to read is told, also where nothing has yet said that it is a pickle."""
    data = b"(lp0\n" + padding + CALL
    with limits.raised(nodes=1):
        assert verdict(tmp_path / "a.pkl", data) == verdict(tmp_path / "b.pkl", pickle.dumps(None, 2) + data) == "unexamined"


def why(path: Path) -> str:
    """Why a file could not be examined."""
    found = ckpt_tools.scan(path)[0].to_json()
    assert found["verdict"] == "unexamined"
    return str(found["unexamined"])


def test_what_is_looked_through_is_limited(tmp_path: Path) -> None:
    """Too many members, or archives too deep in one another, are told with the limit's name, which raises it."""
    path = tmp_path / "in.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(6):
            archive.writestr(f"{number}.pkl", pickle.dumps(number))
    assert ckpt_tools.scan(path)[0].verdict == "plain"
    with limits.raised(nodes=200):
        assert "(--limit nodes). The limit is 200 containers" in why(path)
    path.write_bytes(gzip.compress(gzip.compress(path.read_bytes())))
    assert ckpt_tools.scan(path)[0].verdict == "plain"
    with limits.raised(nested=2):
        assert "(--limit nested). The limit is 2 archives" in why(path)
    data = pickle.dumps(1)
    for _ in range(1000):
        data = gzip.compress(data, 0)
    path.write_bytes(data)
    with limits.raised(nested=10_000):
        assert "nested deeper than Python can follow" in why(path)


def test_a_part_that_says_too_much_is_named(tmp_path: Path) -> None:
    """A pickle beside those of a rank's file counts, and the file is named."""
    folder = save_zero(tmp_path / "z3", trained(), 3, 2)
    assert ckpt_tools.inspect(folder.parent).safety.verdict == "plain"
    one = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    with zipfile.ZipFile(one, "a") as archive:
        archive.writestr(f"{one.stem}/more", pickle.dumps(HARM))
    found = ckpt_tools.inspect(folder.parent).safety
    assert found.verdict == "dangerous"
    assert found.calls[0][0].startswith(f"{one.name}: ")


def test_every_pickle_counts(tmp_path: Path) -> None:
    """A pickle beside the checkpoint's own counts for globals, verdict and weights_only."""
    path = tmp_path / "a.pth"
    torch.save({"w": torch.ones(2)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a/evil.pkl", pickle.dumps(HARM))
    found = ckpt_tools.inspect(path)
    assert found.safety.verdict == "dangerous"
    assert RUNS.partition("(")[0] in found.globals
    assert not found.weights_only["loads"]


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_array_among_tensors(kind: int, tmp_path: Path) -> None:
    """`numpy.load` reads it from a checkpoint of torch, whose own reader takes it for the numbers of a tensor, or leaves it."""
    array = io.BytesIO()
    np.save(array, np.array([HARM, None], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(tmp_path / "a.pth", "w", kind) as archive:
        for name, data in (("data.pkl", b"\x80\x02}."), ("version", b"3"), ("data/0", array.getvalue() + bytes(5000))):
            archive.writestr(f"a/{name}", data)
    assert ckpt_tools.inspect(tmp_path / "a.pth").safety.verdict == "dangerous"


def test_names_do_not_steer_a_terminal(tmp_path: Path) -> None:
    """The names of classes in a verdict are escaped, in every command that tells it."""
    path = tmp_path / "a.pth"
    path.write_bytes(b"\x80\x02ctorch.distributed.tensor\nD\x1b[31m\n)\x81.")
    for command in ("inspect", "scan"):
        shown = ckpt(command, path, code=None).output
        assert "\x1b" not in shown
        assert r"torch.distributed.tensor.D\x1b[31m" in shown


def test_what_cannot_be_read_is_rated(tmp_path: Path) -> None:
    """A file that breaks behind a call, or is not a checkpoint, is refused, and the call is told all the same."""
    path = tmp_path / "a.pth"
    path.write_bytes(CALL[:-1] + b"\xff")
    assert "runs os.system('id')" in ckpt("inspect", path, code=3).output
    path.write_bytes(CALL)
    assert "dangerous" in [finding.code for finding in ckpt_tools.check(path).findings]
    path.write_bytes(p.pickle(p.glob("antigravity", "Thing")))
    assert "this names antigravity.Thing, which can run code" in ckpt("inspect", path).output.replace("\n", " ")


def test_what_to_do_stands_once_and_names_the_file(tmp_path: Path) -> None:
    """Of many dangerous calls twenty are told and the others counted; the command in the advice takes the file's tensors."""
    path = tmp_path / "evil.pth"
    torch.save({"a.weight": torch.ones(2), "run": [Payload(f"echo {number}") for number in range(23)]}, path)
    told = [finding for finding in ckpt_tools.inspect(path).findings if finding.code == "dangerous"]
    assert len(told) == 21
    assert told[-1].found == "... and 3 more calls"
    assert [bool(finding.fix and finding.expected) for finding in told] == [True] + [False] * 20
    command = told[0].fix.partition(": ckpt ")[2].split()
    assert command[1] == str(path)
    ckpt(*command)
    assert torch.load(command[2], weights_only=True)["a.weight"].tolist() == [1, 1]


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--json"], ["check"], ["scan"], ["report", "--output"]])
def test_a_call_is_shown_as_it_stands(command: list[str], tmp_path: Path) -> None:
    """What a shell runs between backticks is no option of ours."""
    written = "touch x; `id` `dtype=1`"
    path, page = tmp_path / "a.pkl", tmp_path / "page.html"
    path.write_bytes(pickle.dumps({"a": Payload(written)}))
    shown = ckpt(*command, *([page] if command[0] == "report" else []), path, code=None).output
    shown += page.read_text() if page.exists() else ""
    assert written in shown
    assert "--id" not in shown


@pytest.mark.parametrize("most", range(1, 5))
def test_what_ends_while_it_is_read(most: int) -> None:
    """A file that has lost its end meanwhile could not be examined, wherever it ends."""

    class Short(io.BytesIO):
        reads = 0

        def read(self, size: int | None = -1) -> bytes:
            self.reads += 1
            return super().read(size) if self.reads <= most else b""

    (report,) = ckpt_tools.scan(Short(pickle.dumps([1] * 3000, 4) * 30))
    assert report.verdict == "unexamined"
    assert "changed while it was read" in report.safety.unexamined[0][1]


def test_what_is_not_there(tmp_path: Path) -> None:
    """An empty folder is refused; of a path that is not there `scan` says what every other command says."""
    ckpt("scan", tmp_path, code=3)
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "model.pth")
    gone = tmp_path / "modle.pth"
    told = {ckpt(command, gone, code=3).stderr for command in ("scan", "inspect", "stats")}
    assert told == {f"Error: {gone} cannot be read.\nThere is no such file.\nDid you mean 'model.pth'?\n"}


def test_an_address_as_sarif(tmp_path: Path, server: Server) -> None:
    """A file behind an address is examined by ranges; a log of SARIF has the call and the member that it stands in."""
    torch.save({"w": torch.ones(2), "a": HARM}, tmp_path / "evil.pth")
    assert f"dangerous: it runs {RUNS}" in ckpt("scan", server.url("evil.pth"), code=1).output
    (result,) = json.loads(ckpt("scan", "--format", "sarif", tmp_path / "evil.pth", code=1).stdout)["runs"][0]["results"]
    assert RUNS in result["message"]["text"]
    assert result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"].endswith("/data.pkl")


def test_processes_say_the_same_as_one(tmp_path: Path) -> None:
    """Which names a file needs does not depend on the process that read it: each has hashes of its own."""
    data = p.pickle(*(p.glob("models", f"Net{number}") + b"0" for number in range(20)), b"N")
    for number in range(200):  # fewer are read by one
        (tmp_path / f"{number}.pth").write_bytes(data)
    alone, shared = (ckpt_tools.scan(tmp_path, jobs=jobs) for jobs in (1, 2))
    assert [row.to_json() for row in alone] == [row.to_json() for row in shared]
    assert alone[0].verdict == "needs-code"


@pytest.mark.parametrize("row", corpus("torch-zip", "torch-legacy", "torch-tar", "torchscript", "safetensors", "zip-bundle"))
def test_corpus_is_not_dangerous(row: dict[str, Any]) -> None:
    """No real file of others is called dangerous."""
    assert ckpt_tools.scan(row["path"])[0].verdict != "dangerous"


DATA_ALONE = f"in.pth is dangerous: it runs {RUNS}. What is written is data alone."
KEPT = f"in.pth is dangerous: it runs {RUNS}. What is written keeps its objects"
CONVERSIONS = {
    "convert in.pth out.safetensors": (3, f"in.pth is dangerous: it runs {RUNS}."),
    "convert in.pth 1.safetensors --objects plain": (0, DATA_ALONE),
    "convert in.pth 1.pth --objects drop": (0, DATA_ALONE),
    "convert in.pth 2 --shard-size 1KB --objects drop": (0, DATA_ALONE),
    "repair in.pth 2.safetensors": (0, DATA_ALONE),
    "convert in.pth plain.pth --to-dir 3 --objects drop": (0, DATA_ALONE),
    "convert in.pth 4.pth --objects keep --allow-dangerous": (0, f"{KEPT}: treat it as dangerous too."),
    "average plain.pth in.pth -o 5.pth --objects drop": (0, f"it runs {RUNS}. Only its tensors are read."),
    "repair in.pth 6.pth": (1, KEPT),
    "convert in.pth --in-place --objects keep --allow-dangerous --add-prefix a.": (0, f"in.pth is dangerous: it runs {RUNS}."),
}


@pytest.mark.parametrize("command", CONVERSIONS)
def test_conversions_say_that_their_input_is_dangerous(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """convert, average and repair name the call, and say whether what they write is data alone."""
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2), "x": HARM}, "in.pth")
    torch.save({"w": torch.ones(2)}, "plain.pth")
    code, said = CONVERSIONS[command]
    assert said in ckpt(*command.split(), code=code).output
    if command.startswith("repair in.pth 6"):
        report = json.loads(ckpt(*command.split(), "--overwrite", "--json", code=1).stdout)
        assert [kind for kind, _ in report["notes"]] == ["dangerous"]


def test_a_third_archive_in_the_numbers_of_two(tmp_path: Path) -> None:
    """torch goes by a place that the last archive names: there it finds what only the bytes of a tensor of the first hold."""
    numbers, parts = bytearray(40_000), []
    for tensor in (torch.tensor(list(numbers), dtype=torch.uint8), torch.zeros(3000)):
        torch.save({"w": tensor}, out := io.BytesIO())
        parts.append(out.getvalue())
    start, place = parts[0].index(numbers), len(parts[1]) - 98
    hidden = io.BytesIO(parts[0][:start])
    with zipfile.ZipFile(hidden, "a") as archive:
        for name, data in {"data.pkl": p.pickle(CALL[:-1]), "version": b"3\n", "byteorder": b"little"}.items():
            archive.writestr(f"x/{name}", data)
    made = hidden.getvalue()[start:-22]
    end = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0, 45, 0, 0, 3, 3, start + len(made) - archive.start_dir, archive.start_dir)
    numbers[: len(made)], numbers[place - start : place - start + len(end)] = made, end
    torch.save({"w": torch.tensor(list(numbers), dtype=torch.uint8)}, out := io.BytesIO())
    data = out.getvalue() + parts[1]
    (tmp_path / "x.pth").write_bytes(data)
    with pytest.raises(pickle.UnpicklingError, match=r"os\.system"):
        torch.load(tmp_path / "x.pth", weights_only=True)
    assert verdict(tmp_path / "file", data) == "unexamined"
