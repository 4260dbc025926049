"""Programs of torch.export that run something when they are loaded: texts that are evaluated, machine code."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt_tools import inspect, scan

EVIL = "__import__('os').system('id')"
KEY = b'"expr_str"'


class Sizes(torch.nn.Module):
    """Computes with the sizes of what it is given."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        half = x[: x.shape[0] // 2 + 1]
        return torch.cat([half.flatten(), y.new_zeros(max(x.shape[0], 3) * 2 % 5 + 1), y.flatten()])


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program with sizes that are not known."""
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    rows = torch.export.Dim.DYNAMIC
    given = (torch.ones(8, 2), torch.ones(6, 3))
    torch.export.save(torch.export.export(Sizes(), given, dynamic_shapes=({0: rows}, {0: rows})), path)
    return path


def changed(
    program: Path, out: Path, change: Callable[[bytes], bytes], name: str = "model.json", more: dict[str, bytes] | None = None
) -> Path:
    """The program with another graph, and with more records."""
    with zipfile.ZipFile(program) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.namelist():
            data = old.read(entry)
            is_model = entry.endswith("models/model.json")
            new.writestr(entry.replace("model.json", name) if is_model else entry, change(data) if is_model else data)
        for entry, data in (more or {}).items():
            new.writestr(f"model/{entry}", data)
    return out


def evil(data: bytes, key: bytes = KEY, text: str = EVIL) -> bytes:
    """A graph with a text for every size that runs a program."""
    parts = data.split(KEY + b": ")
    return parts[0] + b"".join(key + b": " + json.dumps(text).encode() + part[part.index(b'"', 1) + 1 :] for part in parts[1:])


def test_a_program_of_sizes_needs_code(program: Path) -> None:
    """What torch.export writes of sizes is not dangerous."""
    assert program.read_bytes().count(KEY) > 2
    assert scan(program)[0].verdict == "needs-code"


def test_files_that_are_called_models(program: Path, tmp_path: Path) -> None:
    """torch names the folder in a file after the file: weights in `models/` are no graphs of a program."""
    weights = torch.frombuffer(bytearray(KEY + b': "' + EVIL.encode() + b'" "'), dtype=torch.uint8)
    torch.save({"a.weight": weights}, tmp_path / "models.pth")
    assert scan(tmp_path / "models.pth")[0].verdict == "plain"
    named = tmp_path / "models.pt2"
    with zipfile.ZipFile(program) as old, zipfile.ZipFile(named, "w") as new:
        for entry in old.namelist():
            new.writestr(entry.replace("model/", "models/", 1), old.read(entry))
        new.writestr("models/data/weights/weight_9", weights.numpy().tobytes())
    assert scan(named)[0].verdict == "needs-code"


@pytest.mark.parametrize("key", [KEY, b'"expr\\u005fstr"'])
@pytest.mark.parametrize("name", ["model.json", "model.txt"])
def test_a_text_that_is_evaluated(key: bytes, name: str, program: Path, tmp_path: Path) -> None:
    """`torch.export.load` evaluates what stands for a size in any record below `models/`."""
    path = changed(program, tmp_path / "model.pt2", lambda data: evil(data, key), name)
    found = scan(path)[0]
    assert found.verdict == "dangerous"
    assert found.safety.calls[0][1].text == f"sympy.sympify({EVIL!r})"
    if name == "model.json":
        assert inspect(path).safety.verdict == "dangerous"


def test_a_graph_that_is_not_json_takes_no_time(program: Path, tmp_path: Path) -> None:
    """Of quotation marks without an end each is looked at once."""
    path = changed(program, tmp_path / "model.pt2", lambda _: b'"\\' * 500_000)
    assert scan(path)[0].verdict == "unexamined"


def test_compiled_code(program: Path, tmp_path: Path) -> None:
    """Of a program that was compiled `torch.export.load` loads the library."""
    library = {"data/aotinductor/model/a.wrapper.so": b"\x7fELF", "data/aotinductor/model/a_metadata.json": b"{}"}
    path = changed(program, tmp_path / "model.pt2", bytes, more=library)
    assert [where for where, _ in scan(path)[0].safety.calls] == ["model/data/aotinductor/model/a.wrapper.so"]


SIZES = [
    "Symbol('s77', positive=True, integer=True)", "s0", "2*s0 + 1", "-s0//2", "FloorDiv(s0, 2)", "Max(1, s0)", "u0 >= 0",
    "Eq(Mod(s0, 2), 0) & ~(s1 < 3)", "floor(0.5*s0)", "True", "int_oo", "Float('0.5', precision=53)", "zuf0 | u12",
    "Add(Mul(Integer(2), Symbol('s0', positive=True, integer=True)), Integer(-1))", "OpaqueUnaryFn_sqrt(ToFloat(s0))",
]  # fmt: skip
OTHERS = [
    EVIL, "eval('x')", "eval ('x')", "open('x', 'w')", "(eval)('x')", "s0.func", "Symbol('s0').func", "(lambda: s0)()",
    "[s0]", "Symbol('s0')('x')", "Add(exec, s0)", "'x'('y')", "exec", "S('open(1)')", "s0; s1", "A__b", "F'{s0}'",
]  # fmt: skip


@pytest.mark.parametrize("text", [*SIZES, *OTHERS])
def test_sizes_and_other_texts(text: str, program: Path, tmp_path: Path) -> None:
    """Sizes as torch and sympy print them, old and new, need code; what could reach a function of Python's is dangerous."""
    path = changed(program, tmp_path / "model.pt2", lambda data: evil(data, text=text))
    assert scan(path)[0].verdict == ("needs-code" if text in SIZES else "dangerous")
