"""Plans: written, read, applied exactly or refused."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import CkptError, LimitError, MatchPlanError
from ckpt_tools.fit.folding import fold, unfold
from ckpt_tools.fit.plan_files import read_plan, write_plan
from ckpt_tools.fit.plans import Plan, PlanStep, apply
from ckpt_tools.formats.open import open_checkpoint
from ckpt_tools.formats.zip import torch_layout
from ckpt_tools.io.output import replacing
from ckpt_tools.io.writer import write
from ckpt_tools.tree.nodes import as_dict

FORMAT = 'format = "ckpt-plan-1"\n'
QKV = torch.arange(24.0).reshape(6, 4)
STATE = {
    "qkv.weight": QKV, "q.bias": torch.ones(2), "k.bias": torch.zeros(3), "conv.weight": QKV.reshape(6, 4, 1, 1),
    "wide.weight": QKV.T, "epoch": 3,
}  # fmt: skip
PLAN = Plan(
    (
        PlanStep("copy", ("conv.weight",), ("a.weight",), ((6, 4, 1, 1),), ((6, 4, 1, 1),)),
        PlanStep("reshape", ("conv.weight",), ("b.weight",), ((6, 4, 1, 1),), ((6, 4),)),
        PlanStep("reshape", ("wide.weight",), ("e.weight",), ((4, 6),), ((1, 4, 6),)),
        PlanStep("transpose", ("qkv.weight",), ("c.weight",), ((6, 4),), ((4, 6),)),
        PlanStep("split", ("qkv.weight",), ("q", "k", "v"), ((6, 4),), ((1, 4), (3, 4), (2, 4)), "structure", 0.9),
        PlanStep("concat", ("q.bias", "k.bias"), ("d.bias",), ((2,), (3,)), ((5,),)),
    )
)


def applied(state: dict[str, object], plan: Plan, folder: Path) -> dict[str, torch.Tensor]:
    """What torch loads from a file that the plan has been applied to."""
    torch.save(state, folder / "in.pth")
    with open_checkpoint(folder / "in.pth") as checkpoint:
        apply(as_dict(checkpoint.root), plan)
        with replacing(folder / "out.pth", overwrite=True) as output:
            write(torch_layout.lay_out(checkpoint.root, folder="in"), output)
    loaded: dict[str, torch.Tensor] = torch.load(folder / "out.pth", weights_only=True)
    return loaded


def test_every_step_does_what_torch_would(tmp_path: Path) -> None:
    """copy, reshape (of a strided tensor too), transpose, split in order, concat in order; values stay."""
    loaded = applied(STATE, PLAN, tmp_path)
    expected = {
        "a.weight": QKV.reshape(6, 4, 1, 1), "b.weight": QKV, "e.weight": QKV.T.reshape(1, 4, 6), "c.weight": QKV.T,
        "q": QKV[:1], "k": QKV[1:4], "v": QKV[4:], "d.bias": torch.tensor([1.0, 1, 0, 0, 0]),
    }  # fmt: skip
    assert loaded.pop("epoch") == 3
    assert list(loaded) == list(expected)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_ties_and_module_versions_go_along(tmp_path: Path) -> None:
    """A tensor that is copied to two names is tied there; the rows of `_metadata` move with their modules."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    state = model.state_dict()
    steps = tuple(
        PlanStep("copy", (name,), (name.replace("0.", "norm."),), (tuple(t.shape),), (tuple(t.shape),))
        for name, t in state.items()
    )
    twin = PlanStep("copy", ("0.weight",), ("twin",), ((2,),), ((2,),))
    loaded = applied(state, Plan((*steps, twin)), tmp_path)
    assert loaded["twin"].data_ptr() == loaded["norm.weight"].data_ptr()
    assert loaded._metadata["norm"]["version"] == 2  # type: ignore[attr-defined]


COPY = PlanStep("copy", ("a",), ("b",), ((2,),), ((2,),))
BAD: list[tuple[Plan, str]] = [
    (Plan((COPY, COPY)), "twice"),
    (Plan((COPY,), drop=("a",)), "drops"),
    (Plan((COPY,), missing=("b",)), "two fates for new 'b'"),
    (Plan((COPY,), mismatched=(("a", "b", (2,), (3,)),)), "two fates for new 'b'"),
    (Plan((COPY,), ambiguous=(("b", ("a",), "equals"),)), "two fates for new 'b'"),
    (Plan((), mismatched=(("a", "b", (2,), (3,)), ("a", "b", (2,), (4,)))), "two fates for new 'b'"),
    (Plan((COPY,), unexpected=("a",)), "two fates for old 'a'"),
    (Plan((), drop=("a",), unexpected=("a",)), "two fates for old 'a'"),
    (Plan((), drop=("a",), mismatched=(("a", "b", (2,), (3,)),)), "two fates for old 'a'"),
    (Plan((), mismatched=(("a", "b", (9,), (3,)),)), "another shape"),
    (Plan((replace(COPY, new_shapes=((3,),)),)), "shapes"),
    (Plan((replace(COPY, step="transpose"),)), "shapes"),
    (Plan((replace(COPY, step="split", new=("b", "c"), new_shapes=((1,), (2,))),)), "shapes"),
    (Plan((replace(COPY, step="reshape", new_shapes=((4,),)),)), "shapes"),
    (Plan((replace(COPY, old=("a", "c"), old_shapes=((2,), (2,))),)), "2 old"),
    (Plan(()), "does not name"),
    (Plan((replace(COPY, old=("z",)),), drop=("a",)), "does not have"),
    (Plan((replace(COPY, old_shapes=((3,),), new_shapes=((3,),)),)), "another shape"),
    (Plan((replace(COPY, new=("epoch",)),)), "not a tensor"),
]


@pytest.mark.parametrize(("plan", "message"), BAD)
def test_a_plan_that_does_not_fit_is_refused(plan: Plan, message: str, tmp_path: Path) -> None:
    """Nothing is applied in part: a step that cannot be done, a name without a fate, another shape."""
    torch.save({"a": torch.ones(2), "epoch": 1}, tmp_path / "in.pth")
    with open_checkpoint(tmp_path / "in.pth") as checkpoint:
        before = list(as_dict(checkpoint.root).items)
        with pytest.raises(MatchPlanError, match=message):
            apply(as_dict(checkpoint.root), plan)
        assert as_dict(checkpoint.root).items == before


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@given(st.lists(st.tuples(NAMES, SHAPES), min_size=1, unique_by=lambda row: row[0]), st.lists(NAMES, unique=True), NAMES)
def test_any_name_survives_the_file(rows: list[tuple[str, tuple[int, ...]]], names: list[str], why: str) -> None:
    """A plan that is written and read again is the same plan: quotes, control characters and emoji in names included."""
    import tempfile

    steps = tuple(PlanStep("copy", (name,), (name + "'",), (shape,), (shape,), why, 0.5) for name, shape in rows)
    left = tuple(f"left {name}" for name in names)  # no name may have two fates
    doubtful = (f"doubtful {why}", left, why)
    plan = Plan(steps, (), left, left, ((f"resized {why}", f"resized {why}", (1,), (2, 3)),), (doubtful,))
    with tempfile.TemporaryDirectory() as folder:
        write_plan(plan, Path(folder) / "plan.toml")
        assert read_plan(Path(folder) / "plan.toml") == plan


LAYERS = st.lists(
    st.sampled_from(["a.{i}.w", "a.{i}.{j}.w", "b.{j}.c{i}", "x{i}.{i}", "n.{j}", "lone", "a.0.w", "{{i}}.q"]), max_size=6
)


@given(st.lists(st.tuples(LAYERS, st.lists(st.integers(0, 12), max_size=6), st.integers(0, 3)), max_size=5), st.booleans())
def test_a_folded_plan_is_the_same_plan(parts: list[tuple[list[str], list[int], int]], shift: bool) -> None:
    """Layers of any names and numbers, whole and with gaps, other numbers on the old side: the same steps in the same order."""
    names = [
        template.replace("{i}", str(i)).replace("{j}", str(j))
        for templates, numbers, j in parts
        for i in numbers
        for template in templates
    ]
    steps = [
        PlanStep("copy", (f"old.{number if shift else 7}.{name}",), (name,), ((2,),), ((2,),), "structure", 0.9)
        for number, name in enumerate(dict.fromkeys(names))
    ]
    assert unfold(fold(steps), 10_000) == steps


@given(st.lists(st.tuples(LAYERS, st.integers(0, 5), st.integers(0, 4)), max_size=4))
def test_two_numbers_are_the_same_plan(parts: list[tuple[list[str], int, int]]) -> None:
    """Experts in layers, blocks in stages, of any number of each: the same steps in the same order."""
    names = [
        f"{part}.{template.replace('{i}', str(i)).replace('{j}', str(j))}" if part % 2 else template.replace("{i}", f"{i}.{j}")
        for part, (templates, many, few) in enumerate(parts)
        for i in range(many)
        for j in range(few)
        for template in templates
    ]
    steps = [PlanStep("copy", (f"o.{name}",), (name,), ((2,),), ((2,),), "structure", 0.9) for name in dict.fromkeys(names)]
    assert unfold(fold(steps), 10_000) == steps


def test_experts_are_one_table_each(tmp_path: Path) -> None:
    """12 layers of 16 experts: a table for each tensor of a layer and for each of an expert; stages with other counts, too."""
    names = [
        f"layers.{i}.{name}"
        for i in range(12)
        for name in ("wq", *(f"experts.{j}.{part}" for j in range(16) for part in ("w1", "w2")), "norm")
    ]
    names += [f"stages.{i}.blocks.{j}.{part}" for i, many in enumerate((2, 2, 6, 2)) for j in range(many) for part in "ab"]
    plan = Plan(tuple(PlanStep("copy", (name,), (f"m.{name}",), ((2,),), ((2,),)) for name in names))
    write_plan(plan, tmp_path / "plan.toml")
    text = (tmp_path / "plan.toml").read_text()
    assert 'i = "0-11"\nj = "0-15"\nold = "layers.{i}.experts.{j}.w1"\nnew = "m.layers.{i}.experts.{j}.w1"' in text
    assert 'i = "0-2"\nj = "0-1"\nold = "stages.{i}.blocks.{j}.a"' in text
    assert text.count("[[tensor]]") == 4 + 2 + 2 + 2
    assert read_plan(tmp_path / "plan.toml") == plan


@pytest.mark.parametrize(
    ("numbers", "says"),
    [('j = "0-1"', "a j and no i"), ('i = "0-1"\nj = "1-0"', "j = '1-0'"), ('i = "0-1"\nj = 3', "j = 3"),
     ('i = "0-90000"\nj = "0-90000"', "more steps")],
)  # fmt: skip
def test_a_second_number_that_cannot_be_read_is_refused(numbers: str, says: str, tmp_path: Path) -> None:
    """One alone, a range the wrong way round, a number that is no text, more than any model has; no place for it."""
    path = tmp_path / "plan.toml"
    for name in ("{i}.{j}", "{i}"):
        path.write_text(f'format = "ckpt-plan-1"\n[[tensor]]\n{numbers}\nold = "a.{name}"\nnew = "b.{name}"\nshape = [2]\n')
        with pytest.raises(MatchPlanError, match=says if "j" in name else None):
            read_plan(path)


def test_layers_are_one_table_each(tmp_path: Path) -> None:
    """48 layers of 8 tensors, a fused one among them, are 9 tables; what is read is what was written."""
    fused = [
        PlanStep("split", (f"h.{n}.qkv",), tuple(f"m.{n}.{part}" for part in "qkv"), ((6, 2),), ((2, 2),) * 3)
        for n in range(48)
    ]
    plain = [[PlanStep("copy", (f"h.{n}.f.{k}",), (f"m.{n}.g.{k}",), ((2,),), ((2,),)) for k in "abcdefg"] for n in range(48)]
    head = PlanStep("copy", ("head",), ("last",), ((2,),), ((2,),))
    plan = Plan((*(step for n in range(48) for step in (fused[n], *plain[n])), head))
    write_plan(plan, tmp_path / "plan.toml")
    text = (tmp_path / "plan.toml").read_text()
    assert text.count("[[tensor]]") == 9
    assert text.count('i = "0-47"') == 8
    assert read_plan(tmp_path / "plan.toml") == plan


@pytest.mark.parametrize("numbers", ["0-", "2-1", "a", "0,0", "00", "0-999999999", ""])
def test_numbers_that_cannot_be_read_are_refused(numbers: str, tmp_path: Path) -> None:
    """A range the wrong way round, one without an end, a number twice, more than any model has; or no place for them."""
    path = tmp_path / "plan.toml"
    for old in ("a.{i}", "a"):
        path.write_text(f'format = "ckpt-plan-1"\n[[tensor]]\ni = "{numbers}"\nold = "{old}"\nnew = "b.{{i}}"\nshape = [2]\n')
        with pytest.raises(MatchPlanError):
            read_plan(path)


def test_every_step_survives_the_file(tmp_path: Path) -> None:
    """Several names and shapes in one step are lists, in order."""
    write_plan(PLAN, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml") == PLAN


def edit(change: Callable[[str], str], path: Path) -> None:
    """Rewrite a plan file."""
    write_plan(PLAN, path)
    path.write_text(change(path.read_text()))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("ckpt-plan-1", "ckpt-plan-9"),
        lambda text: text.replace('step = "split"', 'step = "cut"'),
        lambda text: text + '\n[[tensor]]\nold = "a"\n',
        lambda text: text + '\n[[tensor]]\nold = []\nnew = "b"\nshape = [1]\n',
        lambda text: text + '\n[[tensor]]\nold = 3\nnew = "b"\nshape = [1]\n',
        lambda text: text + '\n[[tensor]]\nold = "a"\nnew = "b"\nshape = [-1]\n',
        lambda text: text + '\n[[tensor]]\nold = "a"\nnew = "b"\nshape = [1.5]\n',
        lambda text: text + '\n[[tensor]]\nold = "a"\nnew = "b"\nshape = [1]\nconfidence = nan\n',
        lambda text: text + '\n[[tensor]]\nold = "a"\nnew = "b"\nshape = [1]\nchape = [1]\n',
        lambda text: text + "\n[tensors]\n",
        lambda text: text.replace("drop = []", 'drop = ["a", "a"]'),
        lambda text: text.replace("drop = []", "drop = 'a'"),
        lambda text: text.replace("[[tensor]]", "[tensor"),
        lambda text: text + "\nx = " + "[" * 100000,
        lambda text: "\0",
        lambda text: 'format = "ckpt-plan-1"\ntensor = 5\n',
    ],
)
def test_rubbish_is_refused(change: Callable[[str], str], tmp_path: Path) -> None:
    """A plan file that is not TOML, of another version, or with a field too many, too few or of another type."""
    edit(change, tmp_path / "plan.toml")
    with pytest.raises(MatchPlanError):
        read_plan(tmp_path / "plan.toml")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a." * 1000 + "a = 1\n", MatchPlanError),
        ("".join(f"{number}.a.a = 1\n" for number in range(40_000)), LimitError),
        ("".join(f"[{number}]\n" for number in range(100_000)), LimitError),
        ("x = [" + "[]," * 400_000 + "]", LimitError),
        ("format = 0x" + "f" * 20_000, MatchPlanError),
        (f'{FORMAT}[[tensor]]\nold = 0x{"f" * 20_000}\nnew = "b"\nshape = [1]\n', MatchPlanError),
        (f'{FORMAT}[[tensor]]\nold = "a"\nnew = "b"\nshape = [1]\nconfidence = 1{"0" * 400}\n', MatchPlanError),
        (f'{FORMAT}[[tensor]]\nold = "a"\nnew = "b"\nshape = [0x{"f" * 20_000}]\n', MatchPlanError),
        ("x = " + "9" * 5000, MatchPlanError),
        ('x = "' + '\\"' * 10_000, MatchPlanError),
    ],
)
def test_plans_that_ask_for_much_are_refused(text: str, error: type[CkptError], tmp_path: Path) -> None:
    """Dotted keys, of which tomllib notes down every part, tables, lists, and numbers of thousands of digits."""
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(error):
        read_plan(tmp_path / "plan.toml")


def test_a_small_plan_takes_little_memory(tmp_path: Path) -> None:
    """Room is made for what the file has, and not for what the largest may have."""
    path = tmp_path / "plan.toml"
    path.write_text(FORMAT)
    tracemalloc.start()
    try:
        read_plan(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """Missing, a folder, no UTF-8; and a name that TOML cannot hold is refused before anything is written."""
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    for name in ("missing", "latin", "."):
        with pytest.raises(MatchPlanError):
            read_plan(tmp_path / name)
    with pytest.raises(MatchPlanError, match="surrogate"):
        write_plan(Plan((), drop=("\ud800",)), tmp_path / "plan.toml")
    assert not (tmp_path / "plan.toml").exists()
