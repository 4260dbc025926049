"""torch-legacy streams that break a promise: rows 49 and 77 to 80, and what a legacy pickle shares with any other."""

from __future__ import annotations

import pickle as pickle_module
import struct
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import (
    CkptError,
    DamagedFileError,
    LimitError,
    PickleError,
    TensorError,
)
from tests.hostile.pickles import (
    call,
    dict_of,
    glob,
    integer,
    list_of,
    pickle,
    sizes,
    tensor,
    text,
    tuple_of,
)
from tests.hostile.refusals import expect_refused, expect_warned, write
from tests.support.legacy import (
    HEAD,
    MAGIC,
    PROTOCOL,
    SYS_INFO,
    floats,
    legacy,
    persistent,
    stream,
    view_of,
)

SIX = floats(0, 1, 2, 3, 4, 5)
ONE = dict_of(w=tensor(on=persistent()))
TWO = dict_of(a=tensor(on=persistent("0")), b=tensor(on=persistent("1")))


def test_our_stream_is_torchs(tmp_path: Path) -> None:
    """What these tests put together by hand is a file that torch loads."""
    path = write(tmp_path, stream(TWO, ("0", SIX), ("1", SIX)))
    assert torch.load(path, weights_only=True)["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert len(ckpt_tools.inspect(path).tensors) == 2


def test_77_cut_anywhere(tmp_path: Path) -> None:
    """Wherever it is cut, the file is refused by inspect and convert alike, and never misread."""
    whole = legacy({"a.w": torch.arange(6.0), "b.w": torch.arange(4.0), "epoch": 3})
    for length in range(len(MAGIC), len(whole)):
        path = write(tmp_path, whole[:length])
        with pytest.raises(CkptError) as caught:
            ckpt_tools.inspect(path)
        assert str(caught.value).count("\n") <= 3


def test_77_cut_in_a_storage(tmp_path: Path) -> None:
    """The message says how many tensors are complete, where the file ends, and what to do."""
    data = stream(TWO, ("0", SIX), ("1", SIX))
    said = ("1 of 2 tensors complete", f"ends after {len(data) - 5} bytes, within storage 2 of 2", "get it again")
    expect_refused(write(tmp_path, data[:-5]), DamagedFileError, *said)
    expect_refused(write(tmp_path, data[: -len(SIX) - 1]), DamagedFileError, "0 of 2 tensors complete")
    expect_refused(write(tmp_path, data[: -len(SIX)]), DamagedFileError, "1 of 2 tensors complete")


def test_77_cut_in_the_pickle(tmp_path: Path) -> None:
    """Before the storages there is nothing to count."""
    data = stream(TWO, ("0", SIX), ("1", SIX))
    expect_refused(
        write(tmp_path, data[:300]), DamagedFileError, "ends within the pickle that lists its tensors", "get it again"
    )
    end = len(HEAD + pickle(TWO))
    expect_refused(write(tmp_path, data[:end]), DamagedFileError, "ends before the list of its storages")
    expect_refused(write(tmp_path, data[: end + 8]), DamagedFileError, "list of storages is malformed")


def test_80_trailing_bytes(tmp_path: Path) -> None:
    """Bytes behind the last storage are said, and not kept."""
    found = expect_warned(write(tmp_path, stream(ONE, ("0", SIX)) + b"more"), "trailing-bytes")
    assert found.findings[0].found == "4 bytes after the last storage"


@pytest.mark.parametrize(
    "bad",
    [
        persistent(key="a/b"), persistent(key=".."), persistent(key=""), persistent(key="0" * 50), persistent(numel=-1),
        persistent(numel=integer(2**60)), persistent(kind="ThingStorage"), tuple_of(text("storage"), b"N") + b"Q",
        tuple_of(text("tensor"), glob("torch", "FloatStorage"), text("0"), text("cpu"), b"K\x06", b"N") + b"Q",
        text("0") + b"Q", persistent(view=b"K\x01"), persistent(view=view_of("x", 0, 1)), persistent(view=view_of("1", -1, 1)),
        persistent(view=view_of("1", 0, 7)), persistent(view=view_of("1", 2**70, 1)),
        tuple_of(text("module"), text("os.system"), b"N", b"N") + b"Q",
    ],
)  # fmt: skip
def test_53_bad_ids(bad: bytes, tmp_path: Path) -> None:
    """Persistent ids of another kind, arity or range, and views outside their storage."""
    path = write(tmp_path, stream(dict_of(w=bad), ("0", SIX)))
    with pytest.raises(DamagedFileError):
        ckpt_tools.inspect(path)


def test_72_two_uses_of_one_key(tmp_path: Path) -> None:
    """A key with two types, and a view with two places."""
    root = dict_of(a=tensor(on=persistent()), b=tensor(on=persistent(kind="IntStorage")))
    expect_refused(write(tmp_path, stream(root, ("0", SIX))), TensorError, "two types")
    root = dict_of(a=persistent(view=view_of("1", 0, 2)), b=persistent(view=view_of("1", 1, 2)))
    expect_refused(write(tmp_path, stream(root, ("0", SIX))), TensorError, "two places")


@pytest.mark.parametrize("first", ["the storage", "the view"])
def test_72_a_view_under_a_storages_key(first: str, tmp_path: Path) -> None:
    """torch keeps both in one dict, and takes the first for both: we showed elements further on."""
    parts = [tensor(sizes(2), sizes(1), on=persistent(view=view_of("1", 2, 2))), tensor(on=persistent(key="1"))]
    own = tensor(sizes(2), sizes(1), on=persistent(view=view_of("0", 2, 2)))
    root = dict_of(a=own) if first == "the storage" else dict_of(a=parts[0], b=parts[1])
    expect_refused(write(tmp_path, stream(root, ("0", SIX), ("1", SIX))), TensorError, "a storage and a view of one")


def test_62_many_dicts(tmp_path: Path) -> None:
    """Millions of containers in a few bytes each."""
    path = write(tmp_path, stream(b"}" * 3_000_000))
    with pytest.raises(LimitError, match="more objects than a checkpoint of its size"):
        ckpt_tools.inspect(path)


def test_49_magic_number_by_a_call(tmp_path: Path) -> None:
    """torch would run the call to learn the number."""
    head = pickle(call("builtins", "int", text("119547037146038801333356"))) + PROTOCOL + SYS_INFO
    path = write(tmp_path, stream(ONE, ("0", SIX), head=head))
    with pytest.raises(CkptError):
        ckpt_tools.inspect(path)


def test_unknown_classes_run_nothing(tmp_path: Path) -> None:
    """A call in the pickle is an inert record, listed."""
    marker = tmp_path / "ran"
    root = dict_of(w=tensor(on=persistent()), x=call("os", "mkdir", text(str(marker))))
    path = write(tmp_path, stream(root, ("0", SIX)))
    assert [row["global"] for row in ckpt_tools.inspect(path).objects] == ["os.mkdir"]
    ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain")
    assert not marker.exists()


def test_flips_of_memo_indexes(tmp_path: Path) -> None:
    """A flip in the memo index of a function makes a call of a text, a dict or a class of storages: refused, as by torch."""
    data = legacy({"a.w": torch.rand(3, 4), "b.w": torch.rand(4)})
    at = data.index(b"((h") - 1  # the second tensor's function
    refused = 0
    for bit in range(8):
        path = write(tmp_path, data[:at] + bytes((data[at] ^ 1 << bit,)) + data[at + 1 :])
        try:
            torch.load(path, weights_only=True)
        except (pickle_module.UnpicklingError, TypeError, KeyError):
            with pytest.raises(CkptError):
                ckpt_tools.repair(path, tmp_path / "out.pth")
            refused += 1
    assert refused > 3


# fmt: off
REFUSED = {
    **{f"the frame {at}": (stream(ONE, ("0", SIX), head=head), PickleError, said)
       for at, (head, said) in enumerate([(MAGIC + pickle(integer(1000)) + SYS_INFO, "says protocol 1000"),
        (MAGIC + pickle(text("1001")) + SYS_INFO, "says protocol a str"), (MAGIC + PROTOCOL + pickle(b"]"),
        "sys_info is not a dict"), (MAGIC + pickle(persistent()) + SYS_INFO, "refers to something outside it")])},
    **{f"78 count differs {at}": (stream(ONE, ("0", struct.pack("<q", count) + SIX[8:])), TensorError,
        "should have 6 elements", f"the file says {count}")
       for at, count in enumerate([0, 5, 7, -1, 2**62])},
    **{f"79 key list {at}": (stream(TWO, ("0", SIX), ("1", SIX), keys=pickle(keys)), error, said)
       for at, (keys, error, said) in enumerate([(list_of(text("0")), DamagedFileError, "lacks 1 of them: '1'"),
        (list_of(text("0"), text("1"), text("2")), DamagedFileError, "no tensor uses, 1 of them: '2'"), (list_of(text("0"),
        text("1"), text("1")), DamagedFileError, "names one twice"), (list_of(text("0"), b"K\x01"), PickleError,
        "not a list of text"), (tuple_of(text("0"), text("1")), PickleError, "not a list of text"), (b"]", DamagedFileError,
        "lacks 2 of them")])},
    "71 outside its view": (
        stream(dict_of(w=tensor(on=persistent(view=view_of("1", 0, 4)))), ("0", SIX)), TensorError,
        "reaches outside its storage"),
    "55 a claim beyond the file": (HEAD + b"\x80\x02X\xff\xff\xff\xff", DamagedFileError, "claims 4294967295 bytes"),
    "73 sizes stay inside": (
        stream(dict_of(w=tensor(sizes(7), sizes(1), on=persistent())), ("0", SIX)), TensorError,
        "reaches outside its storage"),
}
# fmt: on


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    """`inspect` and `convert` refuse each with the same error and say why; nothing is written."""
    data, error, *said = REFUSED[name]
    expect_refused(write(tmp_path, data), error, *said)
