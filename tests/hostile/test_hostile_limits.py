"""What a file may hold, and that nothing in it runs; tests/hostile/bombs.py has those that are made to cost much."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools import limits
from ckpt_tools.errors import LimitError
from tests.hostile import pickles as p
from tests.hostile.pickles import CALLS
from tests.hostile.refusals import write
from tests.hostile.zips import torch_zip

ROOT = Path(ckpt_tools.__file__).parent.parent
FLOATS = {"0": bytes(24)}


def test_limits_leave_room_for_tens_of_thousands_of_tensors(tmp_path: Path) -> None:
    """What is large and real is no bomb: many small tensors, and nearly as many names for one; to a fifth of the limit."""
    data = torch.zeros(8_000, 2)
    torch.save({f"layers.{index}.weight": row for index, row in enumerate(data)}, tmp_path / "many.pth")
    torch.save({f"layers.{index}.weight": data for index in range(6_000)}, tmp_path / "tied.pth")
    with limits.raised(nodes=200_000):
        assert ckpt_tools.inspect(tmp_path / "many.pth").totals["tensors"] == 8_000
        assert len(ckpt_tools.inspect(tmp_path / "tied.pth").tied[0]) == 6_000


AUDITED = """
import json, os, sys
import ckpt_tools
from tests.fuzz.guard import ForbiddenError, Guard
from tests.support.commands import import_all

folder, *paths = sys.argv[1:]
out, found = os.path.join(folder, "out.pth"), []
import_all()
guard = Guard(folder)

def tried(work, *arguments, writing=False, **options):
    try:
        with guard.watching(writing=writing):
            work(*arguments, **options)
    except ckpt_tools.CkptError:
        pass
    except ForbiddenError as error:
        found.append(str(error))

for path in paths:  # whatever our own code imports late, datetime for a date, is imported by the first
    guard.armed = path not in paths[:3]
    tried(ckpt_tools.inspect, path)
    for objects in (None, "keep", "plain", "drop"):
        tried(ckpt_tools.convert, path, out, objects=objects, overwrite=True, writing=True)
print(json.dumps(found))
"""


def audited(folder: Path, paths: list[Path]) -> list[Any]:
    """What a process that inspects and converts these files does beyond opening them and writing its own output."""
    command = [sys.executable, "-c", AUDITED, str(folder), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr.decode()
    events: list[Any] = json.loads(done.stdout)
    return events


def test_nothing_runs(tmp_path: Path) -> None:
    """No import, no exec, no socket, no process, no file for writing, whatever a pickle asks for. Rows 46 to 52, 67, 68."""
    evil = tmp_path / "evil"
    date = p.dict_of(**{"a.w": p.tensor(), "x": p.call("datetime", "datetime", b"C\x0a\x07\xe8\x01\x01" + bytes(6))})
    bad = [write(tmp_path, torch_zip(p.pickle(date), FLOATS), "date.pth"), write(tmp_path, torch_zip(b"", FLOATS), "empty.pth")]
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
    torch.save({"a.w": torch.zeros(2)}, tmp_path / "good.pth")
    (tmp_path / "outputs").mkdir()
    assert audited(tmp_path / "outputs", [tmp_path / "good.pth", *bad]) == []
    assert not evil.exists()


def test_dropping_in_a_deep_checkpoint_is_no_work_for_hours(tmp_path: Path) -> None:
    """Two thousand dicts in one another: whether a place lies in a dropped one is not asked anew of all above it."""
    deep = b"".join([b"}U\x01k"] * 2000) + b"}" + b"s" * 2000
    body = p.pickle(p.dict_of(**{"a.w": p.tensor(), "b.w": p.tensor(), "z": deep}))
    path = write(tmp_path, torch_zip(body, {"0": bytes(24)}))
    started = time.process_time()
    report = ckpt_tools.convert(path, tmp_path / "out.pth", drop=["b.*"])
    assert time.process_time() - started < 5
    assert [place for place, _ in report.dropped] == ["b.w"]


def test_long_bytes_are_no_more_than_they_are(tmp_path: Path) -> None:
    """`torch.save` writes bytes as a call with a text: 6 MB of them, as a tokenizer may be, were too many objects."""
    torch.save({"a.w": torch.ones(2), "model": bytes(range(256)) * 23_000}, tmp_path / "in.pth")
    assert ckpt_tools.inspect(tmp_path / "in.pth").weights_only["loads"]


def test_a_text_that_is_used_again_and_again_is_written_twice(tmp_path: Path) -> None:
    """Ten megabytes of references to one short text became a pickle of 340 MB, and took 1.4 GB of memory."""
    text, other = "k" * 60, "l" * 60
    value = [text, other, 1, None] * 500 + [text] * 1000 + [(text, other), {text: other}]
    torch.save({"a.w": torch.ones(2), "x": value}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", rename=[("a.", "b.")])
    assert torch.load(tmp_path / "out.pth", weights_only=True)["x"] == value
    assert (tmp_path / "out.pth").stat().st_size < 2 * (tmp_path / "in.pth").stat().st_size


def test_every_record_and_archive_counts(tmp_path: Path) -> None:
    """They take memory though they hold nothing: a made file may have no more of them than torch could write into its bytes."""
    for number in range(3):
        torch.save({"w": torch.ones(number)}, tmp_path / f"{number}.pth")
    several = tmp_path / "several.pth"
    several.write_bytes(b"".join((tmp_path / f"{number}.pth").read_bytes() for number in range(3)))
    ckpt_tools.inspect(several)
    with limits.raised(records=5), pytest.raises(LimitError, match="lists 7 records"):
        ckpt_tools.inspect(tmp_path / "0.pth")
    with limits.raised(records=2), pytest.raises(LimitError, match="more archives"):
        ckpt_tools.inspect(several)
