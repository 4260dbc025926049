"""A checkpoint fitted to a target by `convert`: heads, overlaps, adaptation, plans; what nobody decided is refused."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_tools
from ckpt_tools.errors import ConvertError, MatchError, UsageError
from ckpt_tools.torch import load_into
from fixtures.make import network
from tests.support.graphs import element_bytes
from tests.support.samples import FIXTURES

SOURCE = FIXTURES / "ddp.pth"


def convert(target: Any, out: Path, source: Path = SOURCE, **options: Any) -> dict[str, torch.Tensor]:
    ckpt_tools.convert(source, out, like=target, **options)
    loaded: dict[str, torch.Tensor] = torch.load(out, weights_only=True)
    return loaded


def with_head(classes: int) -> nn.Module:
    """The network of the fixtures with another number of classes."""
    model = network()
    torch.manual_seed(5)
    model.fc2 = nn.Linear(8, classes)
    return model


def assert_body(state: dict[str, torch.Tensor]) -> None:
    for name, value in network().state_dict().items():
        assert name.startswith("fc2") or element_bytes(state[name]) == element_bytes(value), name


def head(classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 1024), nn.ReLU(), nn.Linear(1024, classes))


def test_every_kind_of_target(tmp_path: Path) -> None:
    """A callable, a module, a wrapped one, a state dict and a file: names, order and `_metadata` are the target's."""
    torch.save(network().state_dict(), tmp_path / "like.pth")
    targets: list[Any] = ["fixtures.make:network", network(), network().state_dict(), tmp_path / "like.pth"]
    for number, target in enumerate(targets):
        state = convert(target, tmp_path / f"{number}.pth")
        assert list(state) == list(network().state_dict())
        assert list(state._metadata) == list(network().state_dict()._metadata)  # type: ignore[attr-defined]
        assert_body(state)
    wrapped = convert(nn.DataParallel(network()), tmp_path / "wrapped.pth", FIXTURES / "compiled.pth")
    nn.DataParallel(network()).load_state_dict(wrapped)


# --- heads


def test_reinit_without_a_scheme_is_the_default_and_says_so(tmp_path: Path) -> None:
    """A tensor of another shape is as `--reinit default` makes it, and the report says so; a missing one is still an error."""
    fresh = convert(with_head(20), tmp_path / "a.pth", on_mismatch="reinit", reinit="default")
    state = convert(with_head(20), tmp_path / "b.pth", on_mismatch="reinit")
    assert torch.equal(state["fc2.weight"], fresh["fc2.weight"])
    assert fresh["fc2.weight"].any()
    report = ckpt_tools.convert(
        SOURCE, tmp_path / "c.pth", like=with_head(20), on_mismatch="reinit", reinit={"fc2.bias": "ones"}
    )
    assert report.fitted is not None
    said = {row.name: row.scheme for row in report.fitted.initialised}
    assert said["fc2.weight"].endswith(", by default")
    assert said["fc2.bias"] == "ones"
    model = with_head(20)
    model.add_module("extra", nn.Linear(2, 2))
    with pytest.raises(MatchError, match="extra"):
        convert(model, tmp_path / "d.pth", on_mismatch="reinit")


def test_overlap_grows_and_shrinks(tmp_path: Path) -> None:
    """Rows and columns that both have are kept for weight and bias together; the rest is initialised."""
    old = network().state_dict()
    state = convert(with_head(20), tmp_path / "a.pth", on_mismatch="overlap", reinit="normal:0.5")
    assert torch.equal(state["fc2.weight"][:10], old["fc2.weight"])
    assert torch.equal(state["fc2.bias"][:10], old["fc2.bias"])
    assert state["fc2.weight"][10:].abs().gt(0).all()
    fresh = convert(with_head(20), tmp_path / "b.pth", on_mismatch="reinit", reinit="normal:0.5")
    assert torch.equal(state["fc2.weight"][10:], fresh["fc2.weight"][10:])
    small = convert(with_head(4), tmp_path / "c.pth", on_mismatch="overlap")
    assert torch.equal(small["fc2.weight"], old["fc2.weight"][:4])
    target = with_head(10)
    target.fc2 = nn.Linear(5, 10)
    assert torch.equal(convert(target, tmp_path / "d.pth", on_mismatch="overlap")["fc2.weight"], old["fc2.weight"][:, :5])


def test_overlap_of_large_and_strided_tensors(tmp_path: Path) -> None:
    """Several blocks, a transposed source, another dtype and a vocabulary that grows."""
    torch.manual_seed(0)
    table = torch.randn(64, 9_000).to(torch.bfloat16).t()
    torch.save({"emb.weight": table}, tmp_path / "in.pth")
    target = {"emb.weight": torch.empty(9_007, 70, device="meta")}
    state = convert(target, tmp_path / "m.pth", tmp_path / "in.pth", on_mismatch="overlap", reinit="uniform:0.1")["emb.weight"]
    assert state.dtype is torch.bfloat16
    assert torch.equal(state[:9_000, :64], table)
    rest = torch.cat([state[:, 64:].flatten(), state[9_000:].flatten()]).float()
    assert rest.abs().max() <= 0.1001
    assert abs(float(rest.mean())) < 0.002


def test_the_targets_own_values(tmp_path: Path) -> None:
    """`target`: what the constructor gives under the seed, what a live model has, what another checkpoint holds."""
    options: dict[str, Any] = {"on_mismatch": "reinit", "reinit": "target"}
    live: Any = with_head(20)
    torch.save(live.state_dict(), tmp_path / "like.pth")
    for target in (live, live.state_dict(), tmp_path / "like.pth"):
        state = convert(target, tmp_path / "m.pth", overwrite=True, **options)
        assert torch.equal(state["fc2.weight"], live.state_dict()["fc2.weight"])
    called: dict[str, Any] = {"like_args": {"classes": 20}, "reinit": "target", "on_mismatch": "reinit"}
    torch.save(head(10).state_dict(), tmp_path / "head.pth")
    state = convert("tests.fit.test_fit:head", tmp_path / "n.pth", tmp_path / "head.pth", **called)
    assert torch.equal(state["2.weight"], head(20).state_dict()["2.weight"])
    live.fc2.weight.data[0, 0] = float("nan")
    with pytest.raises(ConvertError, match=r"'fc2\.weight': an initial value is NaN"):
        convert(live, tmp_path / "o.pth", **options)


def test_ties_are_initialised_once(tmp_path: Path) -> None:
    """Tied tensors of the target get one tensor, with ties kept in the file."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(2, 2), nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

    torch.save({f"body.{name}": value for name, value in nn.Linear(2, 2).state_dict().items()}, tmp_path / "in.pth")
    state = convert(Tied(), tmp_path / "m.pth", tmp_path / "in.pth", reinit="normal:1")
    assert state["a.weight"].data_ptr() == state["b.weight"].data_ptr()


def test_two_different_tensors_are_not_one(tmp_path: Path) -> None:
    """Where the target ties two names, the checkpoint has one tensor for both, or equal ones, or it is refused."""
    tied = torch.ones(3, 2)
    target, source, out = {"e": tied, "h": tied}, tmp_path / "in.pth", tmp_path / "out.pth"
    torch.save({"e": torch.zeros(3, 2), "h": torch.zeros(3, 2)}, source)
    assert list(convert(target, out, source)) == ["e", "h"]
    torch.save({"e": torch.zeros(3, 2), "h": torch.ones(3, 2)}, source)
    with pytest.raises(ConvertError, match="'e' and 'h' are one tensor in it, and two different ones in the checkpoint"):
        convert(target, out, source, overwrite=True)
    loaded = convert(target, out, source, drop="h", overwrite=True)
    assert loaded["h"].data_ptr() == loaded["e"].data_ptr()


def test_the_optimizer_is_told(tmp_path: Path) -> None:
    report = ckpt_tools.convert(
        FIXTURES / "training_named.pth", tmp_path / "m.pth", like=with_head(20), on_mismatch="reinit", reinit="default"
    )
    loaded = torch.load(tmp_path / "m.pth")
    assert loaded["optimizer"]["param_groups"][0]["param_names"] == [name for name, _ in network().named_parameters()]
    assert "optimizer-of-old-tensors" in [note.code for note in report.notes]
    assert report.fitted is not None
    assert [row.name for row in report.fitted.initialised] == ["fc2.weight", "fc2.bias"]


def test_adapt_is_timms_and_deits_rule(tmp_path: Path) -> None:
    """The first convolution to one channel and to five; position embeddings to a larger and a smaller grid."""
    torch.manual_seed(0)
    state = {
        "patch.weight": torch.randn(8, 3, 4, 4), "pos_embed": torch.randn(1, 17, 8), "late.weight": torch.randn(4, 3, 2, 2),
    }  # fmt: skip
    torch.save(state, tmp_path / "in.pth")

    def like(channels: int, tokens: int) -> dict[str, torch.Tensor]:
        shapes = {"patch.weight": (8, channels, 4, 4), "pos_embed": (1, tokens, 8), "late.weight": (4, 3, 2, 2)}
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

    def resized(side: int) -> torch.Tensor:
        grid = state["pos_embed"][:, 1:].reshape(1, 4, 4, 8).permute(0, 3, 1, 2)
        made = nn.functional.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)
        return torch.cat([state["pos_embed"][:, :1], made.permute(0, 2, 3, 1).reshape(1, -1, 8)], 1)

    grey = convert(like(1, 50), tmp_path / "a.pth", tmp_path / "in.pth", adapt=True)
    assert torch.equal(grey["patch.weight"], state["patch.weight"].sum(1, keepdim=True))
    assert torch.equal(grey["pos_embed"], resized(7))
    more = convert(like(5, 5), tmp_path / "b.pth", tmp_path / "in.pth", adapt=True)
    assert torch.equal(more["patch.weight"], state["patch.weight"][:, [0, 1, 2, 0, 1]] * (3 / 5))
    assert torch.equal(more["pos_embed"], resized(2))
    assert torch.equal(more["late.weight"], state["late.weight"])
    with pytest.raises(MatchError) as caught:
        convert(like(3, 50), tmp_path / "c.pth", tmp_path / "in.pth")
    assert "`adapt`" in caught.value.fix
    for target in (like(1, 50) | {"late.weight": torch.empty(4, 1, 2, 2)}, like(3, 18)):
        with pytest.raises(MatchError, match="mismatched"):
            convert(target, tmp_path / "c.pth", tmp_path / "in.pth", adapt=True)


def test_a_plan_is_replayed(tmp_path: Path) -> None:
    """--plan names the partners, mismatches are settled by the same options, and another file is refused."""
    ckpt_tools.match(SOURCE, like=with_head(20), output=tmp_path / "plan.toml")
    options: dict[str, Any] = {"plan": tmp_path / "plan.toml", "on_mismatch": "reinit", "reinit": "zeros"}
    ckpt_tools.convert(SOURCE, tmp_path / "m.pth", **options)
    state = torch.load(tmp_path / "m.pth")
    assert_body(state)
    assert state["fc2.weight"].shape == (20, 8)
    with pytest.raises(MatchError):
        ckpt_tools.convert(FIXTURES / "tied.pth", tmp_path / "n.pth", **options)
    larger = with_head(20)
    larger.extra = nn.Linear(2, 2, bias=False)
    ckpt_tools.convert(SOURCE, tmp_path / "larger.pth", like=larger, **options)
    assert not torch.load(tmp_path / "larger.pth")["extra.weight"].any()
    with pytest.raises(MatchError, match=r"fc2\.weight.*wants \[10, 8\]"):
        ckpt_tools.convert(SOURCE, tmp_path / "n.pth", like=with_head(10), **options)
    with pytest.raises(UsageError, match="which says every name"):
        ckpt_tools.convert(SOURCE, tmp_path / "n.pth", add_module=True, **options)


def test_a_target_leaves_no_trace(tmp_path: Path) -> None:
    """Neither the path that a target is imported from nor the seed of its own values stays behind."""
    torch.save({"weight": torch.ones(2, 3)}, tmp_path / "part.pth")
    path, state = list(sys.path), torch.get_rng_state()
    options = {"like_args": {"in_features": 3, "out_features": 2}, "reinit": "target", "seed": 7}
    found = convert("torch.nn:Linear", tmp_path / "out.pth", tmp_path / "part.pth", **options)
    assert found["bias"].any()
    assert sys.path == path
    assert torch.equal(torch.get_rng_state(), state)


# --- one scheme for all weights


class Roles(nn.Module):
    """A tensor of every role: matrices, biases, norms of two kinds, a slope, an embedding with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.layer_norm, self.slope = nn.LayerNorm(4), nn.PReLU()
        self.words = nn.Embedding(5, 4, padding_idx=1)
        self.rnn, self.fc = nn.LSTM(4, 3), nn.Linear(4, 2)
        self.kept = nn.Linear(2, 2)


ZEROS = ("conv.bias", "norm.bias", "norm.running_mean", "norm.num_batches_tracked", "layer_norm.bias", "rnn.bias_ih_l0",
         "rnn.bias_hh_l0", "fc.bias")  # fmt: skip
ONES = ("norm.weight", "norm.running_var", "layer_norm.weight")
WEIGHTS = ("conv.weight", "words.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "fc.weight")


def assert_roles(state: dict[str, torch.Tensor]) -> None:
    """Weights have numbers, biases are zero, norms the identity."""
    for name in ZEROS:
        assert not state[name].any(), name
    for name in ONES:
        assert (state[name] == 1).all(), name
    for name in WEIGHTS:
        assert len(state[name].unique()) > 1, name


@pytest.mark.parametrize("scheme", ["normal:0.02", "trunc_normal:1", "kaiming_uniform", "orthogonal"])
def test_one_scheme_is_for_weights(tmp_path: Path, scheme: str) -> None:
    """Without a glob weights get the scheme, biases zeros, norms ones, by convert and by load_into alike."""
    kept = {f"kept.{name}": value for name, value in nn.Linear(2, 2).state_dict().items()}
    torch.save(kept, tmp_path / "kept.pth")
    model = Roles()
    state = convert(model, tmp_path / "out.pth", tmp_path / "kept.pth", reinit=scheme)
    assert_roles(state)
    assert state["slope.weight"].item() == 0.25
    assert not state["words.weight"][1].any()
    report = load_into(model, tmp_path / "kept.pth", reinit=scheme)
    assert {name: element_bytes(value) for name, value in model.state_dict().items()} == {
        name: element_bytes(value) for name, value in state.items()
    }
    assert report.reinitialised["fc.bias"] == "zeros (seed 0)"


def test_a_scheme_with_a_glob_is_literal(tmp_path: Path) -> None:
    """`*=normal:0.02` is for everything it matches; a scheme of a matrix refuses a bias that was named."""
    torch.save({"kept.weight": torch.ones(2, 2), "kept.bias": torch.ones(2)}, tmp_path / "kept.pth")
    model = nn.ModuleDict({"kept": nn.Linear(2, 2), "fc": nn.Linear(4, 3), "norm": nn.LayerNorm(3)})
    state = convert(model, tmp_path / "out.pth", tmp_path / "kept.pth", reinit="*=normal:0.02")
    for name in ("fc.weight", "fc.bias", "norm.weight", "norm.bias"):
        assert 0 < state[name].abs().max() < 0.2, name
    with pytest.raises(ConvertError, match="kaiming_uniform needs 2"):
        convert(model, tmp_path / "other.pth", tmp_path / "kept.pth", reinit="*=kaiming_uniform")
    state = convert(model, tmp_path / "mixed.pth", tmp_path / "kept.pth", reinit=["normal:0.02", "norm.*=zeros"])
    assert not state["norm.weight"].any()
    assert not state["fc.bias"].any()


@pytest.mark.parametrize(
    ("name", "extra"), [("embeddings.position_embeddings.weight", 0), ("embed_positions.weight", 2), ("decoder.post.weight", 1)]
)
def test_places_of_a_text_are_no_grid(tmp_path: Path, name: str, extra: int) -> None:
    """Without a class token, or a convolution that makes patches, a table is refused, as what has `pos` in another word is."""
    for size, file in ((16, "old.pth"), (64, "new.pth")):
        torch.save({name: torch.randn(size + extra, 8), "conv.weight": torch.randn(9, 3, 2, 2)}, tmp_path / file)
    with pytest.raises(MatchError, match="wanted 6"):
        ckpt_tools.convert(tmp_path / "old.pth", tmp_path / "out.pth", like=tmp_path / "new.pth", adapt=True)
