"""Whatever is imported from elsewhere is declared in pyproject.toml, where whoever installs it gets it."""

import ast
import functools
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
BY_HAND = ROOT / "fixtures" / "makers"  # each runs in an environment of its own, which it describes
OURS = {"ckpt_tools", "train", "tests", "fixtures", "docs"}
HOMES = packages_distributions()


def declared(*extras: str) -> set[str]:
    """The distributions that are installed with these extras, by their normal names."""
    wanted = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    return {normal(re.split(r"[\[<>=~!; ]", line)[0]) for line in wanted}


def normal(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def imported(folder: str) -> list[tuple[str, str]]:
    """The packages that the modules of a folder import from elsewhere, and where."""
    found = []
    for path in sorted(set((ROOT / folder).rglob("*.py")) - set(BY_HAND.rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            for name in (name.partition(".")[0] for name in names):
                if name not in sys.stdlib_module_names and name not in OURS:
                    found.append((name, str(path.relative_to(ROOT))))
    return found


def test_no_class_is_a_generic_of_click() -> None:
    """`class X(click.Choice[str])` fails at import with click 8.1, which pyproject.toml allows."""
    for path in (ROOT / "ckpt_tools").rglob("*.py"):
        code = path.read_text("utf-8")
        for node in ast.walk(ast.parse(code)) if "import click" in code else []:
            for base in node.bases if isinstance(node, ast.ClassDef) else []:
                assert not (isinstance(base, ast.Subscript) and "click." in ast.unparse(base.value)), path


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("ckpt_tools", ["keras", "dev"]), ("train", ["train"]), ("fixtures", ["dev"]),
        ("tests", ["dev", "train"]),
        ("docs", ["dev", "docs"]),
    ],
)  # fmt: skip
def test_what_is_imported_is_declared(folder: str, extras: list[str]) -> None:
    """Each package that a folder imports is a dependency, or in the extra that the folder is for."""
    known = declared(*extras)
    assert imported(folder)
    for name, where in imported(folder):
        assert known & {normal(home) for home in HOMES.get(name, [name])}, f"{where} imports {name}"


def test_the_library_needs_no_extra() -> None:
    """Without extras all is there but h5py and gguf (with NumPy), cryptography, pytest (a plugin)."""
    missing = {
        name for name, _ in imported("ckpt_tools") if not declared() & {normal(home) for home in HOMES.get(name, [name])}
    }
    assert missing == {"h5py", "gguf", "numpy", "cryptography", "pytest"}
