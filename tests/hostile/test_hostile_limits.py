"""What a file can cost its reader: time and memory, and nothing that runs. Rows 34, 39, 55 to 63, 75 and 82 as bombs."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_tools
from ckpt_tools import limits
from ckpt_tools.errors import LimitError, PickleError
from ckpt_tools.formats.pickles import find_pickles
from ckpt_tools.io.output import Source
from ckpt_tools.operations.compare import stats as stats_of
from ckpt_tools.operations.repair import verification
from ckpt_tools.operations.safety import of_unreadable
from ckpt_tools.pickling import state
from ckpt_tools.pickling.reader import Machine
from ckpt_tools.pickling.torch_objects import MAKERS
from ckpt_tools.tree.nodes import Dict, Global, List, Object
from ckpt_tools.tree.visit import walk
from ckpt_tools.values import counting
from tests.hostile import (
    bombs,
    costs,
    formats,
    long_names,
    many_nodes,
    small_files,
    tars,
)
from tests.hostile import pickles as p
from tests.hostile.bombs import BOMBS
from tests.hostile.calls import CALLS
from tests.hostile.refusals import write
from tests.hostile.zips import torch_zip

ROOT = Path(ckpt_tools.__file__).parent.parent
FLOATS = {"0": bytes(24)}
CPU_SECONDS, MEGABYTES = 5, 300
assert long_names.bomb is many_nodes.bomb is formats.bomb is tars.bomb is bombs.bomb  # their builders are in the table too

MEASURED = costs.PACED + textwrap.dedent("""
    import ckpt_tools
    said = "read"
    try:
        if len(sys.argv) == 2:
            ckpt_tools.inspect(sys.argv[1])
        else:
            ckpt_tools.convert(sys.argv[1], sys.argv[2], objects="plain")
    except ckpt_tools.CkptError as error:
        said = f"{type(error).__name__}: {error}"
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([said, used.ru_utime + used.ru_stime - before, used.ru_maxrss >> 10, (before + pace()) / 2]))
""")


def measured(*arguments: Path) -> tuple[str, float, int]:
    """What a fresh process says about a file, its seconds on a core that has nothing else to do, its largest size in MB."""
    said, seconds, megabytes, pace = measuring(MEASURED, *arguments)
    return said, costs.alone(seconds, pace), megabytes


def measuring(code: str, *arguments: Path) -> Any:
    """What code prints as JSON about files, in a fresh process whose size is its own."""
    # By way of a shell: a child's largest size begins with that of the process that it was forked from.
    command = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, check=True)
    assert done.stdout, done.stderr.decode()
    return json.loads(done.stdout)


ALL_MEASURED = textwrap.dedent("""
    import json, resource, sys, time
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    import ckpt_tools
    rows = []

    def work(path, what):
        started, said = time.process_time(), "read"
        try:
            what()
        except ckpt_tools.CkptError as error:
            said = type(error).__name__
        rows.append([said, path, time.process_time() - started])

    for path in sys.argv[1:]:
        work(path, lambda: ckpt_tools.inspect(path))
        if "bytes" in path:  # what costs little to read, and much to make plain
            work(path, lambda: ckpt_tools.convert(path, path + ".out", objects="plain", dry_run=True))
    print(json.dumps([*rows, ["", "", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10]]))
""")
REFUSED = (
    "LimitError", "SafetensorsError", "PickleError", "ZipError", "TensorError", "DamagedFileError", "NotACheckpointError",
    "UnsupportedContainerError", "ContainerLimitError", "NothingMatchedError", "ObjectsError", "ConvertError",
    "MissingFileError", "AmbiguousFileError",
)  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few megabytes that are made to cost gigabytes or hours: described or refused within seconds, in little memory."""
    monkeypatch.setattr(bombs, "SIZE", int(os.environ.get("CKPT_BOMB_BYTES", "1500000")))
    said, seconds, megabytes = measured(write(tmp_path, BOMBS[name]()))
    assert said == "read" or said.split(":")[0] in REFUSED, said
    assert (seconds < CPU_SECONDS, megabytes < MEGABYTES) == (True, True), (said, seconds, megabytes)


def test_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kilobytes that ask for gigabytes, one after another in one process: each is described or refused, or left as it is."""
    monkeypatch.setattr(bombs, "SIZE", 300_000)
    paths = [write(tmp_path, make(), name) for name, make in small_files.SMALL.items()]
    *rows, (_, _, megabytes) = measuring(ALL_MEASURED, *paths)
    assert [row for row in rows if row[0] not in ("read", *REFUSED) or row[2] > 2 * CPU_SECONDS] == []
    assert megabytes < 1.5 * MEGABYTES  # of all together


@pytest.mark.parametrize("name", ["row_62_most_pairs", "row_62_most_byte_strings", "row_62_most_globals"])
def test_what_is_small_in_a_pickle_counts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs, byte strings and globals once took up to 460 MB and 12 s in a file of ten megabytes; now they are counted."""
    monkeypatch.setattr(bombs, "SIZE", 9_900_000)
    said, seconds, megabytes = measured(write(tmp_path, BOMBS[name]()))
    assert said == "read" or said.startswith("LimitError"), said
    assert (seconds < 3 * CPU_SECONDS, megabytes < MEGABYTES) == (True, True), (said, seconds, megabytes)


CONVERTED = [
    "row_58_state_dicts_in_state_dicts", "row_60_laughs", "row_61_colliding_keys", "row_60_wide_list_shared",
    "row_60_calls_of_laughs", "row_60_calls_of_laughs_in_a_pickle",
]  # fmt: skip


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors"])
@pytest.mark.parametrize("name", CONVERTED)
def test_bombs_converted(name: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion does more with them, but not more than a few times as much; a call of a value is refused."""
    monkeypatch.setattr(bombs, "SIZE", 1_500_000)
    said, seconds, megabytes = measured(write(tmp_path, BOMBS[name]()), tmp_path / target)
    assert said == "read" or said.split(":")[0] in ("LimitError", "ContainerLimitError", "PickleError"), said
    assert (seconds < 4 * CPU_SECONDS, megabytes < 2 * MEGABYTES) == (True, True), (said, seconds, megabytes)


def test_limits_leave_room_for_a_hundred_thousand_tensors(tmp_path: Path) -> None:
    """What is large and real is no bomb: a hundred thousand small tensors, and as many names for one."""
    data = torch.zeros(100_000, 2)
    torch.save({f"layers.{index}.weight": row for index, row in enumerate(data)}, tmp_path / "many.pth")
    assert ckpt_tools.inspect(tmp_path / "many.pth").totals["tensors"] == 100_000
    torch.save({f"layers.{index}.weight": data for index in range(30_000)}, tmp_path / "tied.pth")
    assert len(ckpt_tools.inspect(tmp_path / "tied.pth").tied[0]) == 30_000


WHOLE = ["row_62_most_tensors", "row_60_one_tensor_in_a_list", "row_88_extra_fields"]


@pytest.mark.parametrize("name", WHOLE)
def test_every_command_answers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of nearly ten megabytes by the command line. `python -m tests.hostile.costs` does this for every bomb."""
    monkeypatch.setattr(bombs, "SIZE", 9_900_000)
    path = write(tmp_path, BOMBS[name]())
    for command in ("inspect", "check", "repair", "convert"):
        found = costs.cost(path, costs.COMMANDS[command])
        assert found.code in (0, 1, 3), (command, found)
        # three times the promise, which is for a machine that does nothing else
        assert (found.seconds < 3 * CPU_SECONDS, found.megabytes < MEGABYTES) == (True, True), (command, found)


# --- nothing runs

AUDITED = textwrap.dedent("""
    import json, os, sys
    import ckpt_tools
    good, *bad = sys.argv[1:]
    folder = os.path.join(os.path.dirname(good), "outputs")
    os.mkdir(folder)
    out = os.path.join(folder, "out.pth")
    OF_OUTPUTS = (
        "os.rename", "os.remove", "os.link", "os.chmod", "os.truncate", "fcntl.flock",
        "os.scandir", "os.listdir",  # for what a killed run left of this output: temporaries and journals
        "os.listxattr",  # for what a file that replaces another keeps of it
    )

    def work(path):
        for step in ("inspect", None, "keep", "plain", "drop"):
            try:
                if step == "inspect":
                    ckpt_tools.inspect(path)
                else:
                    ckpt_tools.convert(path, out, objects=step, overwrite=True)
            except ckpt_tools.CkptError:
                pass

    work(good)
    work(bad.pop(0))  # whatever our own code imports late, datetime for a date, is imported now
    events = []

    def hook(event, arguments):
        place = arguments[0] if arguments else None
        if event == "open" and isinstance(place, str):
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not writes or (place.startswith(os.path.join(folder, ".out.pth.")) and allowed):
                return
        if allowed and event in OF_OUTPUTS and (isinstance(place, int) or str(place).startswith(folder)):
            return
        if event.startswith(("object.__", "builtins.id", "gc.")):
            return
        events.append([event, repr(arguments)[:200]])

    allowed = False
    sys.addaudithook(hook)
    for path in bad:
        try:
            ckpt_tools.inspect(path)
        except ckpt_tools.CkptError:
            pass
    allowed = True
    for path in bad:
        work(path)
    print(json.dumps(events))
""")


def audited(good: Path, bad: list[Path]) -> list[Any]:
    """The audit events of a process that inspects and converts these files, beyond opening them and its own output."""
    command = [sys.executable, "-W", "error", "-c", AUDITED, str(good), *map(str, bad)]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr.decode()
    events: list[Any] = json.loads(done.stdout)
    return events


def test_nothing_runs(tmp_path: Path) -> None:
    """No import, no exec, no socket, no process, no file for writing, whatever a pickle asks for. Rows 46 to 52, 67, 68."""
    evil = tmp_path / "evil"
    date = p.dict_of(**{"a.w": p.tensor(), "x": p.call("datetime", "datetime", b"C\x0a\x07\xe8\x01\x01" + bytes(6))})
    bad = [write(tmp_path, torch_zip(p.pickle(date), FLOATS), "date.pth")]
    for number, (opcodes, _) in enumerate(CALLS.values()):
        value = opcodes.replace(b"touch /tmp/evil", b"touch " + str(evil).encode()[-9:].rjust(9, b"x"))
        body = p.dict_of(**{"a.w": p.tensor(), "x": value})
        bad.append(write(tmp_path, torch_zip(p.pickle(body), FLOATS), f"bad{number}.pth"))
    extra = {
        "ext": b"\x82\x01", "buffer": b"\x97", "nested": p.text(p.pickle(p.call("os", "system", p.text("true")))),
        "module": p.call("antigravity", "geohash"), "import": p.call("builtins", "__import__", p.text("this")),
        "numpy": p.call("numpy._core.multiarray", "_reconstruct", p.NONE), "build": p.tensor() + p.dict_of(x=p.NONE) + p.BUILD,
        "path": p.call("pathlib", "PosixPath", p.text("/etc/passwd")),
        "open": p.call("io", "open", p.text(str(evil)), p.text("w")), "load": p.call("torch", "load", p.text(str(evil))),
    }  # fmt: skip
    for name, value in extra.items():
        data = torch_zip(p.pickle(p.dict_of(**{"a.w": p.tensor(), "x": value})), FLOATS)
        bad.append(write(tmp_path, data, f"{name}.pth"))
    good = tmp_path / "good.pth"
    torch.save({"a.w": torch.zeros(2)}, good)
    assert audited(good, bad) == []
    assert not evil.exists()


def test_the_audit_sees_something(tmp_path: Path) -> None:
    """The test above can fail: torch.load of the same kind of file is seen."""
    path = write(tmp_path, torch_zip(p.pickle(p.call("builtins", "__import__", p.text("this"))), FLOATS))
    code = "import sys, torch\nseen = []\nsys.addaudithook(lambda event, _: seen.append(event))\n"
    code += f"torch.load({str(path)!r}, weights_only=False)\nassert 'import' in seen and 'pickle.find_class' in seen"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_dropping_in_a_deep_checkpoint_is_no_work_for_hours(tmp_path: Path) -> None:
    """Two thousand dicts in one another: whether a place lies in a dropped one is not asked anew of all above it."""
    deep = b"".join([b"}U\x01k"] * 2000) + b"}" + b"s" * 2000
    body = p.pickle(p.dict_of(**{"a.w": p.tensor(), "b.w": p.tensor(), "z": deep}))
    path = write(tmp_path, torch_zip(body, {"0": bytes(24)}))
    started = time.process_time()
    report = ckpt_tools.convert(path, tmp_path / "out.pth", drop=["b.*"])
    assert time.process_time() - started < CPU_SECONDS
    assert [place for place, _ in report.dropped] == ["b.w"]


def test_long_bytes_are_no_more_than_they_are(tmp_path: Path) -> None:
    """`torch.save` writes bytes as a call with a text: 6 MB of them, as a tokenizer may be, were too many objects."""
    torch.save({"a.w": torch.ones(2), "model": bytes(range(256)) * 23_000}, tmp_path / "in.pth")
    assert ckpt_tools.inspect(tmp_path / "in.pth").weights_only["loads"]


def test_what_is_written_is_within_the_limits_of_what_was_read(tmp_path: Path) -> None:
    """Short bytes cost as much in the protocol that they came in as in the one that is written."""
    torch.save({"a.w": torch.ones(2), "x": [b"%d" % number for number in range(500)]}, tmp_path / "in.pth", pickle_protocol=4)
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth")
    read = 0
    for most in range(500, 1500, 20):
        with limits.raised(containers=most):
            try:
                ckpt_tools.inspect(tmp_path / "in.pth")
            except LimitError:
                continue
            read += 1
            ckpt_tools.inspect(tmp_path / "out.pth")
    assert 0 < read < 50


PID = p.MARK + p.text("storage") + p.glob("torch", "FloatStorage") + p.text("0") + p.text("cpu") + b"K\x06t"
GIVEN_AGAIN = {
    "the id of a storage": (PID + p.put(5) + b"0", p.get(5) + p.PERSID),
    "the arguments of an array": (
        p.glob("numpy", "ndarray") + b"K\x00\x85C\x01b\x87" + p.put(5) + b"0" + p.glob("numpy.core.multiarray", "_reconstruct")
        + p.put(6) + b"0", p.get(6) + p.get(5) + p.REDUCE,
    ),
    "the arguments of a number": (
        b"NC\x01b\x86" + p.put(5) + b"0" + p.glob("numpy.core.multiarray", "scalar") + p.put(6) + b"0",
        p.get(6) + p.get(5) + p.REDUCE,
    ),
    "the class of ordered dicts": (p.glob("collections", "OrderedDict") + p.put(5) + b"0", p.get(5) + b")R"),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN_AGAIN)
def test_nothing_is_given_back_that_was_not_paid(name: str, tmp_path: Path) -> None:
    """A tensor gets back what naming its globals cost; what names them once and is used again and again pays each time."""
    before, unit = GIVEN_AGAIN[name]
    with limits.raised(containers=1000):
        for count, refused in ((20, False), (20_000, True)):
            body = p.pickle(p.dict_of(**{"a.w": p.tensor()}), before, p.EMPTY_LIST, p.MARK, unit * count, p.APPENDS, b"0")
            path = write(tmp_path, torch_zip(body, {"0": bytes(24)}))
            with pytest.raises(LimitError, match="more objects") if refused else contextlib.nullcontext():
                ckpt_tools.inspect(path)


@pytest.mark.parametrize("unit", [b"C\x02xy", p.get(5)])
def test_a_crowd_of_bytes_is_refused(unit: bytes, tmp_path: Path) -> None:
    """Millions of short bytes, or of places of one, took 380 MB and were written as what could not be read again."""
    before = b"B\x10\0\0\0" + bytes(16) + p.put(5) + b"0"
    body = p.pickle(p.dict_of(**{"a.w": p.tensor()}), before, b"0", p.EMPTY_LIST, p.MARK, unit * 300_000, p.APPENDS)
    with pytest.raises(LimitError, match="more objects"):
        ckpt_tools.inspect(write(tmp_path, torch_zip(body, {"0": bytes(24)})))


def test_texts_count_and_a_vocabulary_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of short texts took 410 MB: beyond 700,000, more than any vocabulary, each counts as a container."""
    words = {f"word{number}": f"token{number}" for number in range(1000)}
    torch.save({"a.w": torch.ones(2), "merges": words}, tmp_path / "in.pth")
    with limits.raised(containers=500):
        assert ckpt_tools.inspect(tmp_path / "in.pth").totals["tensors"] == 1
        monkeypatch.setattr(state, "FREE_LIGHT", 0)
        with pytest.raises(LimitError, match="more objects"):
            ckpt_tools.inspect(tmp_path / "in.pth")


def test_a_text_that_is_used_again_and_again_is_written_twice(tmp_path: Path) -> None:
    """Ten megabytes of references to one short text became a pickle of 340 MB, and took 1.4 GB of memory."""
    text, other = "k" * 60, "l" * 60
    value = [text, other, 1, None] * 500 + [text] * 1000 + [(text, other), {text: other}]
    torch.save({"a.w": torch.ones(2), "x": value}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", rename=[("a.", "b.")])
    assert torch.load(tmp_path / "out.pth", weights_only=True)["x"] == value
    assert (tmp_path / "out.pth").stat().st_size < 2 * (tmp_path / "in.pth").stat().st_size


def test_references_in_a_row_are_those_one_by_one() -> None:
    """A row of references is read at once: the same values and errors as by one opcode after another."""
    before = p.text("a") + p.put(0) + p.EMPTY_LIST + p.put(1) + p.ORDERED_DICT + p.put(200) + p.EMPTY_LIST + p.MARK
    row = [p.get(index % 2 * 200) for index in range(50)] + [p.get(1)] * 3
    at_once, apart = (Machine(p.pickle(before, part.join(row), p.APPENDS), MAKERS, str).load() for part in (b"", p.NONE))
    assert type(at_once) is type(apart) is List
    assert [type(item) for item in at_once.items] == [type(item) for item in apart.items if item is not None]
    assert at_once.items[-1] is at_once.items[-2]
    assert at_once.items[1] is at_once.items[3]
    with pytest.raises(PickleError, match="reads memo 7, which was never written"):
        Machine(p.pickle(before, *row, p.get(7), p.APPENDS), MAKERS, str).load()


def test_what_holds_nothing_is_not_walked() -> None:
    """Lists of tuples of empty lists are passed over by whoever looks for tensors, and those that hold a tensor are not."""
    empty, held = ((List(),), (Dict(),)), Object("none", Global("m", "C"), ())
    root = List([List([empty]), List([(empty, held)]), List([Dict([("a", 1)])]), *[List([(List(),)]) for _ in range(20)]])
    found = [where for where, _ in walk(root, plain=False)]
    assert found == [(), (1,), (1, 0), (1, 0, 1), (2,)]


def test_every_record_and_archive_counts(tmp_path: Path) -> None:
    """They take memory though they hold nothing: a made file may have no more of them than torch could write into its bytes."""
    for number in range(3):
        torch.save({"w": torch.ones(number)}, tmp_path / f"{number}.pth")
    several = tmp_path / "several.pth"
    several.write_bytes(b"".join((tmp_path / f"{number}.pth").read_bytes() for number in range(3)))
    with limits.raised(containers=200):
        ckpt_tools.inspect(several)
    with limits.raised(containers=5), pytest.raises(LimitError, match="more records than a file of its size"):
        ckpt_tools.inspect(tmp_path / "0.pth")
    said = set()
    for most in range(30, 100, 10):
        with limits.raised(containers=most), pytest.raises(LimitError) as caught:
            ckpt_tools.inspect(several)
        said.add("more archives" in caught.value.what)
    assert said == {True, False}


def test_every_array_counts(tmp_path: Path) -> None:
    """An array of a .npz takes what a tensor takes."""
    arrays: dict[str, Any] = {f"w{number}": np.float32(number) for number in range(10)}
    np.savez(tmp_path / "in.npz", **arrays)
    with limits.raised(containers=100):
        ckpt_tools.inspect(tmp_path / "in.npz")
    with limits.raised(containers=20), pytest.raises(LimitError, match="The limit is 20 dicts"):
        ckpt_tools.inspect(tmp_path / "in.npz")


@pytest.mark.parametrize("use", [ckpt_tools.stats, partial(ckpt_tools.check, values=True)], ids=["stats", "check"])
def test_the_tree_is_gone_when_numbers_are_looked_at(
    use: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes as much memory as a large tree: a file may not have both at once."""
    torch.save({"a.w": torch.ones(2, 2), "x": [list(range(1234))]}, tmp_path / "in.pth")
    seen = []

    def looking(real: Callable[..., Any]) -> Callable[..., Any]:
        def look(*given: Any) -> Any:
            seen.append(any(type(node) is List and len(node.items) == 1234 for node in gc.get_objects()))
            return real(*given)

        return look

    monkeypatch.setattr(counting.ValueCount, "take", looking(counting.ValueCount.take))
    monkeypatch.setattr(stats_of, "measure", looking(stats_of.measure))
    use(tmp_path / "in.pth")
    assert seen
    assert not any(seen)


def test_repair_has_one_tree_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is read back when the tree that it was made of is gone."""
    torch.save({"a.w": torch.ones(2, 2), "x": [list(range(1234))]}, tmp_path / "in.pth")
    seen = []

    def look(*given: Any) -> None:
        seen.append(sum(type(node) is List and len(node.items) == 1234 for node in gc.get_objects()))
        verification.verify(*given)

    monkeypatch.setattr("ckpt_tools.operations.repair.run.verify", look)
    ckpt_tools.repair(tmp_path / "in.pth", tmp_path / "out.pth")
    assert seen == [0]


def test_what_could_not_be_read_leaves_nothing_behind(tmp_path: Path) -> None:
    """The error of a pickle holds no frames: each would keep the machine that read it, in a circle."""
    path = tmp_path / "in.pth"
    path.write_bytes(p.pickle(p.call("os", "system", p.text("true")), b"\xff"))
    with contextlib.closing(Source(path)) as source:
        errors = [pickle.error for pickle in find_pickles(source).pickles]
    assert [(error and error.__traceback__, error and error.__context__) for error in errors] == [(None, None)]
    assert errors[0] is not None


def test_what_was_read_is_gone_when_the_verdict_reads_again(tmp_path: Path) -> None:
    """The error of a file that is refused held what had been read of it, while its pickles were read once more."""
    nodes = p.EMPTY_LIST + p.MARK + p.EMPTY_LIST * 3000 + p.APPENDS
    path = write(tmp_path, torch_zip(p.pickle(p.dict_of(w=p.tensor(), x=nodes)), FLOATS))
    with limits.raised(containers=1):
        with pytest.raises(LimitError) as caught:
            ckpt_tools.inspect(path)
        error = caught.value
        assert of_unreadable(path, error) is not None
    assert (error.__traceback__, error.__context__) == (None, None)


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors"])
def test_sets_in_sets_as_keys_are_not_made_plain_for_ever(target: str, tmp_path: Path) -> None:
    """Sixty frozen sets, each twice in the next, are 2^60 parts of a key once they are tuples."""
    path = write(tmp_path, BOMBS["row_61_frozensets_of_frozensets"]())
    with pytest.raises(LimitError, match="dict keys of more parts") as caught:
        ckpt_tools.convert(path, tmp_path / target, objects="plain")
    assert "limits.raised(paths=" in caught.value.fix


def test_repair_of_a_name_of_many_modules(tmp_path: Path) -> None:
    """Every module above a tensor is a path of its own: of a name with many dots they took gigabytes."""
    tensors = torch.nn.Linear(1, 1).state_dict()
    named = type(tensors)({"a." * 1200 + "weight": tensors["weight"]})
    setattr(named, "_metadata", {"": {"version": 1}})  # noqa: B010  which no stub knows
    torch.save(named, tmp_path / "in.pth")
    with pytest.raises(LimitError, match="A tensor's name has 1200 dots"):
        ckpt_tools.repair(tmp_path / "in.pth", tmp_path / "out.pth")
    with limits.raised(name_parts=2000):
        ckpt_tools.repair(tmp_path / "in.pth", tmp_path / "out.pth")
