"""README and docs are executed: every command prints what the page says it prints, the README's Python runs."""

import contextlib
import html
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools.torch
from docs import pictures
from tests.support.attention import Old
from tests.support.commands import ckpt
from tests.support.job import job
from tests.support.terminal import installed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ckpt_tools"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    example
    for page in PAGES
    for example in re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", page.read_text(), re.DOTALL)
]
BLOCKS = [block for page in PAGES for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the checkpoints that the pages talk about."""
    for name in ("ddp.pth", "single.pth", "training.pth"):
        shutil.copy(ROOT / "fixtures" / name, tmp_path / name)
        (tmp_path / "fixtures").mkdir(exist_ok=True)
        shutil.copy(ROOT / "fixtures" / name, tmp_path / "fixtures" / name)
    shutil.copy(ROOT / "tests" / "support" / "attention.py", tmp_path)
    torch.save(Old().state_dict(), tmp_path / "alpha.pth")
    shutil.copytree(ROOT / "fixtures" / "lora" / "plain", tmp_path / "adapter")
    base = ROOT / "fixtures" / "lora" / "base.safetensors"
    shutil.copy(base, tmp_path)
    save_file(
        load_file(base) | load_file(ROOT / "fixtures" / "lora" / "conv" / "merged.safetensors"), tmp_path / "tuned.safetensors"
    )
    return tmp_path


def run_python(code: str, names: dict[str, object]) -> str:
    """What a block prints, and the error that ends it."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, "page", "exec"), names)
    except Exception as error:
        return f"{out.getvalue()}{type(error).__name__}: {error}"
    return out.getvalue()


def run_command(line: str) -> str:
    """What a command prints, errors included, as on a terminal 1000 columns wide."""
    return ckpt(*shlex.split(line.removeprefix("ckpt ")), code=None).output


def without_time(text: str) -> str:
    return re.sub(r"^(time +).*$", r"\1", text, flags=re.MULTILINE).strip()


@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[0] for block in BLOCKS])
def test_commands_print_what_is_shown(block: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, _, shown = block.removeprefix("$ ").partition("\n")
    monkeypatch.chdir(folder)
    assert without_time(run_command(command)) == without_time(shown)


@pytest.mark.parametrize(("code", "shown"), EXAMPLES, ids=[code.splitlines()[-1] for code, _ in EXAMPLES])
def test_python_prints_what_is_shown(code: str, shown: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python block of a page runs as written, without a warning, and prints the block below it."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_python(code, {"__name__": "__main__"}).strip() == shown.strip()


def test_links_lead_somewhere() -> None:
    """Every relative link of the README, its companions and the docs names a file that is there."""
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_docs_are_short() -> None:
    """At most 20,000 words, tables' bars among them; what changed has a page of its own."""
    pages = (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md")
    assert sum(len(page.read_text("utf-8").split()) for page in pages) <= 20_000


MENDED = {  # what the README's table names -> a file that PyTorch says such a thing about
    "ckpt convert IN OUT --unwrap": "compiled_parallel.pth", "ckpt convert IN OUT --map-location cpu": "cuda.pth",
    "ckpt convert IN OUT --objects plain": "whole_module.pth", "ckpt repair IN OUT": "cut.pth", "ckpt check IN": "ddp.pth",
}  # fmt: skip


@pytest.mark.parametrize("command", re.findall(r"^\|.*\| `(ckpt [^`]*)`", PAGES[0].read_text(), re.MULTILINE))
def test_what_mends_it_does(command: str, tmp_path: Path) -> None:
    """Each command of the README's table makes of a file with that problem one that loads on the CPU."""
    source, target = tmp_path / "in.pth", tmp_path / "out.pth"
    name = MENDED[command]
    whole = (ROOT / "fixtures" / name.replace("cut", "single")).read_bytes()
    source.write_bytes(whole[:-2000] if name == "cut.pth" else whole)
    done = run_command(command.replace("IN", str(source)).replace("OUT", str(target)))
    if "OUT" not in command:
        assert "  ckpt convert " in done
        return
    names = list(torch.load(target, weights_only=True))
    assert names
    assert "--unwrap" not in command or not any(name.startswith(("module.", "_orig_mod.")) for name in names)


@pytest.mark.parametrize("name", pictures.COMMANDS)
def test_pictures_show_what_commands_print(name: str) -> None:
    """Each terminal of docs/images has the lines that its command prints now (else: make pictures), and is in some page."""
    text = (pictures.IMAGES / f"{name}.svg").read_text("utf-8")
    rows: dict[float, list[tuple[float, str]]] = {}
    for x, y, words in re.findall(r'<text [^>]*x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', text):
        rows.setdefault(float(y), []).append((float(x), html.unescape(words).replace("\xa0", " ")))
    found = "".join(words for _, row in sorted(rows.items()) for _, words in sorted(row))
    command = pictures.COMMANDS[name]
    expected = f"$ {command}\n" + re.sub(r"\x1b\[[\d;]*m", "", pictures.shown(command))
    assert "".join(found.split()) == "".join(expected.split())  # rich leaves blanks between colours out, and wraps
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}  # nothing is loaded from anywhere
    assert any(f"(images/{name}.svg)" in page.read_text() for page in PAGES)


@pytest.mark.parametrize("package", [ckpt_tools, ckpt_tools.torch], ids=["ckpt_tools", "ckpt_tools.torch"])
def test_the_library_reference_has_every_public_name(package: ModuleType) -> None:
    """Each public name has its entry, taken from the place where the name is defined."""
    page = (ROOT / "docs" / "reference" / "library.md").read_text()
    homes = {
        heading: place for place, heading in re.findall(r"^::: (\S+)\n    options:\n      heading: (\S+)$", page, re.MULTILINE)
    }
    for name in package.__all__:
        if name != "__version__" and (package is ckpt_tools.torch or name not in ckpt_tools.torch.__all__):
            module, _, attribute = homes[f"{package.__name__}.{name}"].rpartition(".")
            assert getattr(import_module(module), attribute) == getattr(package, name)


@pytest.mark.skipif(os.name == "nt", reason="torchrun with gloo")
def test_the_tutorial_goes_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands, one after another in one folder, train on two processes and print what is shown; `...` is anything."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "tutorial.md").read_text().partition("## Train\n")[2]
    scripts = {}
    for kind, body, shown in re.findall(r"```(sh|py)\n(.*?)```(?:\n\n```text\n(.*?)```)?", page, re.DOTALL):
        if kind == "py" and not shown:
            scripts["load.py"] = body
            continue
        program, *arguments = shlex.split(body) if kind == "sh" else ("python", "-c")
        if program == "torchrun":
            option, count, _, module, *rest = arguments
            done = job(int(count), module, *rest, cwd=tmp_path)
            assert (option, done.returncode) == ("--nproc-per-node", 0), done.stderr
        elif program == "ckpt":
            printed = re.sub(r"^time +.*\n", "", run_command(body), flags=re.MULTILINE)
        else:
            monkeypatch.setattr(sys, "argv", arguments)
            printed = run_python(scripts.get(arguments[0], body), {})
        expected = ".*".join(map(re.escape, shown.strip().split("...\n\n")))
        assert not shown or re.fullmatch(expected, printed.strip(), re.DOTALL), f"{body}\n{printed}"


@pytest.mark.skipif(not shutil.which("git") or os.name == "nt", reason="git and a shell are needed")
def test_the_git_recipe_works_as_written(tmp_path: Path) -> None:
    """In a new repository with the page's own commands, git diff shows the tensor that changed, and only that."""
    (recipe,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "compare.md").read_text(), re.DOTALL)
    repository = tmp_path / "repository"
    repository.mkdir()
    environment = installed(tmp_path / "bin") | {"HOME": str(tmp_path), "GIT_CONFIG_GLOBAL": os.devnull}

    def shell(script: str) -> str:
        command = ["sh", "-ec", script]
        return subprocess.run(command, capture_output=True, text=True, cwd=repository, check=True, env=environment).stdout

    shell("git init -q . && git config user.name a && git config user.email a@example.org")
    shell(recipe)
    torch.save({"a.weight": torch.ones(2, 3), "b.weight": torch.ones(4)}, repository / "model.pth")
    shell("git add -A && git commit -qm first")
    torch.save({"a.weight": torch.ones(2, 3), "b.longer.weight": torch.ones(4)}, repository / "model.pth")
    diff = shell("git diff -U0")
    changed = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert changed == ["-b.weight 4 float32 cpu 16 B", "+b.longer.weight 4 float32 cpu 16 B"], diff


def test_contributing_leads_to_places_that_are_there() -> None:
    """Every file, folder and name in the table "Where does it go?" exists, and each name stands in a file of its row."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## Where does it go?")[2].partition("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ")][2:]
    assert len(rows) > 5
    for row in rows:
        paths = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.\w+)?)`", row)
        folders = [path for path in paths if path.endswith("/")]
        paths += [f"{folder}{name}" for folder in folders[:1] for name in re.findall(r"`([a-z_]+\.py)`", row)]
        places = [place for path in paths for place in (PACKAGE / path, ROOT / path) if place.exists()]
        assert len(places) >= len(paths), row
        files = [place.read_text() for place in places if place.is_file()]
        for name in re.findall(r"`([A-Z]\w+|_[a-z_]+|numbers)`", row):
            assert any(re.search(rf"\b{name}\b", file) for file in files), (name, row)
