"""`python -m tests.fuzz.readers`: C's unpickler without peek and with it, Python's own and torch's, beside `scan`.

All four read the same bytes with inert classes. Whatever one of them resolves or calls, `scan` shows, or the file is dangerous
or could not be examined.
"""

from __future__ import annotations

import argparse
import contextlib
import copyreg
import io
import itertools
import pickle
import re
import resource
import signal
import sys
import tempfile
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch._weights_only_unpickler as restricted

import ckpt_tools
from ckpt_tools.pickling.machine import python3_name
from tests.fuzz.opcode_programs import make_case
from tests.fuzz.worker import MEMORY, said, say
from tests.hostile.zips import torch_zip

_SECONDS, _MEMORY = 10, 3 << 30  # of one case, in which the hash of nested tuples may take for ever; of all
_LOADS = 5  # pickles one behind another, as torch reads them
_A_WORKER = 20_000
_MODULE = re.compile(r"[\w.+-]+")
_REAL = {
    ("collections", "OrderedDict"): OrderedDict, ("builtins", "set"): set, ("builtins", "frozenset"): frozenset,
    ("builtins", "str"): str, ("builtins", "tuple"): tuple, ("builtins", "list"): list,
}  # fmt: skip
_NAMES = set(restricted._get_allowed_globals())
_STORAGES = ("FloatStorage", "ByteStorage", "HalfStorage")  # torch imports nothing for these
_EXTENDED = ("models", "extended")
_OURS = ("models", "os")  # a call of anything in these is dangerous


class Record:
    """What a reader has resolved and done.

    Attributes:
        names: (module, name). dangers: what it did that makes a file dangerous. ended: how many pickles it read to their end.
    """

    def __init__(self) -> None:
        self.names: dict[tuple[str, str], None] = {}
        self.dangers: list[str] = []
        self.used: set[tuple[str, str]] = set()
        self.ended: set[tuple[str, str]] = set()

    def stub(self, module: str, name: str) -> Any:
        """What stands for a global: real where that is inert."""
        if not (_MODULE.fullmatch(module) and name) and name not in _STORAGES:
            raise ImportError(module)
        self.names[module, name] = None
        real = _REAL.get(python3_name(module, name))
        return real if real is not None else _Inert("Inert", (_Instance,), {"of": (module, name), "record": self})

    def note(self, of: tuple[str, str], how: str) -> None:
        """Something is done with a global, or with what was made of it."""
        self.used.add(of)
        if how == "changes" or (how == "calls" and of[0].partition(".")[0] in _OURS):
            self.dangers.append(f"{how} {of[0]}.{of[1]}")


class _Inert(type):
    """A class that does nothing when it is called or changed."""

    of: tuple[str, str]
    record: Record

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        cls.record.note(cls.of, "calls")
        return object.__new__(cls)  # type: ignore[arg-type]

    def __setitem__(cls, key: Any, value: Any) -> None:
        cls.record.note(cls.of, "changes")


class _Told:
    """A method, of an instance or of a class, that is told."""

    def __get__(self, instance: Any, owner: Any) -> Callable[..., None]:
        return lambda *_: owner.record.note(owner.of, "changes" if instance is None else "fills")


class _Instance:
    of: tuple[str, str]
    record: Record

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        cls.record.note(cls.of, "makes")
        return object.__new__(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.record.dangers.append(f"calls an instance of {self.of}")
        return object.__new__(type(self))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.record.note(self.of, "fills")

    __setstate__ = append = extend = add = _Told()


def _found(self: Any, module: str, name: str) -> Any:
    return self.record.stub(module, name)


def _held(self: Any, pid: Any) -> Any:
    """As torch has it: a class as it is, else a storage."""
    if isinstance(pid, tuple) and len(pid) > 1 and pid[0] in ("module", b"module"):
        return pid[1]
    if isinstance(pid, tuple) and pid and isinstance(pid[0], (_Inert, _Instance)):
        return pid[0]
    return _Inert("Inert", (_Instance,), {"of": ("torch.storage", "UntypedStorage"), "record": Record()})()


class _InC(pickle.Unpickler):
    find_class, persistent_load = _found, _held


class _InPython(pickle._Unpickler):
    find_class, persistent_load = _found, _held


def _load(kind: Any, file: Any, record: Record) -> None:
    reader = kind(file, buffers=itertools.repeat(bytearray(b"x")))
    reader.record = record
    reader.load()


class _Allowed(dict[str, Any]):
    """torch's table of names, of which each is a stub."""

    def __init__(self, names: set[str], record: Record) -> None:
        super().__init__(dict.fromkeys(names))
        self.record = record

    def __getitem__(self, name: str) -> Any:
        return self.record.stub(*name.rpartition(".")[::2])

    def values(self) -> Any:
        """Whatever is one of them."""
        return _Values()


class _Values:
    def __contains__(self, value: Any) -> bool:
        return isinstance(value, _Inert) or value in _REAL.values()


def _load_restricted(file: Any, record: Record) -> None:
    """torch's weights_only."""
    restricted._get_allowed_globals = lambda: _Allowed(_NAMES, record)  # type: ignore[assignment]
    reader = restricted.Unpickler(file, encoding="utf-8")
    reader.persistent_load = lambda pid: _held(None, pid)  # type: ignore[method-assign]
    reader.load()


class Readers:
    """The four. A name is the file that they read from, and how."""

    def __init__(self) -> None:
        with contextlib.suppress(ValueError):  # it has been added
            copyreg.add_extension(*_EXTENDED, 7)
        self.all: dict[str, tuple[Callable[[bytes], Any], Callable[[Any, Record], None]]] = {
            "C": (io.BytesIO, lambda file, record: _load(_InC, file, record)),
            "C with peek": (_with_peek, lambda file, record: _load(_InC, file, record)),
            "Python": (io.BytesIO, lambda file, record: _load(_InPython, file, record)),
            "torch": (io.BytesIO, _load_restricted),
        }

    def read(self, data: bytes, loads: int) -> Iterator[tuple[str, Record]]:
        """What each of them resolves and does."""
        for name, (opened, load) in self.all.items():
            record, file = Record(), opened(data)
            copyreg._extension_cache.clear()  # type: ignore[attr-defined]
            try:
                for _ in range(loads):
                    load(file, record)
                    record.ended |= set(record.names)
            except Exception:  # of any kind: it goes no further
                pass
            yield name, record


def _with_peek(data: bytes) -> Any:
    """A file that looks ahead, now and then only a few bytes."""
    return io.BufferedReader(io.BytesIO(data), 8192 if len(data) % 2 else 16)


def compare(path: Path, data: bytes, *, in_zip: bool, readers: Readers) -> str:
    """What a reader resolves or does and `scan` does not show; empty where there is nothing."""
    path.write_bytes(torch_zip(data) if in_zip else data)
    safety = ckpt_tools.scan(path)[0].safety
    if safety.verdict in ("dangerous", "unexamined"):
        return ""
    shown = {(name.module, name.name) for name in safety.names}
    shown |= {python3_name(*name) for name in shown}  # as torch's restricted one maps it, whatever the protocol
    shown |= {
        _EXTENDED for module, _ in shown if module == "copyreg"
    }  # `<extension 7>`: which one it is, is the program's to say
    for name, record in readers.read(data, 1 if in_zip else _LOADS):
        if record.dangers:
            return f"{name} {record.dangers[0]}, and it is {safety.verdict}"
        # a text may begin as a pickle: one that breaks, does not say what it is and has called nothing is none
        is_one = in_zip or re.match(rb"\x80[\0-\5]", data)
        resolved = [found for found in record.names if is_one or found in record.ended | record.used]
        for found in resolved:
            dotted = ".".join(found)
            if found[1] in _STORAGES and safety.verdict == "nothing":  # in front of what cannot be imported
                continue
            if found not in shown and python3_name(*found) not in shown and dotted not in map(".".join, shown):
                return f"{name} resolves {dotted}, and it is {safety.verdict}: {sorted(shown)}"
    return ""


def work(seed: int, first: int, count: int) -> None:
    """Try cases, and say in JSON lines which is next, and what was found."""
    warnings.simplefilter("ignore")
    readers = Readers()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        for number in range(first, first + count):
            data, in_zip = make_case(seed, number)
            say({"at": number})
            signal.alarm(_SECONDS)
            try:
                found = compare(Path(folder, "case"), data, in_zip=in_zip, readers=readers)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            signal.alarm(0)
            if found:
                say({"case": number, "found": found, "data": repr(data), "in_zip": in_zip})
    say({"done": count, "readings": count * len(readers.all)})


def main() -> int:
    """Workers one after another; exit code 1 when something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.readers", description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000, help="how many (20000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other cases")
    parser.add_argument("--first", type=int, default=0, help="the first case; with --cases 1 a finding is run again")
    options = parser.parse_args()
    first, last = options.first, options.first + options.cases
    total: Counter[str] = Counter()
    while first < last:
        count, at = min(_A_WORKER, last - first), first
        for row in said("tests.fuzz.readers", "work", options.seed, first, count):
            at = row.get("at", at)
            if "found" in row:
                total["findings"] += 1
                what = f"{row['found']}\n{row['data']} {row['in_zip']}"
                print(f"--seed {options.seed} --first {row['case']}: {what}", flush=True)
            elif "done" in row:
                total.update(cases=row["done"], readings=row["readings"])
                at = first + count
            elif "ended" in row and at < first + count:  # the hash of a key takes for ever, in C, where nothing else ends it
                total.update({"cases that were ended": 1, "cases": at - first, "readings": 4 * (at - first)})
                print(f"--seed {options.seed} --first {at}: ended", flush=True)
                at += 1
        first = at
        print(f"at {first}: {dict(total)}", flush=True)
    return 1 if total["findings"] else 0


if __name__ == "__main__":
    sys.exit(work(*map(int, sys.argv[2:])) if sys.argv[1:2] == ["work"] else main())  # type: ignore[func-returns-value]
