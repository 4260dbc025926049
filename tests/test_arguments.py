"""Arguments of public calls: what is natural in Python is taken, open files too; anything else is one clear UsageError."""

import contextlib
import datetime
import inspect
import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from torch import nn

import ckpt_tools
import ckpt_tools.torch as load_code
from ckpt_tools.errors import CkptError, NotACheckpointError, OutputError, UsageError
from tests.support.samples import FIXTURES

SINGLE = FIXTURES / "single.pth"
PUBLIC: dict[str, Callable[..., Any]] = {
    name: getattr(home, name)
    for home in (ckpt_tools, load_code)
    for name in home.__all__
    if inspect.isfunction(getattr(home, name))
}


class Rude:
    """A value that answers nothing it is asked."""

    def __repr__(self) -> str:
        raise ValueError("no")

    def __bool__(self) -> bool:
        raise ValueError("no")


WILD: list[Any] = [
    None, 3, -1, 10**30, 2.5, float("nan"), True, "", "nonsense", "a=b", "\0", "\udc80", b"bytes", object(), Rude(), [], [3],
    ["x"], [None], (1, 2), {}, {"a": "b"}, {1: 2}, {"a": 3}, {3}, range(2), datetime.date(2024, 1, 1), np.arange(2),
    np.float32(1), np.array(None), torch.ones(2), torch.bfloat16, torch.device("cpu"), nn.Linear(1, 1), lambda *_: None,
    io.BytesIO(b"x"), io.StringIO("x"),
]  # fmt: skip
ARGUMENTS = [(name, argument) for name, function in PUBLIC.items() for argument in inspect.signature(function).parameters]


def expect_ours(folder: Path, function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Call a function with what it cannot do without, and one argument more; only our own errors come out."""
    out, state = folder / "out.pth", {"weight": torch.ones(1, 1)}
    needed = {
        "path": SINGLE, "source": SINGLE, "target": out, "left": SINGLE, "right": SINGLE, "sources": [SINGLE, SINGLE],
        "output": folder / "out.toml", "model": nn.Linear(1, 1), "state_dict": state, "model_or_mapping": state,
        "name": "fc1.bias", "old": SINGLE, "new": SINGLE, "key": folder / "key.pem", "inputs": "1x1",
    }  # fmt: skip
    wanted = inspect.signature(function).parameters
    keywords = {name: value for name, value in needed.items() if name in wanted} | given
    if function is load_code.save and "path" not in given:
        keywords["path"] = out
    if function is ckpt_tools.match:
        keywords.setdefault("like", SINGLE)
    if function is ckpt_tools.edit_in_place:
        keywords.setdefault("dry_run", True)
    with contextlib.suppress(CkptError):
        made = function(**keywords)
        if isinstance(made, ckpt_tools.Checkpoint):
            made.close()
    out.unlink(missing_ok=True)
    out.with_suffix(".toml").unlink(missing_ok=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_whatever_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, argument: str) -> None:
    """Any value for any argument of any public call ends well or in an error of ours."""
    monkeypatch.chdir(tmp_path)
    for value in WILD:
        if argument in ("progress", "before") and isinstance(value, nn.Module):
            continue  # a function that takes other arguments: its error is the caller's
        expect_ours(tmp_path, PUBLIC[name], {argument: value})


def test_what_no_call_takes(tmp_path: Path) -> None:
    """An argument that there is not is Python's own TypeError; options are checked before anything is looked at."""
    with pytest.raises(TypeError, match="no_such"):
        ckpt_tools.inspect(SINGLE, no_such=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        ckpt_tools.inspect(SINGLE, SINGLE)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        ckpt_tools.convert(SINGLE)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"convert\(\) got an unexpected keyword argument 'no_such'"):
        ckpt_tools.convert(SINGLE, "out.pth", no_such=1)  # type: ignore[call-arg]
    (tmp_path / "out.pth").write_bytes(b"mine")
    with pytest.raises(UsageError, match="does not go with"):
        ckpt_tools.convert(tmp_path / "none.pth", tmp_path / "out.pth", strip_module=True, add_module=True)
    ckpt_tools.convert(target=tmp_path / "named.pth", source=SINGLE)
    report = ckpt_tools.inspect(tmp_path / "named.pth")
    assert pickle.loads(pickle.dumps(report)) == report


def test_numbers_of_other_kinds(tmp_path: Path) -> None:
    """NumPy's numbers, a size as a float, weights as a tensor, globs as a set."""
    ckpt_tools.convert(SINGLE, tmp_path / "shards", shard_size=1e6, overwrite=np.bool_(True))  # type: ignore[arg-type]
    weights: Any = torch.tensor([0.25, 0.75])
    assert ckpt_tools.average([SINGLE, str(SINGLE)], tmp_path / "mean.pth", weights=weights).weights == [0.25, 0.75]
    assert ckpt_tools.stats(SINGLE, depth=np.int64(1))  # type: ignore[arg-type]
    ckpt_tools.convert(SINGLE, tmp_path / "less.pth", drop={"fc1.*", "fc2.*"})  # type: ignore[arg-type]
    assert not any(name.startswith("fc") for name in torch.load(tmp_path / "less.pth"))


@pytest.mark.parametrize(("function", "paths"), [
    (PUBLIC["match"], (SINGLE, SINGLE)), (PUBLIC["convert"], (SINGLE, "out.pth", "model")),
    (ckpt_tools.steps(SINGLE).fit, (SINGLE,)),
])  # fmt: skip
def test_options_go_by_name(function: Callable[..., Any], paths: tuple[Any, ...]) -> None:
    """An option without its name is a TypeError that says so, before any option is looked at."""
    with pytest.raises(TypeError, match="options go by name"):
        function(*paths)


BYTES = SINGLE.read_bytes()
WANTED = torch.load(SINGLE)


class Unseekable(io.RawIOBase):
    """What a network gives: bytes in order."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return 0


READ: dict[str, Callable[[Any], Any]] = {
    "inspect": lambda file: ckpt_tools.inspect(file).to_json(),
    "check": lambda file: ckpt_tools.check(file).to_json(),
    "scan": lambda file: [row.to_json() for row in ckpt_tools.scan(file)],
    "stats": lambda file: ckpt_tools.stats(file).to_json(),
    "show": lambda file: ckpt_tools.show(file, "fc1.bias").to_json(),
    "diff": lambda file: ckpt_tools.diff(file, SINGLE, values=True).to_json(),
    "match": lambda file: ckpt_tools.match(file, like=SINGLE).to_json(),
    "load": lambda file: {name: tensor.tolist() for name, tensor in load_code.load(file).items()},
    "load_state_dict": lambda file: {name: tensor.tolist() for name, tensor in load_code.load_state_dict(file).items()},
    "open": lambda file: {name: tensor.tolist() for name, tensor in ckpt_tools.steps(file).unwrap().state_dict().items()},
}


def without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: without_paths(item) for key, item in value.items() if key not in ("path", "left", "right", "source", "seconds")
        }
    return [without_paths(item) for item in value] if isinstance(value, list | tuple) else value


def opened(kind: str, folder: Path) -> BinaryIO:
    if kind == "memory":
        return io.BytesIO(BYTES)
    if kind == "on disk":
        return SINGLE.open("rb")
    if kind == "behind something":
        place = folder / "two.bin"
        place.write_bytes(b"before" + BYTES)
        file = place.open("rb")
        file.seek(6)
        return file
    with zipfile.ZipFile(folder / "holding.zip", "w") as archive:
        archive.write(SINGLE, "single.pth")
    return zipfile.ZipFile(folder / "holding.zip").open("single.pth")  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["memory", "on disk", "behind something", "member"])
@pytest.mark.parametrize("call", READ)
def test_an_open_file_reads_as_its_path_does(call: str, kind: str, tmp_path: Path) -> None:
    """Every call that reads gives for an open file what it gives for the path, twice, and leaves it where it stood."""
    wanted = without_paths(READ[call](SINGLE))
    with opened(kind, tmp_path) as file:
        at = file.tell()
        assert without_paths(READ[call](file)) == wanted
        assert file.tell() == at
        assert without_paths(READ[call](file)) == wanted


def test_load_into_from_memory() -> None:
    for hooks in (False, True):
        model = nn.Linear(2, 2)
        file = io.BytesIO()
        torch.save({"module.weight": torch.ones(2, 2), "module.bias": torch.ones(2)}, file)
        file.seek(0)
        assert load_code.load_into(model, file, hooks=hooks)
        assert model.weight.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("format", ["pth", "pth-legacy", "safetensors", "gguf"])
def test_written_into_memory(format: Any) -> None:
    """What convert and save write into an open file is a checkpoint, from where the file stood."""
    for write in (
        lambda file: ckpt_tools.convert(io.BytesIO(BYTES), file, format=format),
        lambda file: load_code.save(WANTED, file, format=format),
    ):
        file = io.BytesIO(b"head")
        file.seek(4)
        write(file)
        assert file.getvalue()[:4] == b"head"
        found = load_code.load_state_dict(io.BytesIO(file.getvalue()[4:]))
        assert found.keys() == WANTED.keys()
        assert all(torch.equal(found[name].reshape(-1), WANTED[name].reshape(-1)) for name in WANTED)


def test_the_name_of_an_open_file_decides(tmp_path: Path) -> None:
    """As that of a path does, and what is written is there when the call is back."""
    place = tmp_path / "out.safetensors"
    with place.open("wb") as file:
        report = ckpt_tools.convert(SINGLE, file)
        assert ckpt_tools.inspect(place).container == "safetensors"
    assert (report.target, report.container) == ("<out.safetensors>", "safetensors")


def test_repaired_and_averaged_in_memory() -> None:
    for write in (
        lambda file: ckpt_tools.repair(io.BytesIO(BYTES[:-100]), file),
        lambda file: ckpt_tools.average([io.BytesIO(BYTES), SINGLE], file),
    ):
        file = io.BytesIO()
        write(file)
        file.seek(0)
        assert torch.equal(torch.load(file)["fc1.bias"], WANTED["fc1.bias"])


def test_nothing_is_written_when_it_fails() -> None:
    file = io.BytesIO()
    with pytest.raises(CkptError, match="changes no name"):
        ckpt_tools.convert(SINGLE, file, rename="^nowhere=x")
    assert file.getvalue() == b""
    assert ckpt_tools.convert(SINGLE, file, dry_run=True).tensors == len(WANTED)
    assert file.getvalue() == b""


def closed() -> io.BytesIO:
    file = io.BytesIO(BYTES)
    file.close()
    return file


def at_its_end() -> io.BytesIO:
    file = io.BytesIO()
    torch.save(WANTED, file)
    return file


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "read text": (lambda: ckpt_tools.inspect(io.StringIO("x")), UsageError, 'is open as text.\nOpen it with mode "rb"'),  # type: ignore[arg-type]
    "read at the end": (lambda: load_code.load(at_its_end()), NotACheckpointError, r"stands at its end.\nCall its seek\(0\)"),
    "read closed": (lambda: load_code.load(closed()), NotACheckpointError, "<BytesIO> cannot be read.\nIt is closed."),
    "read a pipe": (lambda: load_code.load(Unseekable()), UsageError, r"It has no positions(.|\n)*io.BytesIO"),  # type: ignore[arg-type]
    "read nothing": (lambda: load_code.load(io.BytesIO()), NotACheckpointError, "<BytesIO>.* empty"),
    "read something else": (lambda: load_code.load(io.BytesIO(b"hello")), NotACheckpointError, "<BytesIO>"),
    "write text": (lambda: load_code.save(WANTED, io.StringIO()), OutputError, "open as text"),  # type: ignore[arg-type]
    "write what is read": (lambda: load_code.save(WANTED, SINGLE.open("rb")), OutputError, "not for writing"),
    "write raw": (lambda: load_code.save(WANTED, io.FileIO("/dev/null", "w")), OutputError, "without a buffer"),
    "write closed": (lambda: load_code.save(WANTED, closed()), OutputError, "It is closed"),
    "a folder": (lambda: ckpt_tools.convert(SINGLE, io.BytesIO(), format="dcp"), UsageError, "a folder is to be written"),
    "in place": (lambda: ckpt_tools.edit_in_place(io.BytesIO(BYTES), strip_module=True), UsageError, "It takes a path"),  # type: ignore[arg-type]
    "a plan": (lambda: ckpt_tools.match(SINGLE, like=SINGLE, output=io.BytesIO()), UsageError, "takes a path"),  # type: ignore[arg-type]
}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be(case: str) -> None:
    call, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        call()
