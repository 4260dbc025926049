"""Siblings of files that went wrong once: what else the same cause could hit."""

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import prune, spectral_norm, weight_norm

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools.errors import ConvertError, ObjectsError
from tests.support.commands import ckpt


def plain(path: Path, **options: Any) -> Any:
    """What `torch.load` reads of a file that `convert` made plain."""
    out = path.with_name("plain.pth")
    ckpt_tools.convert(path, out, objects="plain", overwrite=True, **options)
    return torch.load(out, weights_only=True)


# --- scan: what honest libraries write, by hand where they are not installed

GLOBALS = {
    "pandas' intervals": b"cpandas._libs.interval\n__pyx_unpickle_IntervalMixin\n(cpandas.arrays\nIntervalArray\nI2\nNtR.",
    "pandas' offset": b"cpandas\nDateOffset\n)R.",
    "a tokenizer of scikit-learn's": pickle.dumps(str.split),
    "the answer of max": pickle.dumps(torch.ones(2, 3).max(0)),
}


@pytest.mark.parametrize("data", GLOBALS.values(), ids=GLOBALS)
def test_objects_of_honest_libraries_need_code_and_are_not_dangerous(data: bytes, tmp_path: Path) -> None:
    """What a library writes of its own objects is told by its name."""
    (tmp_path / "x.pkl").write_bytes(data)
    assert ckpt_tools.scan(tmp_path / "x.pkl")[0].verdict == "needs-code"


@pytest.mark.parametrize("data", [b"cbuiltins\nstr.__class__\n.", b"cbuiltins\nobject.__subclasses__\n.", b"cos\nstr.split\n."])
def test_no_other_name_inside_of_a_class_is_let_through(data: bytes, tmp_path: Path) -> None:
    """Methods of text are harmless, and not what leads out of them."""
    (tmp_path / "x.pkl").write_bytes(data)
    assert ckpt_tools.scan(tmp_path / "x.pkl")[0].verdict == "dangerous"


def test_a_joblib_dump_of_texts_of_any_length_is_read(tmp_path: Path) -> None:
    """NumPy's StringDType is of objects, so its array is a pickle of its own."""
    joblib = pytest.importorskip("joblib")
    joblib.dump({"a": np.array(["x"], np.dtypes.StringDType()), "b": np.ones(3)}, tmp_path / "x.joblib")
    assert ckpt_tools.scan(tmp_path / "x.joblib")[0].verdict == "needs-code"
    assert ckpt_tools.inspect(tmp_path / "x.joblib").tensors[0]["shape"] == [3]


# --- --objects plain: nothing of an object is lost


class Text(str):
    """Text with attributes."""


class Pair(tuple[Any, ...]):
    """A tuple with attributes."""


class Items(list[Any]):
    """A list with attributes."""


class Made:
    """Made from an array, and with a state."""

    def __reduce__(self) -> Any:
        return Made, (np.arange(3.0),), {"extra": 5}


def noted(value: Any) -> Any:
    value.note = "n"
    return value


MADE = {
    "text": (noted(Text("x")), {"<arguments>": "x", "note": "n"}),
    "text without attributes": (Text("x"), "x"),
    "a tuple": (noted(Pair((1, 2))), {"<arguments>": [(1, 2)], "note": "n"}),
    "a list": (noted(Items([1, 2])), {"<items>": [1, 2], "note": "n"}),
    "an error": (noted(ValueError("no", 7)), {"<arguments>": ("no", 7), "note": "n"}),
    "made from an array": (Made(), {"<arguments>": [torch.arange(3, dtype=torch.float64)], "extra": 5}),
}


@pytest.mark.parametrize(("value", "expected"), MADE.values(), ids=MADE)
def test_objects_made_plain_keep_what_they_are_made_from(value: Any, expected: Any, tmp_path: Path) -> None:
    """Attributes do not take the place of what an instance was made from."""
    torch.save({"v": value}, tmp_path / "x.pth")
    assert str(plain(tmp_path / "x.pth")["v"]) == str(expected)


def test_a_file_that_is_one_date_is_refused_with_what_can_be_done(tmp_path: Path) -> None:
    """The root cannot be dropped."""
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(np.array(["2020"], "M8[D]")))
    with pytest.raises(ObjectsError, match=r"lost: the root\.\n") as caught:
        plain(tmp_path / "x.pkl")
    assert "drop=" not in str(caught.value)


# --- weights in parts


def parts(*steps: Callable[[torch.nn.Module], object], layer: type[torch.nn.Module] = torch.nn.Linear) -> dict[str, Any]:
    torch.manual_seed(0)
    made = layer(3, 4) if layer is torch.nn.Linear else layer(4, 4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old forms are deprecated
        for step in steps:
            step(made)
    return {name: value.clone() for name, value in made.state_dict().items()}


def test_a_part_that_is_in_parts_itself_is_folded_too(tmp_path: Path) -> None:
    """A pruned `weight_v` first, and then the weight norm of it."""
    held = parts(weight_norm, lambda layer: prune.l1_unstructured(layer, "weight_v", amount=0.5))
    torch.save(held, tmp_path / "x.pth")
    direction = held["weight_v_orig"] * held["weight_v_mask"]
    whole = direction * (held["weight_g"] / direction.norm(dim=1, keepdim=True))
    torch.save({"weight": whole, "bias": held["bias"]}, tmp_path / "like.pth")
    for options in ({"fold": True}, {"like": tmp_path / "like.pth"}):
        ckpt_tools.convert(tmp_path / "x.pth", tmp_path / "out.pth", overwrite=True, **options)
        assert torch.allclose(torch.load(tmp_path / "out.pth")["weight"], whole, atol=1e-6)


def test_vectors_that_no_step_has_trained_do_not_choose_a_dimension(tmp_path: Path) -> None:
    """They are random: nearer to one dimension's by chance."""
    torch.save(parts(spectral_norm, layer=torch.nn.Conv2d), tmp_path / "x.pth")
    with pytest.raises(ConvertError, match="do not tell which"):
        ckpt_tools.convert(tmp_path / "x.pth", tmp_path / "out.pth", fold=True)


def test_a_spectral_norm_of_a_bias_is_folded(tmp_path: Path) -> None:
    """It is a matrix of one column."""
    held = parts(lambda layer: spectral_norm(layer, "bias"))
    torch.save(held, tmp_path / "x.pth")
    ckpt("convert", tmp_path / "x.pth", tmp_path / "out.pth", "--fold")
    scale = held["bias_u"] @ (held["bias_orig"][:, None] @ held["bias_v"])
    assert torch.allclose(torch.load(tmp_path / "out.pth")["bias"], held["bias_orig"] / scale)


def test_numbers_of_python_2_are_read_from_text(tmp_path: Path) -> None:
    """Python 2 wrote the bytes of a number as a str, which may be text: `false` was "\\0"."""
    kind = b"cnumpy\ndtype\n(S'b1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntb"
    number = kind.replace(b"'b1'", b"'f8'").replace(b"'|'", b"'<'") + b"S'\\x00\\x00\\x00\\x00\\x00\\x00\\x04@'\n"
    scalar = b"cnumpy.core.multiarray\nscalar\n("
    data = b"(dp0\nS'no'\np1\n" + scalar + kind + b"S'\\x00'\ntRsS'x'\np2\n" + scalar + number + b"tRs."
    (tmp_path / "x.pkl").write_bytes(data)
    assert plain(tmp_path / "x.pkl") == {"no": False, "x": 2.5}


def test_check_names_the_damaged_array_of_an_npz(tmp_path: Path) -> None:
    """An .npz is a zip, and has a CRC-32 for each array."""
    np.savez(tmp_path / "x.npz", a=np.zeros(4), b=np.full(4, 7.0))
    assert "2 records match" in ckpt("check", tmp_path / "x.npz", code=1).output
    data = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(data.replace(np.full(4, 7.0).tobytes(), np.full(4, 8.0).tobytes()))
    assert "'b.npy' holds b, and does not match its CRC-32" in ckpt("check", tmp_path / "x.npz", code=1).output


def test_load_gives_the_counter_of_a_scheduler_and_layouts(tmp_path: Path) -> None:
    """`weights_only` loads them, and so does `load`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    state = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 5]).state_dict()
    held = {"scheduler": state, "layouts": [torch.strided, torch.sparse_coo], "none": torch.Size()}
    torch.save(held, tmp_path / "x.pth")
    assert ckpt_tools.torch.load(tmp_path / "x.pth") == held == torch.load(tmp_path / "x.pth", weights_only=True)


class Sized:
    """`torch.Size` of what it does not take."""

    def __reduce__(self) -> Any:
        return torch.Size, ((torch.ones(2),),)


def test_a_size_of_a_tensor_that_is_no_whole_number_is_malformed(tmp_path: Path) -> None:
    """No torch loads it."""
    torch.save([Sized()], tmp_path / "x.pth")
    assert "torch.Size is called with malformed arguments" in ckpt("check", tmp_path / "x.pth", code=3).output


def test_averages_of_a_compiled_model_have_the_plain_names(tmp_path: Path) -> None:
    """`AveragedModel(torch.compile(model))`, alone and beside the trained one."""
    model = torch.nn.Linear(2, 3)
    averaged = torch.optim.swa_utils.AveragedModel(model).state_dict()
    wrapped = {name.replace("module.", "module._orig_mod."): value for name, value in averaged.items()}
    for held in (wrapped, {"model": model.state_dict(), "ema": {f"_orig_mod.{k}": v for k, v in model.state_dict().items()}}):
        torch.save(held, tmp_path / "x.pth")
        ckpt_tools.convert(tmp_path / "x.pth", tmp_path / "out.pth", ema=True, overwrite=True)
        model.load_state_dict(torch.load(tmp_path / "out.pth"))


def test_how_far_a_pickle_is_looked_through_goes_by_its_size(tmp_path: Path) -> None:
    """`pickle.dump` writes each tensor as a file of its own inside, of five pickles: thousands of them are honest."""
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(torch.zeros(600)))
    with ckpt_tools.limits.raised(nodes=500):
        assert ckpt_tools.scan(tmp_path / "x.pkl")[0].verdict == "needs-code"
