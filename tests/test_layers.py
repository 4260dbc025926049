"""Imports fall one way, heavy libraries stay behind their doors, and the public names are pinned."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt_tools

PACKAGE = Path(ckpt_tools.__file__).parent

# From the bottom up: a module may import from its own layer's packages and from those below.
LAYERS = [
    ["errors", "dtypes", "crc", "_version"],
    ["limits", "names", "processes", "ranks", "temporaries", "journal", "findings"],
    ["files"],
    ["sources", "staging", "remote", "uploads"],
    ["plan", "cloning"],
    ["tree", "pipeline"],
    ["writer", "numeric", "counting"],
    ["assembly"],
    ["pickling"],
    ["containers"],
    ["modules"],
    ["checkpoint"],
    ["transforms", "losses", "partitions", "plain", "plain_keys", "plain_values", "measures"],
    ["casts", "flatten", "draws", "compaction", "slimming"],
    ["targets", "sides", "contents"],
    ["match"],
    ["plans", "renames"],
    ["plan_files"],
    ["initialisers"],
    ["adaptation", "choices"],
    ["fit"],
    ["retarget"],
    ["converted"],
    ["name_edits", "object_policy"],
    ["describe", "conversion", "difference_report", "differences", "tensor_stats", "sharding", "dcp_items", "matching"],
    ["dcp_saving"],
    ["folder_conversion"],
    ["checking"],
    ["repairing"],
    ["convert", "averaging", "inplace"],
    ["torch", "render"],
    ["cli"],
    ["__init__", "__main__"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def part_of(path: Path) -> str:
    """The layer's name for a module file."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """The parts of ckpt_tools that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ckpt_tools":
            names = node.module.split(".")[1:2] or [alias.name for alias in node.names]
            found.update(names)
        elif isinstance(node, ast.Import):
            found.update(alias.name.split(".")[1] for alias in node.names if alias.name.startswith("ckpt_tools."))
    return {name for name in found if name in RANK}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_fall_one_way(path: Path) -> None:
    """A module imports only from its own layer or from below it."""
    part = part_of(path)
    assert part in RANK, f"{part} is in no layer: give it one"
    above = {name for name in imported_parts(path) if RANK[name] > RANK[part]}
    if part == "__init__" or part == "cli":
        return
    assert not above, f"{part} imports {above} from above"


def test_train_is_never_imported_back() -> None:
    """The package does not know the training core, which is not in the wheel."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert "from train" not in text
        assert "import train" not in text


def test_public_names() -> None:
    """What `from ckpt_tools import *` gives is pinned, sorted and there."""
    assert ckpt_tools.__all__ == [
        "Averaged",
        "Checked",
        "Checkpoint",
        "CkptError",
        "Converted",
        "Description",
        "Difference",
        "Repaired",
        "Stats",
        "__version__",
        "average",
        "check",
        "convert",
        "diff",
        "edit_in_place",
        "inspect",
        "open_checkpoint",
        "repair",
        "stats",
    ]
    assert all(getattr(ckpt_tools, name) is not None for name in ckpt_tools.__all__)
    assert callable(ckpt_tools.convert)


def fresh(code: str, *arguments: str) -> str:
    """The output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


TORCH_FREE = [
    "import ckpt_tools; ckpt_tools.convert, ckpt_tools.inspect",
    "import ckpt_tools.cli",
    "from ckpt_tools.cli import main; main(['--help'], standalone_mode=False)",
    "from ckpt_tools.cli import main; main(['inspect', FILE], standalone_mode=False)",
    "from ckpt_tools.cli import main; main(['inspect', '--json', FILE], standalone_mode=False)",
    "from ckpt_tools.cli import main; main(['convert', FILE, OUT, '--strip-module'], standalone_mode=False)",
    "from ckpt_tools.cli import main; main(['convert', FILE, OUT + '.safetensors', '--unwrap'], standalone_mode=False)",
]


@pytest.mark.parametrize("code", TORCH_FREE)
def test_torch_is_not_imported(code: str, wrapped_file: Path, tmp_path: Path) -> None:
    """Importing, --help, inspect and a convert without value work leave torch and numpy alone."""
    before = f"import sys; FILE, OUT = {str(wrapped_file)!r}, {str(tmp_path / 'out')!r}\ntry:\n    "
    after = "\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
    output = fresh(before + code + after + "print(*[m for m in ('torch', 'numpy', 'safetensors') if m in sys.modules])")
    assert output.splitlines()[-1] == ""


def test_inspect_imports_little() -> None:
    """`ckpt inspect --json` loads neither rich nor what only convert needs."""
    code = "import sys, ckpt_tools.cli; print(*sorted(m for m in sys.modules if m.startswith('ckpt_tools') or m == 'rich'))"
    loaded = set(fresh(code).split())
    assert not loaded & {
        "rich",
        "ckpt_tools.render.text",
        "ckpt_tools.operations.convert.conversion",
        "ckpt_tools.io.writer",
        "ckpt_tools.values.numeric",
    }
