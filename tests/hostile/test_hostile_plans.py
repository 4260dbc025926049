"""Plans, and checkpoints under plans, that ask for much: many names, many patterns, huge sizes, deep configs."""

import json
import struct
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import CkptError, MatchError

HEAD = 'format = "ckpt-plan-1"\npatterns = true\n'


def test_patterns_that_differ_in_what_they_leave_open_are_bounded(tmp_path: Path) -> None:
    """A thousand ways to write down some of ten numbers would each have to be tried for every name."""
    ways = (".".join(f"{{n{bit}}}" if way >> bit & 1 else "7" for bit in range(10)) for way in range(1000))
    (tmp_path / "p.toml").write_text(HEAD + "".join(f'[[tensor]]\nold = "{way}"\nstep = "drop"\n' for way in ways))
    empty_tensor(tmp_path / "in.safetensors", [0])
    with pytest.raises(MatchError, match="More than 16 patterns like"):
        ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "out.pth", plan=tmp_path / "p.toml")


def empty_tensor(path: Path, shape: list[int]) -> None:
    """A safetensors file, written by hand, with a tensor without elements."""
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def test_a_size_beyond_reason(tmp_path: Path) -> None:
    """A tensor without elements can claim any shape: no step takes memory for what is not there."""
    empty_tensor(tmp_path / "in.safetensors", [0, 1 << 18])
    (tmp_path / "p.toml").write_text(f'{HEAD}[[tensor]]\nold = "a"\nnew = "b"\nstep = "pad"\nsize = 1099511627776\n')
    with pytest.raises(CkptError, match=r"Nothing has been written|larger|needs|free|space"):
        ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", plan=tmp_path / "p.toml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors", "p.toml"]


def test_tensors_without_elements_go_through_every_step(tmp_path: Path) -> None:
    """Nothing divides by zero: the shape is what torch would give."""
    torch.save({"a": torch.empty(0, 6)}, tmp_path / "in.pth")
    for step, shape in (
        ('step = "transpose"', (6, 0)), ('step = "permute"\naxes = "(x 2) (3 y) -> (2 x) y 3"', (0, 2, 3)),
        ('step = "flatten"', (0,)), ('step = "pad"\nsize = 2', (2, 6)), ('step = "stack"', (1, 0, 6)),
    ):  # fmt: skip
        (tmp_path / "p.toml").write_text(f'{HEAD}[[tensor]]\nold = "a"\nnew = "b"\n{step}\n')
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", plan=tmp_path / "p.toml", overwrite=True)
        assert torch.load(tmp_path / "out.pth", weights_only=True)["b"].shape == shape


CONFIGS = [
    '{"n": ' * 100_000, "[" * 100_000, '{"heads": ' + "9" * 6000 + "}", '{"heads": 1e400}', "\xff", '{"heads": {"heads": 2}}',
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_beside_is_not_trusted(config: str, tmp_path: Path) -> None:
    """Nested deep, of huge numbers, no JSON: an error of ours, or a size that is not known."""
    torch.save({"a": torch.ones(4, 4)}, tmp_path / "in.pth")
    (tmp_path / "config.json").write_bytes(config.encode("latin-1"))
    plan = '[values.heads]\nconfig = "heads"\n[[tensor]]\nold = "a"\nnew = "b"\nstep = "crop"\nsize = "heads"\n'
    (tmp_path / "p.toml").write_text(HEAD + plan)
    with pytest.raises(CkptError):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", plan=tmp_path / "p.toml")
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize("name", ["../../etc/passwd", "llama-meta-to-hf.toml", "families/llama-meta-to-hf", "-to-", "x-to-y"])
def test_a_shipped_plan_is_named_and_not_a_path(name: str, tmp_path: Path) -> None:
    """Only the names of the list are looked up in the package."""
    torch.save({"a": torch.ones(2)}, tmp_path / "in.pth")
    with pytest.raises(MatchError, match=r"cannot be read|is not TOML"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", plan=name)
