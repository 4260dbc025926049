"""What is published, tried before it is: make release-check, or python -m docs.release_check.

Builds the source archive, a wheel of it and ckpt.pyz; looks at their files and metadata; installs the wheel into a new
environment with PyTorch and the source archive into one without; and runs the commands of the README in each, and from
ckpt.pyz with a bare Python, which must print what the environment without PyTorch prints. Exits with 1 at the first failure;
else what was tried lies in dist/release/, with the recipe for conda-forge.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from pathlib import Path

from docs import pyz

ROOT = Path(__file__).parents[1]
RELEASE = ROOT / "dist" / "release"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WITHOUT_TORCH = ("click", "rich", "fsspec")
_FILES = {
    "IN": "ddp.pth",
    "FOLDER": "found/shards",
    "COMMAND": "inspect",
    "FILE": "ddp.pth",
    "model.pth": "ddp.pth",
    "in.pth": "ddp.pth",
}
_JUNK = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "site", "*.egg-info", "runs", "shared")


def readme_commands() -> list[list[str]]:
    """The arguments of every `ckpt` command in the README, on files of fixtures/."""
    text = (ROOT / "README.md").read_text("utf-8")
    found = dict.fromkeys(re.findall(r"(?:`|^\$ |^ {4})ckpt ([^`\n]*?)(?:`| +#.*|$)", text, re.MULTILINE))
    alone = [line for line in found if not re.search(r"[|&;<>]", line)]  # what a shell puts together is more than a command
    lines = [line.replace("OUT", f"new{number}.pth") for number, line in enumerate(alone)]
    return [[_FILES.get(word, word) for word in shlex.split(line)] for line in lines]


def main() -> None:
    """All steps, each with a line."""
    with tempfile.TemporaryDirectory(prefix="ckpt-release-") as folder:
        place = Path(folder)
        archive, wheel = build(place)
        check_files(archive, wheel)
        check_metadata(wheel)
        one_file = place / "ckpt.pyz"
        pyz.write(one_file)
        say(f"ckpt.pyz: {one_file.stat().st_size} bytes")
        whole = environment(place / "with", [str(wheel)])
        bare = environment(place / "without", WITHOUT_TORCH, ["--no-deps", str(archive)])
        for python in (whole, bare):
            check_scripts(python)
        check_readme(place, whole, bare, one_file)
        keep(archive, wheel, one_file)


def check_readme(place: Path, whole: Path, bare: Path, one_file: Path) -> None:
    """The commands of the README end well, or say what they need, in both environments and from the one file."""
    starts = ([str(whole), "-m", "ckpt_tools"], [str(bare), "-m", "ckpt_tools"], [str(bare), "-I", "-S", str(one_file)])
    ran = [try_readme(place / f"files{number}", start) for number, start in enumerate(starts)]
    for line, code, text in (row for rows in ran for row in rows):
        check(code in (0, 1) or ("\nError: " in text and "Traceback" not in text), f"ckpt {line}\n{text}")
    refused = sum("This needs PyTorch: pip install torch" in text for _, _, text in ran[1])
    say(f"{len(ran[0])} commands of the README ran with PyTorch and without; {refused} say that they need it")
    check(not any("This needs" in text for _, _, text in ran[0]), "a package is missing where all are installed")
    check(ran[1] == ran[2], "ckpt.pyz prints something else than the environment without PyTorch")
    say("ckpt.pyz prints what ckpt prints without PyTorch")


def keep(archive: Path, wheel: Path, one_file: Path) -> None:
    """Put what was tried into dist/release/, the packages in a folder of their own; and the recipe of this archive."""
    shutil.rmtree(RELEASE, ignore_errors=True)
    (RELEASE / "python").mkdir(parents=True)
    for path in (archive, wheel):
        shutil.copy(path, RELEASE / "python")
    for path in (one_file, one_file.with_name(f"{one_file.name}.sha256")):
        shutil.copy(path, RELEASE)
    version = archive.name.removeprefix("ckpt_tools-").removesuffix(".tar.gz")
    recipe = (ROOT / ".github" / "conda" / "meta.yaml").read_text("utf-8")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    (RELEASE / "meta.yaml").write_text(
        recipe.replace('"VERSION"', f'"{version}"').replace(" SHA256\n", f" {digest}\n"), "utf-8"
    )
    say("all of it is in dist/release/")


def say(text: str) -> None:
    """A line of the report."""
    print(f"ok  {text}", flush=True)


def check(holds: bool, problem: str) -> None:
    """End with the problem where something does not hold."""
    if not holds:
        sys.exit(f"NOT RELEASABLE: {problem}")


def call(command: Sequence[str], where: Path) -> str:
    """What a command prints; it must end well."""
    done = subprocess.run(command, cwd=where, capture_output=True, encoding="utf-8", check=False)
    check(done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(place: Path) -> tuple[Path, Path]:
    """The source archive of a copy of this repository, and the wheel of that archive."""
    made = []
    shutil.copytree(ROOT, place / "copy", ignore=_JUNK)
    for kind, source in (("sdist", "copy"), ("wheel", "unpacked")):
        code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
        (place / kind).mkdir()
        folder = place / source if kind == "sdist" else next((place / source).iterdir())
        made.append(place / kind / call([sys.executable, "-c", code, str(place / kind)], folder).splitlines()[-1])
        if kind == "sdist":
            with tarfile.open(made[0]) as opened:
                opened.extractall(place / "unpacked", filter="data")
    say(", ".join(path.name for path in made))
    return made[0], made[1]


def check_files(archive: Path, wheel: Path) -> None:
    """The wheel holds the package and man pages and nothing else, the same package as the archive."""
    names = set(zipfile.ZipFile(wheel).namelist())
    wrong = [name for name in names if not re.match(r"ckpt_tools/|ckpt_tools-[\d.]+\.(dist-info/|data/data/share/man/)", name)]
    check(not wrong, f"files that do not belong into the wheel: {wrong}")
    check(not [name for name in names if "__pycache__" in name], "compiled files in the wheel")
    here = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ckpt_tools").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    check(here <= names, f"files that the wheel has not: {sorted(here - names)}")
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    check(
        here | {"LICENSE", "README.md", "pyproject.toml"} <= inside, f"files that the archive has not: {sorted(here - inside)}"
    )
    pages = sum(name.endswith(".1") for name in names)
    check(pages > 10, f"{pages} man pages")
    say(f"the wheel holds {len(here)} files of the package, {pages} man pages, and nothing else")


def check_metadata(wheel: Path) -> None:
    """Name, version, Python, classifiers, licence, text and addresses are what pyproject.toml says."""
    opened = zipfile.ZipFile(wheel)
    (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
    found = message_from_bytes(opened.read(name))
    check(
        (found["Name"], found["Requires-Python"]) == (PROJECT["name"], PROJECT["requires-python"]),
        f"{found['Name']}, {found['Requires-Python']}",
    )
    check(found["Version"] in wheel.name and found["License-Expression"] == PROJECT["license"], "version or licence")
    classifiers = found.get_all("Classifier", [])
    check(set(classifiers) == set(PROJECT["classifiers"]), f"classifiers: {classifiers}")
    for minor in (11, 12, 13, 14):
        check(f"Programming Language :: Python :: 3.{minor}" in classifiers, f"no classifier of Python 3.{minor}")
    check(
        found["Description-Content-Type"] == "text/markdown" and len(str(found.get_payload())) > 1000,
        "no README in the metadata",
    )
    urls = found.get_all("Project-URL", [])
    check(len(urls) == len(PROJECT.get("urls", {})), f"addresses: {urls}")
    say(
        f"metadata: {len(classifiers)} classifiers, {len(urls)} addresses"
        + ("" if urls else " (pyproject.toml has no [project.urls] yet)")
    )


def environment(folder: Path, *wanted: Sequence[str]) -> Path:
    """The Python of a new environment, into which these were installed, one after the other."""
    call([sys.executable, "-m", "venv", str(folder)], folder.parent)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    for names in wanted:
        call([*pip, *names], folder.parent)
    say(f"installed {' and '.join(Path(name).name for names in wanted for name in names if name != '--no-deps')}")
    return python


def check_scripts(python: Path) -> None:
    """`ckpt` and `ckpt-tools` are one command, of the version that is to be published."""
    said = {call([str(python.with_name(name)), "--version"], python.parent) for name in ("ckpt", "ckpt-tools")}
    check(len(said) == 1 and "(ckpt_tools)" in said.pop(), "ckpt and ckpt-tools")


def try_readme(folder: Path, start: Sequence[str]) -> list[tuple[str, int, str]]:
    """Each command of the README with its exit code and what it printed, but for how long it took."""
    shutil.copytree(ROOT / "fixtures", folder)
    rows = []
    for arguments in readme_commands():
        done = subprocess.run([*start, *arguments], cwd=folder, capture_output=True, encoding="utf-8", check=False)
        text = re.sub(r"(time\W+)[\d.]+", r"\1", f"{done.stdout}\n{done.stderr}")
        rows.append((shlex.join(arguments), done.returncode, text))
    return rows


if __name__ == "__main__":
    main()
