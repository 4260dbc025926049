"""What users of the command line tried first, and what they were told: the answer names what they meant."""

import io
import shlex
import traceback
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.torch import save
from tests.hostile.refusals import write
from tests.support.commands import ckpt
from tests.support.samples import FIXTURES


def _saved(path: Path, **tree: object) -> Path:
    torch.save(tree, path)
    return path


def _weights(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.arange(6.0).view(2, 3) for name in names}


@pytest.mark.parametrize(
    ("tree", "path", "names"),
    [
        (_weights("backbone.a", "backbone.b", "head.a"), "backbone", ["a", "b"]),
        ({"model": _weights("module.backbone.a", "module.head.a")}, "model.module.backbone", ["a"]),
        ({"odd dict": _weights("it's [0].a.x", "b.x")}, "odd dict.it's [0].a", ["x"]),
    ],
)
def test_select_of_a_prefix_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: dict[str, object], path: str, names: list[str]
) -> None:
    """Names that begin so are no dict of their own: the error's command takes them."""
    monkeypatch.chdir(tmp_path)
    torch.save(tree, "in.pth")
    told = ckpt("convert", "in.pth", "out.pth", "--select", path, code=3).output
    program, *command = shlex.split(told.strip().split("Those tensors alone: ")[1])
    assert program == "ckpt"
    ckpt(*command)
    assert list(torch.load("in.fixed.pth")) == names
    assert "Those tensors alone" in ckpt("stats", "in.pth", "--select", path, code=3).output
    assert "Those" not in ckpt("convert", "in.pth", "out.pth", "--select", "nothing", code=3).output


def test_select_of_two_files_names_two_places(tmp_path: Path) -> None:
    """What one side has elsewhere is named by --select with two paths."""
    one, other = _saved(tmp_path / "a.pth", model=_weights("x", "y")), _saved(tmp_path / "b.pth", **_weights("x", "y"))
    assert "--select A_PATH=B_PATH" in ckpt("diff", one, other, "--select", "model", code=3).output
    assert "A_PATH" not in ckpt("diff", one, other, "--select", "model=nothing", code=3).output
    ckpt("diff", one, other, "--select", "model=.")


def test_average_says_which_file_to_take_apart(tmp_path: Path) -> None:
    """Of a training file and bare weights it is the training file, by a command that works."""
    train = _saved(tmp_path / "train.pth", model=_weights("x", "y"), ema=_weights("x", "y"))
    bare = _saved(tmp_path / "bare.pth", **_weights("x", "y"))
    told = ckpt("average", train, bare, tmp_path / "out.pth", code=3).output
    program, *command = shlex.split(told.strip().rpartition("first: ")[2])
    assert program == "ckpt"
    ckpt(*command)
    ckpt("average", tmp_path / "train.fixed.pth", bare, tmp_path / "out.pth")


def test_weights_are_one_word(tmp_path: Path) -> None:
    """Weights behind one another are taken for files; the error shows how they are written."""
    one, other = (_saved(tmp_path / f"{name}.pth", **_weights("x")) for name in "ab")
    told = ckpt("average", one, other, "-o", tmp_path / "out.pth", "--weights", "0.3", "0.7", code=2).output
    assert "--weights has 1 number for 3 checkpoints" in told
    assert "0.7,0.3" in told


@pytest.mark.parametrize(("name", "stem", "own"), [("x.pth.tar", "x", ".pth.tar"), ("x.tar", "x", ".tar")])
def test_the_double_extension_is_one(tmp_path: Path, name: str, stem: str, own: str) -> None:
    """`x.pth.tar` becomes x.safetensors, x.pth and, unless another format is said, x.pth.tar."""
    _saved(tmp_path / name, **_weights("x"))
    for format, suffix in (("safetensors", ".safetensors"), ("pth", ".pth"), ("", own)):
        ckpt("convert", tmp_path / name, "--to-dir", tmp_path / f"out{format}", *(["--format", format] if format else []))
        (written,) = (tmp_path / f"out{format}").iterdir()
        assert written.name == f"{stem}{suffix}"
    _saved(tmp_path / "ddp.pth.tar", **{"module.a": torch.ones(2), "module.b": torch.ones(2)})
    assert "ddp.fixed.pth.tar --strip-module" in ckpt("inspect", tmp_path / "ddp.pth.tar").output


def test_a_tensor_without_a_name_is_shown_by_its_title(tmp_path: Path) -> None:
    """What inspect and show print in place of a name is taken as one."""
    numpy.save(tmp_path / "a.npy", numpy.arange(6.0).reshape(2, 3))
    for name in ("", "(root)", "(the whole file)", "(root)[1]"):
        assert "5.0]" in ckpt("show", tmp_path / "a.npy", name).output
    named = _saved(tmp_path / "a.pth", **{"(root)": torch.ones(1), "b": torch.zeros(1)})
    assert "[1.0]" in ckpt("show", named, "(root)").output


def test_the_note_on_select_is_for_those_who_have_not_selected(tmp_path: Path) -> None:
    """What else a folder of DeepSpeed has is told once, not to who has chosen of it."""
    folder = FIXTURES / "deepspeed" / "hop" / "global_step4"
    assert "without --select" in ckpt("convert", folder, tmp_path / "a.pth").output
    assert "without --select" not in ckpt("convert", folder, tmp_path / "b.pth", "--select", "optimizer").output


def test_a_missing_shard_may_be_left_out(tmp_path: Path) -> None:
    """The error names --partial, which writes the rest; without a folder there is nothing to leave out."""
    save_file(_weights("a"), tmp_path / "m-00001-of-00002.safetensors")
    index = '{"weight_map": {"a": "m-00001-of-00002.safetensors", "b": "m-00002-of-00002.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "--partial" in ckpt("convert", tmp_path, tmp_path / "out.pth", code=3).output
    assert "--partial" not in ckpt("convert", tmp_path / "nothing.pth", tmp_path / "out.pth", code=3).output
    ckpt("convert", tmp_path, tmp_path / "out.pth", "--partial")
    assert list(torch.load(tmp_path / "out.pth")) == ["a"]
    (tmp_path / "m-00002-of-00002.safetensors").write_text("<html>")  # there, and no shard: not to be called missing
    told = ckpt("convert", tmp_path, tmp_path / "out2.pth", code=3).output
    assert "Download the file itself." in told
    assert "names it" not in told


def test_an_adapter_in_a_folder_below_is_named(tmp_path: Path) -> None:
    """The folder around an adapter is not one; the error says where it is."""
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    save_file(_weights("x.lora_A.weight"), tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    base_model = _saved(tmp_path / "in.pth", **_weights("x.weight"))
    told = ckpt("convert", base_model, tmp_path / "out.pth", "--lora", tmp_path / "run", code=3).output
    assert f"Name the folder that has one: {tmp_path / 'run' / 'adapter'}." in told


@pytest.mark.parametrize(
    ("command", "given", "meant"),
    [
        ("scan", "--junit", "--format junit"), ("check", "--sarif", "--format sarif"), ("check", "--nan", "--values"),
        ("convert", "--to-device", "--map-location"), ("convert", "--no-optimizer", "--slim"),
    ],
)  # fmt: skip
def test_options_of_other_names(command: str, given: str, meant: str) -> None:
    """An option that is called otherwise here is named."""
    assert f"Here it is {meant}." in ckpt(command, given, "x.pth", code=2).output


def test_save_says_that_it_replaces(tmp_path: Path) -> None:
    """`overwrite` is for functions that refuse without it."""
    with pytest.raises(TypeError, match="A file that is there is replaced"):
        save({}, tmp_path / "x.pth", overwrite=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_small_file_that_was_cut_is_explained(tmp_path: Path, weights_only: bool) -> None:
    """torch.load says `Invalid argument` of a file that was cut below 66 kB, and no more."""
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(20_000)}, buffer)
    path = write(tmp_path, buffer.getvalue()[:20_000], "cut.pth")
    with pytest.raises((OSError, RuntimeError)) as caught:
        torch.load(path, weights_only=weights_only)
    found = ckpt_tools.explain("".join(traceback.format_exception(caught.value)))
    assert found[0].command.endswith("ckpt repair IN OUT")


def test_a_guess_says_how_to_read_on() -> None:
    """What has no answer has names of answers that are near, and how they are asked for."""
    told = ckpt("explain", "CUDA out of memory. Tried to allocate 2.00 GiB", code=1).output
    assert "ckpt explain NAME" in told.splitlines()[0]
    name = told.splitlines()[1].partition(":")[0]
    assert "map_location" in ckpt("explain", name).output
