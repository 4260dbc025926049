"""Plans: written, read, applied exactly or refused."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt_tools
from ckpt_tools.errors import MatchError

FORMAT = 'format = "ckpt-plan-1"\n'
QKV = torch.arange(24.0).reshape(6, 4)
STATE = {
    "qkv.weight": QKV, "q.bias": torch.ones(2), "k.bias": torch.zeros(3), "conv.weight": QKV.reshape(6, 4, 1, 1),
    "wide.weight": QKV.T, "epoch": 3,
}  # fmt: skip


def table(old: Any, new: Any, step: str = "copy", **fields: Any) -> str:
    rows = {"old": old, "new": new, "step": step, **fields}
    return "\n[[tensor]]\n" + "".join(f"{key} = {value!r}\n".replace("(", "[").replace(")", "]") for key, value in rows.items())


def applied(state: dict[str, Any], plan: str, folder: Path) -> dict[str, torch.Tensor]:
    """What torch loads from a file that the plan has been applied to."""
    torch.save(state, folder / "in.pth")
    (folder / "plan.toml").write_text(plan, "utf-8")
    ckpt_tools.convert(folder / "in.pth", folder / "out.pth", plan=folder / "plan.toml", overwrite=True)
    loaded: dict[str, torch.Tensor] = torch.load(folder / "out.pth", weights_only=True)
    return loaded


PLAN = (
    table("conv.weight", "a.weight", shape=[6, 4, 1, 1])
    + table("conv.weight", "b.weight", "reshape", shape=[6, 4, 1, 1], to=[6, 4])
    + table("wide.weight", "e.weight", "reshape", shape=[4, 6], to=[1, 4, 6])
    + table("qkv.weight", "c.weight", "transpose", shape=[6, 4], to=[4, 6])
    + table("qkv.weight", ["q", "k", "v"], "split", shape=[6, 4], to=[[1, 4], [3, 4], [2, 4]])
    + table(["q.bias", "k.bias"], "d.bias", "concat", shape=[[2], [3]], to=[5])
)


def test_ties_and_module_versions_go_along(tmp_path: Path) -> None:
    """A tensor that is copied to two names is tied there; the rows of `_metadata` move with their modules."""
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    steps = [table(name, name.replace("0.", "norm."), shape=list(tensor.shape)) for name, tensor in state.items()]
    loaded = applied(state, FORMAT + "".join(steps) + table("0.weight", "twin", shape=[2]), tmp_path)
    assert loaded["twin"].data_ptr() == loaded["norm.weight"].data_ptr()
    assert loaded._metadata["norm"]["version"] == 2  # type: ignore[attr-defined]


# --- plans that `match` wrote


def replayed(olds: list[str], news: list[str], folder: Path) -> str:
    """The plan that makes tensors under old names those under new ones, which are in the same order; what it makes is right."""
    source = {name: torch.full((2,), float(number)) for number, name in enumerate(olds)}
    torch.save(source, folder / "old.pth")
    plan = folder / "plan.toml"
    like = {name: torch.zeros(2) for name in news}
    ckpt_tools.match(folder / "old.pth", like=like, match="position", output=plan, overwrite=True)
    ckpt_tools.convert(folder / "old.pth", folder / "new.pth", plan=plan, overwrite=True)
    made = torch.load(folder / "new.pth")
    assert [(name, tensor.tolist()) for name, tensor in made.items()] == [
        (name, source[old].tolist()) for name, old in zip(news, olds, strict=True)
    ]
    return plan.read_text("utf-8")


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=20, unique=True))
def test_any_name_survives_the_file(names: list[str]) -> None:
    """A plan that is written and read again is the same plan: quotes, control characters and emoji in names included."""
    with tempfile.TemporaryDirectory() as folder:
        replayed(names, [f"{name}'" for name in names], Path(folder))


LAYERS = st.lists(
    st.sampled_from(["a.{i}.w", "a.{i}.{j}.w", "b.{j}.c{i}", "x{i}.{i}", "n.{j}", "lone", "a.0.w", "{{i}}.q"]),
    min_size=1, max_size=6,
)  # fmt: skip
PARTS = st.lists(
    st.tuples(LAYERS, st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 3)), min_size=1, max_size=5
)


@settings(max_examples=60, deadline=None)
@given(PARTS, st.booleans())
def test_a_folded_plan_is_the_same_plan(parts: list[tuple[list[str], list[int], int]], shift: bool) -> None:
    """Layers and experts of any names and numbers, whole and with gaps, other numbers on the old side: all are in place."""
    names = [
        template.replace("{i}", str(i)).replace("{j}", str(j))
        for templates, numbers, count in parts
        for i in numbers
        for j in range(count)
        for template in templates
    ]
    news = list(dict.fromkeys(names))
    with tempfile.TemporaryDirectory() as folder:
        replayed([f"old.{number if shift else 7}.{name}" for number, name in enumerate(news)], news, Path(folder))


def test_a_name_that_toml_cannot_hold(tmp_path: Path) -> None:
    torch.save({"\ud800": torch.ones(2)}, tmp_path / "in.pth")
    with pytest.raises(MatchError, match="surrogate"):
        ckpt_tools.match(tmp_path / "in.pth", like={"a": torch.ones(2)}, output=tmp_path / "plan.toml")
    assert not (tmp_path / "plan.toml").exists()


def test_numbers_inside_of_numbers(tmp_path: Path) -> None:
    """A plan that an earlier version wrote has `{j}` for the experts in a layer."""
    state = {f"layers.{i}.{j}.{kind}": torch.full((2,), 10.0 * i + j) for i in (0, 1) for j in (0, 1, 2) for kind in "wb"}
    steps = [
        f'i = "0-1"\nj = "0-2"\n{table(f"layers.{{i}}.{{j}}.{kind}", f"h.{{i}}.e{{j}}.{kind}", shape=[2])[11:]}'
        for kind in "wb"
    ]
    loaded = applied(state, FORMAT + "".join(f"\n[[tensor]]\n{step}" for step in steps), tmp_path)
    wanted = {f"h.{i}.e{j}.{kind}": state[f"layers.{i}.{j}.{kind}"] for i in (0, 1) for j in (0, 1, 2) for kind in "wb"}
    assert [*loaded] == [*wanted]
    assert all(torch.equal(loaded[name], value) for name, value in wanted.items())


NUMBERED = ["0-", "2-1", "a", "0,0", "00", "0-999999999", ""]
ONE = '[[tensor]]\nold = "a"\nnew = "b"\n'
RUBBISH: list[str] = [
    *(f'{FORMAT}[[tensor]]\ni = "{number}"\nold = "{old}"\nnew = "b.{{i}}"\nshape = [2]\n'
      for number in NUMBERED for old in ("a.{i}", "a")),
    *(f'{FORMAT}[[tensor]]\n{numbers}\nold = "a.{{i}}.{{j}}"\nnew = "b.{{i}}.{{j}}"\nshape = [2]\n'
      for numbers in ('j = "0-1"', 'i = "0-1"\nj = "1-0"', 'i = "0-1"\nj = 3', 'i = "0-90000"\nj = "0-90000"')),
    'format = "ckpt-plan-9"\n' + PLAN, FORMAT + PLAN.replace("split", "cut"), FORMAT + '[[tensor]]\nold = "a"\n',
    FORMAT + '[[tensor]]\nold = []\nnew = "b"\nshape = [1]\n', FORMAT + '[[tensor]]\nold = 3\nnew = "b"\nshape = [1]\n',
    *(f"{FORMAT}{ONE}shape = {shape}\n" for shape in ("[-1]", "[1.5]", "[1]\nconfidence = nan", "[1]\nchape = [1]")),
    FORMAT + PLAN + "\n[tensors]\n", FORMAT + 'drop = ["a", "a"]\n' + PLAN, FORMAT + "drop = 'a'\n" + PLAN,
    FORMAT + PLAN.replace("[[tensor]]", "[tensor"), FORMAT + "\nx = " + "[" * 100000, "\0", FORMAT + "tensor = 5\n",
    "a." * 1000 + "a = 1\n", "format = 0x" + "f" * 20_000, FORMAT + ONE.replace('"a"', "0x" + "f" * 20_000) + "shape = [1]\n",
    f"{FORMAT}{ONE}shape = [1]\nconfidence = 1{'0' * 400}\n", f"{FORMAT}{ONE}shape = [0x{'f' * 20_000}]\n", "x = " + "9" * 5000,
    'x = "' + '\\"' * 10_000, "x = [" + "[]," * 1_500_000 + "]",
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(RUBBISH)))
def test_rubbish_is_refused(number: int, tmp_path: Path) -> None:
    """Not TOML, of another version, with a field too many, too few or of another type, or with more than any plan has."""
    with pytest.raises(MatchError):
        applied(STATE, RUBBISH[number], tmp_path)
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize("name", ["missing", "latin", "."])
def test_files_that_are_no_text_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    torch.save(STATE, tmp_path / "in.pth")
    with pytest.raises(MatchError):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", plan=tmp_path / name)
