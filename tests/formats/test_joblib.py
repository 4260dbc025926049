"""joblib's dumps: pickles in which the bytes of arrays stand between opcodes."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools.errors import CkptError
from tests.support.terminal import run as ckpt

joblib = pytest.importorskip("joblib", reason="the extra `train`")

ARRAYS: dict[str, Any] = {
    "w": np.arange(6, dtype="f4").reshape(2, 3), "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big": np.arange(3, dtype=">i4"), "empty": np.zeros((0, 3)), "scalar": np.array(5.0), "bools": np.array([True, False]),
    "objects": np.array([{"a": 1}, [2]], dtype=object),
}  # fmt: skip


@pytest.mark.parametrize("how", [*range(6), ("zlib", 3), ("gzip", 3), ("bz2", 3), ("lzma", 3), ("xz", 3)], ids=str)
def test_arrays_are_tensors(how: Any, tmp_path: Path) -> None:
    """Whatever the protocol and the compression: the numbers are those that joblib dumped, and joblib.load is named."""
    options = {"protocol": how} if type(how) is int else {"compress": how}
    joblib.dump(ARRAYS, tmp_path / "a.joblib", **options)
    ckpt_tools.convert(tmp_path / "a.joblib", tmp_path / "a.pth", objects="plain")
    state = torch.load(tmp_path / "a.pth", weights_only=True)
    for name, value in ARRAYS.items():
        if name != "objects":
            assert np.array_equal(state[name].numpy(), value), name
    assert state["objects"] == [{"a": 1}, [2]]
    assert ckpt_tools.inspect(tmp_path / "a.joblib").weights_only["call"] == "joblib.load"
    assert ckpt_tools.scan(tmp_path / "a.joblib")[0].verdict == "needs-code"


def test_arrays_alone_need_no_option(tmp_path: Path) -> None:
    """A dump of a dict of arrays is plain data once its arrays are read."""
    joblib.dump({"w": ARRAYS["w"]}, tmp_path / "a.joblib")
    result = ckpt("convert", tmp_path / "a.joblib", tmp_path / "a.safetensors")
    assert result.exit_code == 0, result.output
    assert ckpt_tools.torch.load_state_dict(tmp_path / "a.safetensors")["w"].tolist() == ARRAYS["w"].tolist()


def test_memory_mapped_arrays_need_code(tmp_path: Path) -> None:
    """joblib writes the class of an array that is mapped, and reads it as any other."""
    mapped = np.memmap(tmp_path / "raw", dtype="f4", mode="w+", shape=(3,))
    joblib.dump({"w": mapped}, tmp_path / "a.joblib")
    assert ckpt_tools.scan(tmp_path / "a.joblib")[0].verdict == "needs-code"
    assert ckpt_tools.inspect(tmp_path / "a.joblib").tensors[0]["shape"] == [3]


@pytest.mark.parametrize("kind", ["forest", "scaler", "pipeline"])
def test_estimators_need_code(kind: str, tmp_path: Path) -> None:
    """An estimator is rated alike whether joblib or pickle wrote it, and inspect reads both."""
    ensemble = pytest.importorskip("sklearn.ensemble", reason="the extra `train`")
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows, targets = np.arange(40.0).reshape(20, 2), np.arange(20) % 2
    forest = ensemble.RandomForestClassifier(3, max_depth=2, random_state=0)
    made = {"forest": forest, "scaler": StandardScaler(), "pipeline": make_pipeline(StandardScaler(), forest)}[kind]
    made.fit(rows, targets)
    joblib.dump(made, tmp_path / "a.joblib")
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(made))
    for name in ("a.joblib", "a.pkl"):
        assert ckpt_tools.scan(tmp_path / name)[0].verdict == "needs-code"
        assert ckpt("inspect", tmp_path / name).exit_code == 0


def test_an_array_that_is_cut_off(tmp_path: Path) -> None:
    """Half of the last array is no array."""
    joblib.dump(np.arange(100.0), tmp_path / "a.joblib")
    (tmp_path / "a.joblib").write_bytes((tmp_path / "a.joblib").read_bytes()[:-400])
    with pytest.raises(CkptError, match="cut off"):
        ckpt_tools.inspect(tmp_path / "a.joblib")


def test_the_pickle_of_an_array_of_objects_counts(tmp_path: Path) -> None:
    """It has a memo of its own, and what it calls is named."""

    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("true",)

    joblib.dump({"o": np.array([Runs()], dtype=object), "w": ARRAYS["w"]}, tmp_path / "a.joblib")
    (report,) = ckpt_tools.scan(tmp_path / "a.joblib")
    assert report.verdict == "dangerous"
    assert report.safety.calls[0][1].text.endswith("system('true')")


def test_zlib_that_is_no_pickle_is_no_archive(tmp_path: Path) -> None:
    """A header of safetensors may have the length that zlib begins with."""
    text = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(0x9C78)
    (tmp_path / "m.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\1")
    assert ckpt_tools.inspect(tmp_path / "m.safetensors").container == "safetensors"
