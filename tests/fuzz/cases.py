"""One case: a mutated file from a seed and a number, and everything that must hold when it is read and converted."""

from __future__ import annotations

import contextlib
import os
import shutil
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import ckpt_tools
from ckpt_tools import CkptError
from ckpt_tools.render.description import View, print_description
from ckpt_tools.render.json import line
from ckpt_tools.render.text import Page
from tests.fuzz import frameworks, headers, oracle, others, pickles, raw, tars, zips
from tests.fuzz.guard import MEGABYTES, FindingError, ForbiddenError, Guard, TooSlowError

_CONVERSIONS = (
    ("out.pth", {"objects": "plain"}), ("out.pth", {"objects": "keep"}), ("out.pth", {"objects": "drop"}),
    ("out.safetensors", {"objects": "plain"}), ("out.pth", {"objects": "plain", "strip_module": True}),
    ("out.pth", {"objects": "plain", "dtype": "fp16"}), ("out.safetensors", {"objects": "plain", "add_prefix": "x."}),
)  # fmt: skip


_OTHERS = 1 / 5  # of the cases
# what an oracle says of a file that was loaded, or that it did not ask about
_NOT_ASKED = (
    "TypeError: a DTensor", "RecursionError: the object has no end", "TooSlowError", "MemoryError",
    "an archive of more than arrays",
)  # fmt: skip


class Cases:
    """Makes and tries cases.

    Args:
        samples: name -> good file. seed: makes the cases of two runs differ. folder: for the files, best in memory.
        guard: watches while our code runs. asking: told who gets a file, "torch" and then "us" again: who dies is known.
        only: samples and kinds of other inputs with this in their names, and no others.
    """

    def __init__(
        self, samples: dict[str, bytes], seed: int, folder: Path, guard: Guard,
        asking: Callable[[str], None] = lambda _: None, only: str = "",
    ) -> None:  # fmt: skip
        self.names, self.samples, self.seed = [name for name in samples if only in name], samples, seed
        self.kinds = [kind for kind in others.KINDS if only in kind.__name__]
        self.folder, self.guard, self.asking = folder, guard, asking
        self.counts = Counter[str]()

    def make(self, number: int) -> tuple[str, bytes]:
        """The name of the sample and the mutated bytes of a case."""
        rng = Random(f"{self.seed}:{number}")
        name, other = rng.choice(self.names), rng.choice(self.names)
        data = self.samples[name]
        for _ in range(rng.choice((1, 1, 1, 1, 2))):
            data = _mutated(rng, name, data, self.samples[other])
        return name, data

    def try_one(self, number: int, *, convert: bool) -> None:
        """Make and try a case; FindingError says what went wrong."""
        for left in self.folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        rng = Random(f"{self.seed}:{number}:other")
        self.counts["cases"] += 1
        if self.kinds and (rng.random() < _OTHERS or not self.names):  # no checkpoint: our own error, or nothing at all
            kind = rng.choice(self.kinds)
            use = kind(rng, self.folder)
            with self._watched(kind.__name__, writing=True, asking=True):
                self._done("read", use)
            return
        name, data = self.make(number)
        path = self.folder / f"case{'.safetensors' if name.endswith('.safetensors') else '.pth'}"
        path.write_bytes(data)
        rows = self._read(path, render=convert)
        if convert:
            with self._watched("check"):  # it tells what is wrong in a report, and reads every byte to do so
                ckpt_tools.check(path, values=True, digest=True)
            if rows is not None:
                self._convert(path, number)
            self._repair(path)
            if rows is not None and self._edit_in_place(path):
                rows, data = self._read(path, render=False), path.read_bytes()
        if rows is not None:
            self._compare(path, rows, data)

    @contextlib.contextmanager
    def _watched(self, what: str, *, writing: bool = False, asking: bool = False) -> Iterator[None]:
        """Any exception is a finding; running out of memory, out of time, and what is forbidden are too."""
        try:
            with self.guard.watching(writing=writing, asking=asking):
                yield
        except FindingError:
            raise
        except MemoryError:
            raise FindingError(f"{what}: more than {MEGABYTES} MB of memory") from None
        except (Exception, ForbiddenError, TooSlowError) as error:
            raise FindingError(f"{what}: {type(error).__name__}: {error}") from error

    def _done(self, counted: str, call: Callable[[], object]) -> bool:
        """Whether a call did its work; where it refuses, the error is one of ours with a proper message."""
        try:
            call()
        except CkptError as error:
            if type(error) is CkptError or not error.what or len(str(error)) > 4000:
                raise FindingError(f"without a proper message: {type(error).__name__}: {str(error)[:200]}") from None
            self.counts["refused"] += 1
            return False
        self.counts[counted] += 1
        return True

    def _read(self, path: Path, *, render: bool) -> list[oracle.Row] | None:
        """Our rows, None when we refuse the file."""
        found: list[ckpt_tools.Description] = []
        with self._watched("inspect"):
            if not self._done("read", lambda: found.append(ckpt_tools.inspect(path))):
                return None
            document = line(found[0].to_json())
        if render:
            _check_document(document, found[0])
        return found[0].tensors

    def _convert(self, path: Path, number: int) -> None:
        name, options = _CONVERSIONS[number % len(_CONVERSIONS)]
        what, target = f"convert {options} to {name}", self.folder / name
        with self._watched(what, writing=True):
            done = self._done("converted", lambda: ckpt_tools.convert(path, target, overwrite=True, **options))
            rows = ckpt_tools.inspect(target).tensors if done else []
        if done:
            theirs = self._patient(oracle.torch_rows if name.endswith(".pth") else oracle.safetensors_rows, target)
            must_load = options["objects"] == "plain" or name.endswith(".safetensors")
            if isinstance(theirs, str) and must_load and not _is_nonsense(theirs, self._patient(oracle.torch_rows, path)):
                raise FindingError(f"{what} wrote what cannot be loaded: {theirs}")
            if not isinstance(theirs, str) and name.endswith(".pth") and (said := oracle.difference(rows, theirs)):
                raise FindingError(f"{what}, read again: {said}")
            target.unlink()
        self._check_nothing_left(path)

    def _repair(self, path: Path) -> None:
        """What `repair` writes can be read; it leaves the input alone."""
        before, target = path.read_bytes(), self.folder / "repaired.pth"
        with self._watched("repair", writing=True):
            if self._done("repaired", lambda: ckpt_tools.repair(path, target, keep_damaged=len(before) % 2 == 0)):
                ckpt_tools.inspect(target)
        target.unlink(missing_ok=True)
        self._check_nothing_left(path)
        if path.read_bytes() != before:
            raise FindingError("repair changed its input")

    def _edit_in_place(self, path: Path) -> bool:
        """An edit that is refused changes nothing; one that is done leaves nothing beside it, and a file that can be read."""
        before, options = path.read_bytes(), dict[str, Any](add_prefix="module.", map_location="cpu")
        with self._watched("an edit in place", writing=True):
            done = self._done("edited", lambda: ckpt_tools.edit_in_place(path, objects="keep", **options))
            if done:
                ckpt_tools.inspect(path)
            elif path.read_bytes() != before:
                raise FindingError("an edit in place that was refused changed the file")
        self._check_nothing_left(path)
        return done

    def _check_nothing_left(self, path: Path) -> None:
        left = [name for name in os.listdir(self.folder) if name != path.name]
        if left:
            raise FindingError(f"convert left {left}")

    def _patient(self, look: Callable[[Path], list[oracle.Row] | str], path: Path) -> list[oracle.Row] | str:
        """What an oracle says, if it says it in time."""
        self.asking("torch")
        try:
            with self.guard.hurrying():
                return look(path)
        except TooSlowError as error:
            return f"TooSlowError: {error}"
        finally:
            self.asking("us")

    def _compare(self, path: Path, rows: list[oracle.Row], data: bytes) -> None:
        """What torch, safetensors or NumPy loads of a file that we read, we list the same."""
        for look in oracle.loaders(data):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = self._patient(look, path)
            if isinstance(theirs, str):
                if look is not oracle.pickle_rows:
                    self._check_unhealthy(path, theirs)
                continue
            self.counts["compared"] += 1
            if not _aliases(rows, theirs, data):
                self._agree(path, rows, theirs, look.__name__)

    def _check_unhealthy(self, path: Path, refusal: str) -> None:
        """What torch, safetensors or NumPy refuses is not called healthy, where we say that it loads."""
        self.counts["asked"] += 1
        with self._watched("check"):
            loads, healthy = ckpt_tools.inspect(path).weights_only["loads"], ckpt_tools.check(path).exit_code == 0
        if loads and healthy and not refusal.startswith(_NOT_ASKED):
            raise FindingError(f"check calls healthy what does not load: {refusal[:300]}")

    def _agree(self, path: Path, rows: list[oracle.Row], theirs: list[oracle.Row], loader: str) -> None:
        """Names, shapes, dtypes, views and values are the same."""
        if loader in oracle.UNORDERED:
            rows, theirs = (sorted(found, key=lambda row: str(row["where"])) for found in (rows, theirs))
        if said := oracle.difference(rows, theirs):
            if not first_of_several(path, rows, theirs):
                raise FindingError(f"inspect, beside {loader}: {said}")
            return
        with self._watched("check"):
            found = ckpt_tools.check(path, digest=True).digests
        told = Counter(digest.where for digest in found)  # keys that are tensors have one path
        digests = {digest.where: digest.sha256 for digest in found if told[digest.where] == 1}
        for row, other in zip(oracle.comparable(rows, theirs), theirs, strict=True):
            mine = digests.get(tuple(row["where"]))
            if mine is not None and mine != other.get("sha256", mine):
                raise FindingError(f"values, beside {loader}: {row['where']} has other bytes")


def _aliases(rows: list[oracle.Row], theirs: list[oracle.Row], data: bytes) -> bool:
    """Whether there are more rows than safetensors has, because we put tied names back."""
    return len(rows) != len(theirs) and b"ckpt_tools.aliases" in data


def first_of_several(path: Path, rows: list[oracle.Row], theirs: list[oracle.Row]) -> bool:
    """Whether we list several archives of one file, as we should, and torch the first of them, as we say."""
    if ckpt_tools.inspect(path).container != "dcp-part":
        return False
    first = [{**row, "where": row["where"][1:]} for row in rows if row["where"][0] == 0]
    return not oracle.difference(first, theirs)


def _mutated(rng: Random, name: str, data: bytes, other: bytes) -> bytes:
    """The mutation that the format suggests; now and then one that knows nothing of it."""
    pick = rng.random()
    try:
        if pick < 0.12:
            return raw.mutate(rng, data, other)
        if pick < 0.22:
            return raw.splice(rng, data, other)
        if data.startswith(b"PK"):
            return zips.mutate(rng, data, other if other.startswith(b"PK") else data)
        if data[8:9] == b"{" and name.endswith(".safetensors"):
            return headers.mutate(rng, data, other)
        if data[257:262] == b"ustar":
            return tars.mutate(rng, data, other)
        if data.startswith(b"\x93NUMPY"):
            return headers.mutate_npy(rng, data)
        if frameworks.is_one(data, name):
            return frameworks.mutate(rng, data, other)
        if data.startswith(b"\x80"):
            return pickles.mutate(rng, data, other)
    except Exception:
        return raw.mutate(rng, data, other)
    return raw.mutate(rng, data, other)


def _is_nonsense(output: str, before: list[oracle.Row] | str) -> bool:
    """Whether the input asks for it: torch takes every opcode and global of the output, and trips over the arguments of a call.

    Such a call stands in the input already; torch refuses that too, perhaps for something that comes before it.
    """
    return isinstance(before, str) and not output.startswith("UnpicklingError")


def _check_document(document: str, found: ckpt_tools.Description) -> None:
    """The page for people holds nothing that steers a terminal."""
    out = Page()
    print_description(found, View(), out)
    bad = {character for character in out.text if unicodedata.category(character) in ("Cc", "Cf", "Cs") and character != "\n"}
    if bad or not document.isascii() or not document.isprintable():
        raise FindingError(f"control characters reach the terminal: {sorted(map(hex, map(ord, bad)))}")
