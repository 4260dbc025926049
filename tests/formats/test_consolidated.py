"""Meta's consolidated.NN.pth become one state dict, equal to the model that was cut, or an error names what does not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import PartError
from ckpt_tools.torch import load_state_dict
from tests.support.graphs import equal
from tests.support.samples import edit

State = dict[str, torch.Tensor]
DIM, HIDDEN, WORDS = 12, 24, 36
CUT = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}


def llama(dtype: torch.dtype = torch.float32, *, tied: bool = False) -> State:
    """A small Llama under Meta's names."""
    torch.manual_seed(0)
    state: State = {"tok_embeddings.weight": torch.randn(WORDS, DIM)}
    for layer in ("layers.0.", "layers.1."):
        for name, rows in (("wq", DIM), ("wk", DIM // 2), ("wv", DIM // 2), ("wo", DIM)):
            state[f"{layer}attention.{name}.weight"] = torch.randn(rows, DIM)
        for name, shape in (("w1", (HIDDEN, DIM)), ("w2", (DIM, HIDDEN)), ("w3", (HIDDEN, DIM))):
            state[f"{layer}feed_forward.{name}.weight"] = torch.randn(shape)
        state |= {f"{layer}{name}_norm.weight": torch.randn(DIM) for name in ("attention", "ffn")}
    state |= {"norm.weight": torch.randn(DIM), "rope.freqs": torch.randn(3), "output.weight": torch.randn(WORDS, DIM)}
    state = {name: value.to(dtype) for name, value in state.items()}
    return state | {"output.weight": state["tok_embeddings.weight"]} if tied else state


def cut(state: State, rank: int, world: int, embeddings: int) -> State:
    """What a rank of Meta's model parallelism holds of it."""
    found: dict[int, torch.Tensor] = {}
    axes = {**CUT, "tok_embeddings": embeddings}
    for name, value in state.items():
        axis = axes.get(name.split(".")[-2])
        if id(value) not in found:
            found[id(value)] = value if axis is None else value.tensor_split(world, axis)[rank].clone()
    return {name: found[id(value)] for name, value in state.items()}


def save(folder: Path, world: int, state: State | None = None, *, embeddings: int = 1) -> State:
    """The files of all ranks; returns the whole state dict."""
    folder.mkdir(exist_ok=True)
    state = llama() if state is None else state
    for rank in range(world):
        torch.save(cut(state, rank, world, embeddings), folder / f"consolidated.{rank:02d}.pth")
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("embeddings", [0, 1])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_merged_tensors_are_the_models(world: int, embeddings: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit, of Llama 1 and 2 and of Llama 3, from the folder and from a file of it."""
    expected = save(tmp_path / "in", world, llama(dtype), embeddings=embeddings)
    ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    assert equal(torch.load(tmp_path / "out.pth", weights_only=True), expected)
    assert equal(load_state_dict(tmp_path / "in" / f"consolidated.{world - 1:02d}.pth"), expected)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """The head of Llama 3.2 is its embedding, in every part and in the whole."""
    save(tmp_path / "in", 2, llama(tied=True), embeddings=0)
    ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    written = torch.load(tmp_path / "out.pth", weights_only=True)
    assert written["output.weight"].data_ptr() == written["tok_embeddings.weight"].data_ptr()


def drop(name: str) -> Callable[[Path], None]:
    """Remove a file."""
    return lambda folder: (folder / name).unlink()


def change(rank: int, edit_: Callable[[State], object]) -> Callable[[Path], None]:
    """Edit the state dict of a rank."""
    return lambda folder: edit(folder / f"consolidated.{rank:02d}.pth", edit_)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (drop("consolidated.01.pth"), r"1 of 4 parts is missing: consolidated\.01\.pth\."),
        (drop("consolidated.03.pth"), r"wo\.weight' is not whole: 9 of its 12 columns are in consolidated\.00\.pth"),
        (change(2, lambda state: state.pop("rope.freqs")), r"consolidated\.02\.pth does not have 'rope\.freqs'"),
        (
            change(1, lambda state: state["norm.weight"].add_(1)),
            r"\.00\.pth, .*\.01\.pth hold different values for 'norm\.weight'",
        ),
        (change(1, lambda state: state.update({"norm.weight": torch.ones(3)})), r"have different shapes .* 'norm\.weight'"),
        (
            change(1, lambda state: state.update({"output.weight": torch.ones(9, 5)})),
            r"'output\.weight' is \[9, 5\] on .*\.01\.pth, and \[9, 12\] on .*\.00\.pth",
        ),
        (change(1, lambda state: state.update({"output.weight": torch.ones(9, 12).half()})), "float16 on consolidated.01.pth"),
        (change(0, lambda state: state.update(dict[str, Any]({"norm.weight": "text"}))), "something else than one mapping"),
    ],
)
def test_parts_that_do_not_fit(spoil: Callable[[Path], None], text: str, tmp_path: Path) -> None:
    """The error names ranks and tensors, and nothing is written."""
    save(tmp_path / "in", 4)
    spoil(tmp_path / "in")
    with pytest.raises(PartError, match=text):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_a_name_that_is_not_known(tmp_path: Path) -> None:
    """Where the model's width is reached decides; where that does not tell, the tensor is refused by its name."""
    state = llama() | {"layers.0.extra.weight": torch.randn(5, DIM)}
    save(tmp_path / "in", 2, state)
    with pytest.raises(PartError, match=r"Nothing says how 'layers\.0\.extra\.weight' was cut: \[5, 12\] on each of 2"):
        load_state_dict(tmp_path / "in")
    for rank in range(2):
        change(rank, lambda state: state.update({"layers.0.extra.weight": torch.ones(5, DIM // 2)}))(tmp_path / "in")
    assert load_state_dict(tmp_path / "in")["layers.0.extra.weight"].shape == (5, DIM)


def test_one_file_under_two_names(tmp_path: Path) -> None:
    """A rank's file that is a copy of another's is no part of its own."""
    save(tmp_path, 2)
    (tmp_path / "consolidated.01.pth").write_bytes((tmp_path / "consolidated.00.pth").read_bytes())
    with pytest.raises(PartError, match=r"consolidated\.00\.pth and consolidated\.01\.pth hold the very same numbers"):
        ckpt_tools.convert(tmp_path, tmp_path / "out.safetensors")
