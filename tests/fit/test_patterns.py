"""Plans of patterns: every step does what torch would, names are looked up, and what is not clear is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import CkptError, MatchError, NothingMatchedError, UsageError
from tests.support.samples import converted

HEAD = 'format = "ckpt-plan-1"\npatterns = true\n'
State = dict[str, torch.Tensor]


def table(old: object, new: object, **fields: object) -> str:
    def toml(value: object) -> str:
        return str(value).lower() if isinstance(value, bool) else repr(value)

    names = {name: value for name, value in (("old", old), ("new", new)) if value is not None}
    return "\n[[tensor]]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in {**names, **fields}.items())


def planned(state: State, plan: str, folder: Path, *, reverse: bool = False, **options: object) -> State:
    """What torch loads after a conversion by a plan."""
    (folder / "plan.toml").write_text(HEAD + plan)
    made: State = converted(state, folder, plan=f"{folder / 'plan.toml'}{':reverse' * reverse}", **options)
    return made


X = torch.arange(24.0).reshape(4, 6)
CUBE = torch.arange(24.0).reshape(2, 3, 4)
STEPS: list[tuple[dict[str, object], torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = [
    ({"step": "transpose"}, X, lambda x: x.T),
    ({"step": "permute", "axes": [2, 0, 1]}, CUBE, lambda x: x.permute(2, 0, 1)),
    ({"step": "permute", "axes": "a b c -> (c a) b"}, CUBE, lambda x: x.permute(2, 0, 1).reshape(8, 3)),
    ({"step": "permute", "axes": "(h 2) ... -> (2 h) ..."}, X, lambda x: x.view(2, 2, 6).transpose(0, 1).reshape(4, 6)),
    ({"step": "permute", "axes": "... (a 3) -> 3 ... a"}, CUBE[..., :3], lambda x: x.reshape(2, 3, 1, 3).permute(3, 0, 1, 2)),
    ({"step": "reshape", "to": [-1, 8]}, X, lambda x: x.reshape(-1, 8)),
    ({"step": "flatten"}, CUBE, torch.flatten),
    ({"step": "flatten", "dims": [1, -1]}, CUBE, lambda x: x.flatten(1)),
    ({"step": "flatten"}, torch.tensor(3.0), torch.flatten),
    ({"step": "pad", "size": 7, "axis": -1, "fill": -2.5}, X, lambda x: torch.nn.functional.pad(x, (0, 1), value=-2.5)),
    ({"step": "pad", "size": 5, "was": 4}, X.bfloat16(), lambda x: torch.nn.functional.pad(x, (0, 0, 0, 1))),
    ({"step": "pad", "size": 4}, X.long(), lambda x: x),
    ({"step": "crop", "size": 3}, X, lambda x: x[:3]),
    ({"step": "crop", "size": 1, "axis": 1}, CUBE, lambda x: x[:, :1]),
]


@pytest.mark.parametrize("lies", ["row-major", "strided", "shifted"])
@pytest.mark.parametrize(("fields", "tensor", "expected"), STEPS)
def test_every_step_does_what_torch_does(
    fields: dict[str, object], tensor: torch.Tensor, expected: Callable[[torch.Tensor], torch.Tensor], lies: str, tmp_path: Path
) -> None:
    """For tensors that lie row-major, that are transposed views, and that begin inside a larger storage."""
    if lies == "strided":
        given = tensor.T.contiguous().T if tensor.dim() == 2 else tensor
    else:
        given = torch.stack([tensor, tensor])[1] if lies == "shifted" else tensor
    made = planned(
        {"a.weight": given, "other.weight": X}, table("a.weight", "b", **fields) + table("other.weight", "o"), tmp_path
    )
    assert torch.equal(made["b"], expected(tensor))
    assert made["b"].dtype == tensor.dtype


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_parts_along_a_dimension(axis: int, tmp_path: Path) -> None:
    """Split, concat, stack and unstack are torch's, along each dimension."""
    state = {f"l.{number}.w": torch.randn(4, 6) for number in range(12)}
    plan = (
        table("l.0.w", ["s.a", "s.b"], step="split", axis=axis, sizes=[1, "rest"])
        + table(["l.1.w", "l.2.w"], "c", step="concat", axis=axis)
        + table(["l.3.w", "l.4.w"], "st", step="stack", axis=axis)
        + table("l.5.w", "u.{n}", step="unstack", axis=axis)
        + "".join(table(f"l.{number}.w", f"l.{number}.w") for number in range(6, 12))
    )
    made = planned(state, plan, tmp_path)
    rest = state["l.0.w"].shape[axis] - 1
    for name, tensor in zip(("s.a", "s.b"), state["l.0.w"].split([1, rest], axis), strict=True):
        assert torch.equal(made[name], tensor)
    assert torch.equal(made["c"], torch.cat([state["l.1.w"], state["l.2.w"]], axis))
    assert torch.equal(made["st"], torch.stack([state["l.3.w"], state["l.4.w"]], axis))
    for number, tensor in enumerate(state["l.5.w"].unbind(axis)):
        assert torch.equal(made[f"u.{number}"], tensor)


def test_numbers_are_gathered_in_their_order(tmp_path: Path) -> None:
    """Twelve experts in the order of their numbers, not of their text; what one step makes for another is not written."""
    state = {f"l.{layer}.e.{e}.w{w}": torch.randn(2, 3) for layer in range(2) for e in range(12) for w in (1, 3)}
    plan = table("@both.{l}.{e}", "l.{l}.experts", step="stack") + table(
        ["l.{l}.e.{e}.w1", "l.{l}.e.{e}.w3"], "@both.{l}.{e}", step="concat"
    )
    made = planned(state, plan, tmp_path)
    assert list(made) == ["l.0.experts", "l.1.experts"]
    for layer in range(2):
        both = [torch.cat([state[f"l.{layer}.e.{e}.w1"], state[f"l.{layer}.e.{e}.w3"]]) for e in range(12)]
        assert torch.equal(made[f"l.{layer}.experts"], torch.stack(both))
    again = planned(made, plan, tmp_path, reverse=True)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_a_part_inside_a_dimension(tmp_path: Path) -> None:
    """A fused tensor whose parts alternate by head, cut apart and put together again."""
    fused = torch.randn(2 * 5 * 4, 3)
    axes = {"axes": "(groups part 4) ...", "axis": "part", "sizes": [3, 1, 1]}
    plan = table("qkv.weight", ["q", "k", "v"], step="split", **axes)
    made = planned({"qkv.weight": fused}, plan, tmp_path)
    for tensor, expected in zip(made.values(), fused.view(2, 5, 4, 3).split([3, 1, 1], 1), strict=True):
        assert torch.equal(tensor, expected.reshape(-1, 3))
    assert torch.equal(planned(made, plan, tmp_path, reverse=True)["qkv.weight"], fused)


def test_plans_compose_with_the_rest(tmp_path: Path) -> None:
    """From safetensors into shards, cast, selected, with the optimizer's names."""
    weight = torch.randn(8, 6)
    save_file({"a.0.weight": weight, "aux.weight": weight + 1}, tmp_path / "in.safetensors")
    (tmp_path / "p.toml").write_text(HEAD + table("a.{i}.weight", "b.{i}.weight", step="transpose"))
    ckpt_tools.convert(
        tmp_path / "in.safetensors", tmp_path / "out", plan=tmp_path / "p.toml", drop="aux.*", dtype="bf16", shard_size="1MB"
    )
    (shard,) = (tmp_path / "out").glob("*.safetensors")
    assert torch.equal(load_file(shard)["b.0.weight"], weight.T.bfloat16())


def test_names_with_braces(tmp_path: Path) -> None:
    made = planned({"{x}.007.weight": X}, table("{{x}}.{i}.weight", "y{{{i}}}"), tmp_path)
    assert list(made) == ["y{007}"]


REFUSED: list[tuple[str, str]] = [
    (table("a.{i}.w", "b.{j}.w"), "on one side only"),
    (table("a.{i}.w", "b.w"), "on one side only"),
    (table("a.w", "b.{i}.w"), "on one side only"),
    (table("a.{i}.w", "b.w", step="split"), "on one side only"),
    (table("a.{i}{j}.w", "b.{i}{j}.w"), "touches"),
    (table("a.1{i}.w", "b.{i}"), "touches"),
    (table("a.{i", "b"), "not a placeholder"),
    (table("a.{i:}", "b"), "must list each word once"),
    (table("a.{i:x|x}", "b.{i}"), "must list each word once"),
    (table("a.{i:x|y}", "b.{i:x|z}"), "same words everywhere"),
    (table("a." + ".".join(f"{{p{n}:x|y}}" for n in range(40)), "b"), "more than 64 ways"),
    (table("a.{i}.w", "b.{i}.w", step="cut"), "is not one of"),
    (table("a.{i}.w", "b.{i}.w", axis=1), "not a field"),
    (table("a.{i}.w", "b.{i}.w", step="permute"), "'axes' is missing"),
    (table("a.{i}.w", "b.{i}.w", step="permute", axes=[0]), "not an order"),
    (table("a.{i}.w", "b.{i}.w", step="permute", axes=[0, 0]), "not an order"),
    (table("a.{i}.w", "b.{i}.w", step="permute", axes="x y z -> z y x"), "has 3"),
    (table("a.{i}.w", "b.{i}.w", step="permute", axes="x y -> x"), "on one side only"),
    (table("a.{i}.w", "b.{i}.w", step="permute", axes="x y"), "no arrow"),
    (table("a.{i}.w", "b.{i}.w", step="permute", axes="(x x) y -> y (x x)"), "twice"),
    (table("a.{i}.w", "b.{i}.w", step="permute", axes="((x) y -> y x"), "is not allowed here"),
    (table("a.{i}.w", "b.{i}.w", step="permute", axes="(x y z -> x y z"), "not closed"),
    (table("a.{i}.w", "b.{i}.w", step="permute", axes="(x 0) y -> y (0 x)"), "not a size"),
    (table("a.{i}.w", "b.{i}.w", step="permute", axes="(x 5) y -> y (5 x)"), "cannot be divided by 5"),
    (table("a.{i}.w", "b.{i}.w", step="permute", axes="(x y) z -> z (y x)"), "cannot be cut without knowing"),
    (table("a.{i}.w", "b.{i}.w", step="reshape", to=[-1, -1]), "cannot be reshaped"),
    (table("a.{i}.w", "b.{i}.w", step="reshape", to=[5, 5]), "cannot be reshaped"),
    (table("a.{i}.w", "b.{i}.w", step="reshape"), "'to' is missing"),
    (table("a.{i}.w", "b.{i}.w", step="flatten", dims=[1, 0]), "first and the last"),
    (table("a.{i}.w", "b.{i}.w", step="flatten", dims=[0, 2]), "no dimension 2"),
    (table("a.{i}.w", "b.{i}.w", step="pad"), "'size' is missing"),
    (table("a.{i}.w", "b.{i}.w", step="pad", size=2), "cannot be padded"),
    (table("a.{i}.w", "b.{i}.w", step="pad", size=9, was=3), "Its size is 4, not 3"),
    (table("a.{i}.w", "b.{i}.w", step="pad", size=9, fill=1e40), "cannot hold the fill"),
    (table("a.{i}.w", "b.{i}.w", step="crop", size=9), "cannot be cropped"),
    ("[values]\nheads = 3\n" + table("a.{i}.w", "b.{i}.w", step="crop", size="heads/2"), "rest"),
    (table("a.{i}.w", "b.{i}.w", step="crop", size="words"), "size words is not known"),
    (table("a.{i}.w", ["b.{i}.w", "c.{i}.w", "d.{i}.w"], step="split"), "3 equal parts"),
    (table("a.{i}.w", ["b.{i}.w", "c.{i}.w"], step="split", sizes=[1, 2]), "do not add up"),
    (table("a.{i}.w", ["b.{i}.w", "c.{i}.w"], step="split", sizes=[9, "x"]), "do not add up"),
    (table("a.{i}.w", ["b.{i}.w", "c.{i}.w"], step="split", sizes=["x", "y"]), "sizes are not known"),
    (table("a.{i}.w", ["b.{i}.w", "c.{i}.w"], step="split", sizes=[4]), "1 sizes for 2"),
    (table("a.{i}.w", ["b.{i}.w", "c.{i}.w"], step="split", axis="x"), "needs 'axes'"),
    (table("a.{i}.w", ["b.{i}.w", "c.{i}.w"], step="split", axes="(x 2) y", axis="z"), "must be one of the names"),
    (table("a.{i}.w", ["b.{i}.w", "b.{i}.w"], step="split"), "makes 'b.0.w' twice"),
    (table("a.{i}.w", "b.w", step="stack", axis=3), "no dimension 3"),
    (table("a.{i}.w", "b.{i}.w") + table("a.0.w", "c"), "Two steps of the plan claim 'a.0.w'"),
    (table("a.{i}.w", "b.{i}.w") + table("z.{i}.w", "c.{i}"), "match nothing: z.{i}.w"),
    (table("a.0.w", "b"), "not named in it: a.1.w"),
    (table("a.{i}.w", "@b.{i}"), "no step takes it"),
    (table("@c.{i}", "b.{i}") + table("a.{i}.w", "c.{i}"), "no step makes '@c.{i}'"),
    (table("@c.{i}", "@d.{i}") + table("@d.{i}", "@c.{i}") + table("a.{i}.w", "c.{i}"), "wait for each other"),
    (table("@c.{i}", "@c.{i}") + table("a.{i}.w", "c.{i}"), "wait for each other"),
    (table("a.{i}.w", "b.{i}.w", tied={}), "must be text"),
    (table("a.{i}.w", None), "1 old and 0 new"),
    (table("a.{i}.w", "b.{i}.w", step="drop"), "a drop has one name"),
    ("[values]\nheads = 0\n" + table("a.{i}.w", "b.{i}.w"), "from 1 up"),
    ("[values.n]\nnumber = 1\n" + table("a.{i}.w", "b.{i}.w"), "not a field"),
    ("[values.n]\nold = 'a.{i}.w'\naxes = 'x y'\n" + table("a.{i}.w", "b.{i}.w"), "not among the axes"),
]


@pytest.mark.parametrize(("plan", "message"), REFUSED)
def test_a_plan_that_is_not_clear_is_refused(plan: str, message: str, tmp_path: Path) -> None:
    """Placeholders, fields, sizes, claims and names: the error says which, and nothing is written."""
    with pytest.raises(CkptError) as caught:
        planned({"a.0.w": X, "a.1.w": X}, plan, tmp_path)
    assert message in str(caught.value)
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"e.0.w": X, "e.2.w": X}, "none has the number 1"), ({"e.1.w": X, "e.2.w": X}, "none has the number 0"),
        ({"e.0.w": X, "e.00.w": X}, "have one number"), ({"e.0.w": X, "e.1.w": X.T}, "cannot be stacked"),
        ({"e.0.w": X, "e.1.w": X.double()}, "cannot be put together"),
        ({"e.0.w": X, "e.99999999999999999999.w": X}, "not named in it"),
    ],
)  # fmt: skip
def test_parts_that_do_not_stack(state: State, message: str, tmp_path: Path) -> None:
    """Numbers with a gap, not from 0, twice, of twenty digits; shapes and dtypes that differ."""
    with pytest.raises(MatchError, match=message):
        planned(state, table("e.{e}.w", "all", step="stack"), tmp_path)


@pytest.mark.parametrize("step", ["reshape", "flatten", "pad"])
def test_a_step_without_an_inverse_is_named(step: str, tmp_path: Path) -> None:
    fields: dict[str, object] = {"reshape": {"to": [24]}, "flatten": {}, "pad": {"size": 9}}[step]  # type: ignore[assignment]
    with pytest.raises(MatchError, match="inverse"):
        planned({"b.w": X}, table("a.w", "b.w", step=step, **fields), tmp_path, reverse=True)


def test_options_about_patterns_need_a_plan_of_patterns(tmp_path: Path) -> None:
    torch.save({"a.w": X}, tmp_path / "in.pth")
    with pytest.raises(UsageError, match="about a plan"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", plan_value={"n": 1})
    (tmp_path / "p.toml").write_text('format = "ckpt-plan-1"\n[[tensor]]\nold = "a.w"\nnew = "b"\nshape = [4, 6]\n')
    with pytest.raises(UsageError, match="plans of patterns"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", plan=tmp_path / "p.toml", plan_value={"n": 1})
    with pytest.raises(MatchError, match="plans of patterns"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", plan=f"{tmp_path}/p.toml:reverse")
    with pytest.raises(UsageError, match="from 1 up"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", plan=tmp_path / "p.toml", plan_value="n=0")


def test_a_plan_of_names_has_the_same_steps(tmp_path: Path) -> None:
    """With the shape that it was made for; a `to` that is not what the step makes is refused."""
    text = HEAD.replace("patterns = true", "") + table("a.w", "b", step="permute", axes="(h 2) ... -> (2 h) ...", shape=[4, 6])
    torch.save({"a.w": X}, tmp_path / "in.pth")
    (tmp_path / "p.toml").write_text(text)
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", plan=tmp_path / "p.toml")
    assert torch.equal(torch.load(tmp_path / "out.pth")["b"], X[[0, 2, 1, 3]])
    (tmp_path / "p.toml").write_text(text + "to = [6, 4]\n")
    with pytest.raises(MatchError, match="it makes"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "new.pth", plan=tmp_path / "p.toml")


def test_names_are_looked_up_whatever_the_number_of_patterns(tmp_path: Path) -> None:
    """Each of hundreds of patterns finds its names, numbers that are written and repeated placeholders included."""
    state = {f"layers.7.part{number}.weight": torch.tensor([number]) for number in range(300)} | {"block.7.again.7": X}
    plan = "".join(table(f"layers.{{i}}.part{number}.weight", f"p{number}.{{i}}") for number in range(300))
    made = planned(state, plan + table("block.{i}.again.{i}", "twice.{i}"), tmp_path)
    assert [made[f"p{number}.7"].item() for number in range(300)] == list(range(300))
    assert torch.equal(made["twice.7"], X)


def test_any_view_is_gathered(tmp_path: Path) -> None:
    """Any permutation of any view, small and of more than a block, of any width of elements, is what torch makes of it."""
    generator = torch.Generator().manual_seed(0)
    state, expected, plan = {}, {}, ""
    for number in range(120):
        dims = int(torch.randint(1, 5, (), generator=generator))
        sizes = torch.randint(1, 8, (dims,), generator=generator).tolist()
        if number % 40 == 3:
            sizes = [1100, 1100]
        orders = [torch.randperm(len(sizes), generator=generator).tolist() for _ in range(2)]
        dtype = (torch.uint8, torch.int16, torch.int32, torch.complex128)[number % 4]
        view = torch.arange(torch.Size(sizes).numel()).to(dtype).reshape(sizes).permute(orders[0])[number % 2 :]
        if view.numel():
            state[f"a{number}"], expected[f"b{number}"] = view, view.permute(orders[1])
            plan += table(f"a{number}", f"b{number}", step="permute", axes=orders[1])
    made = planned(state, plan, tmp_path)
    assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())


def test_a_fill_is_rounded_as_torch_rounds_it(tmp_path: Path) -> None:
    """To the nearest number of a dtype of floats; one that it has nothing near, or no part of, is refused."""
    text = HEAD + '[[tensor]]\nold = "a"\nnew = "b"\nstep = "pad"\naxis = 0\nsize = 4\nfill = 0.1\n'
    (tmp_path / "p.toml").write_text(text)
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        torch.save({"a": torch.ones(2, dtype=dtype)}, tmp_path / "in.pth")
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", plan=tmp_path / "p.toml", overwrite=True)
        assert torch.equal(torch.load(tmp_path / "out.pth")["b"], torch.tensor([1, 1, 0.1, 0.1], dtype=dtype))
    (tmp_path / "p.toml").write_text(text.replace("0.1", "1e9"))
    torch.save({"a": torch.ones(2, dtype=torch.float16)}, tmp_path / "in.pth")
    with pytest.raises(MatchError, match="cannot hold the fill"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", plan=tmp_path / "p.toml", overwrite=True)


def test_a_plan_that_drops_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(HEAD + 'drop = ["a"]\n')
    torch.save({"a": torch.ones(2)}, tmp_path / "in.pth")
    with pytest.raises(NothingMatchedError, match="No tensor would be left"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", plan=tmp_path / "p.toml")
