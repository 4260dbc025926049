"""Every command and option where click and rich alone are installed: a sentence says what needs PyTorch, and the rest works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch

import ckpt_tools
from ckpt_tools.cli import main
from tests.support.samples import FIXTURES
from tests.support.without import ROOT, Done, hide, run

PYTORCH = "This needs PyTorch: pip install torch"
# Each command as far as it goes by itself; files are those of `place`.
COMMANDS = {
    "inspect": "ddp.pth",
    "show": "ddp.pth module.fc1.bias",
    "convert": "ddp.pth OUT.pth",
    "match": "ddp.pth --like single.pth",
    "check": "ddp.pth",
    "scan": "ddp.pth",
    "repair": "ddp.pth OUT.pth",
    "diff": "ddp.pth other.pth",
    "stats": "ddp.pth",
    "average": "ddp.pth other.pth OUT.pth",
    "extract-lora": "single.pth tuned.pth OUT --rank 1",
    "report": "ddp.pth -o OUT.html",
    "prove": "ddp.pth ddp.pth --model models.py:net --input 1x3x4x4",
    "sign": "ddp.pth --key key.pem",
    "verify": "ddp.pth --key key.pem --signature key.pem",
    "explain": "wrapper-prefix",
    "completion": "bash",
    "help": "inspect",
}
# What an option takes in every command that has it.
VALUES = {
    "--depth": "1",
    "--filter": "*",
    "--jobs": "2",
    "--limit": "records=2000000",
    "--seed": "1",
    "--runs": "1",
    "--tolerance": "0.1",
    "--rows": "0",
    "--reserve": "0",
    "--rank": "1",
    "--model": "models.py:net",
    "--model-args": "{}",
    "--shard-size": "1MB",
    "--strip-prefix": "module.",
    "--add-prefix": "x.",
    "--rename": "x=y",
    "--keep": "*",
    "--drop": "*.bias",
    "--select": "",
    "--map-location": "cpu",
    "--device": "cpu",
    "--ignore": "wrapper-prefix",
    "--set-metadata": "a=b",
    "--key": "key.pem",
    "--certificate": "OUT.json",
    "--signature": "key.pem",
    "--weights": "1,2",
    "--only": "*",
    "--like": "single.pth",
    "--pair": "module.fc1.bias=fc1.bias",
    "--output": "OUT2.pth",
    "--against": "other.pth",
    "--reinit": "zeros",
    "--input": "1x4",
}
# Options that want another command line, by command, option and choice; the last name that fits counts.
LIKE = "ddp.pth OUT.pth --like single.pth"
MODELS = "ddp.pth --like models.py:net --from models.py:net"
WIDER = "ddp.pth OUT.pth --like wider.pth"
WHOLE = {
    "show --select": "training.pth module.fc1.bias --select model",
    "show --output": "ddp.pth module.fc1.bias -o OUT.npy",
    "convert --rename": "ddp.pth OUT.pth --rename fc1=fc9",
    "convert --select": "training.pth OUT.pth --select model",
    "convert --lora": "lora/base.safetensors OUT.safetensors --lora lora/plain",
    "convert --dequantize": "quantised/gptq.safetensors OUT.safetensors --dequantize",
    "convert --dtype": "ddp.pth OUT.pth --dtype bf16",
    "convert --dtype-only": "ddp.pth OUT.pth --dtype bf16 --dtype-only *.weight",
    "convert --like": LIKE,
    "convert --like-args": "ddp.pth OUT.pth --like models.py:net --like-args {}",
    "convert --like-select": "ddp.pth OUT.pth --like training.pth --like-select model",
    "convert --match": f"{LIKE} --match",
    "convert --from": "ddp.pth OUT.pth --like models.py:net --from models.py:net",
    "convert --from-args": "ddp.pth OUT.pth --like models.py:net --from models.py:net --from-args {}",
    "convert --input": "ddp.pth OUT.pth --like models.py:net --from models.py:net --input 1x3x4x4",
    "convert --allow-reshape": f"{LIKE} --allow-reshape",
    "convert --pair": f"{LIKE} --pair module.fc1.bias=fc1.bias",
    "convert --plan": "ddp.pth OUT.pth --plan plan.toml",
    "convert --plan-value": "rows.pth OUT.pth --plan sized.toml --plan-value n=1",
    "convert --reverse": "rows.pth OUT.pth --plan renamed.toml --reverse",
    "convert --reinit": "few.pth OUT.pth --like single.pth --reinit zeros",
    "convert --on-mismatch": f"{WIDER} --reinit fc2.*=zeros --on-mismatch",
    "convert --on-mismatch error": f"{LIKE} --on-mismatch error",
    "convert --on-mismatch skip": f"{WIDER} --on-mismatch skip",
    "convert --rows": f"{WIDER} --reinit zeros --on-mismatch overlap --rows fc2.*=0,1",
    "convert --adapt": "channels.pth OUT.pth --like single.pth --adapt",
    "convert --seed": f"{LIKE} --seed 1",
    "convert --ema": "ema.pth OUT.pth --ema",
    "convert --quantize": "rows.pth OUT.gguf --quantize",
    "convert --shard-size": "ddp.pth OUT --shard-size 1MB",
    "convert --only-weights": "ddp.pth OUT --shard-size 1MB --only-weights",
    "convert --set-metadata": "ddp.pth OUT.safetensors --set-metadata a=b",
    "convert --drop-metadata": "single.safetensors OUT.safetensors --drop-metadata format",
    "convert --prove": "ddp.pth OUT.pth --like models.py:net --prove 1x3x4x4",
    "convert --prove-model": "ddp.pth OUT.pth --like models.py:net --prove 1x3x4x4 --prove-model models.py:net",
    "convert --output": "ddp.pth -o OUT.pth",
    "convert --in-place": "changed.pth --in-place --strip-module",
    "convert --to-dir": "ddp.pth single.pth --to-dir OUT",
    "convert --jobs": "ddp.pth single.pth --to-dir OUT --jobs 2",
    "match --like": "ddp.pth --like single.pth",
    "match --like-args": "ddp.pth --like models.py:net --like-args {}",
    "match --like-select": "ddp.pth --like training.pth --like-select model",
    "match --from": MODELS,
    "match --from-args": f"{MODELS} --from-args {{}}",
    "match --input": f"{MODELS} --input 1x3x4x4",
    "match --rename": "ddp.pth --like single.pth --rename fc1=fc1x",
    "match --select": "training.pth --like single.pth --select model",
    "match --output": "ddp.pth --like single.pth -o OUT.toml",
    "match --overwrite": "ddp.pth --like single.pth -o OUT.toml --overwrite",
    "check --output": "ddp.pth --digest -o OUT.digest",
    "check --overwrite": "ddp.pth --digest -o OUT.digest --overwrite",
    "repair --output": "ddp.pth -o OUT.pth",
    "repair --like": "few.pth OUT.pth --like single.pth --reinit zeros",
    "repair --reinit": "few.pth OUT.pth --like single.pth --reinit zeros",
    "diff --select": "training.pth training.pth --select model",
    **{
        f"diff --sort {key}": f"ddp.pth other.pth --values --sort {key}"
        for key in ("max-abs", "max-rel", "l2", "cosine", "changed")
    },
    "stats --select": "training.pth --select model",
    "average --select": "training.pth training.pth OUT.pth --select model",
    "average --output": "ddp.pth other.pth -o OUT.pth",
    "extract-lora --output": "single.pth tuned.pth -o OUT --rank 1",
    "extract-lora --select": "ema.pth tuned-ema.pth OUT --rank 1 --select model",
    "extract-lora --rank": "single.pth tuned.pth OUT --rank 1",
    "report --output": "ddp.pth -o OUT.html",
    "report --select": "training.pth training.pth -o OUT.html --select model",
    "prove --select": "training.pth ddp.pth --model models.py:net --input 1x3x4x4 --select model",
    "sign --key": "ddp.pth --key key.pem",
    "sign --output": "ddp.pth --key key.pem -o OUT.sig",
    "verify --key": "ddp.pth --key key.pem --signature key.pem",
    "verify --signature": "ddp.pth --key key.pem --signature key.pem",
}


def asked() -> Iterator[tuple[str, str]]:
    """Every command by itself, and with each of its options and each choice of those: a name, and the command line."""
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        yield name, COMMANDS[name]
        for option in command.params:
            if isinstance(option, click.Option):
                yield from with_option(name, option)


def with_option(command: str, option: click.Option) -> Iterator[tuple[str, str]]:
    """The command lines that try an option: those of `WHOLE`, or the command's own and the option behind it."""
    name = f"{command} {option.opts[0]}"
    choices = option.type.choices if isinstance(option.type, click.Choice) else [VALUES.get(option.opts[0], "MISSING")]
    for written in (*option.opts, *option.secondary_opts) if option.is_flag else option.opts[:1]:
        for value in [""] if option.is_flag else choices:
            label = f"{name} {value}" if isinstance(option.type, click.Choice) else name
            line = WHOLE.get(label, WHOLE.get(name))
            if line is None:
                yield label, f"{COMMANDS[command]} {written} {value}"
            else:
                yield label, f"{line} {value}" if line.endswith(written) else line


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the command lines name."""
    folder = tmp_path_factory.mktemp("files") / "here"
    shutil.copytree(FIXTURES, folder)
    (folder / "models.py").write_text("import torch\nfrom torch import nn\n\n\ndef net():\n    return nn.Linear(2, 2)\n")
    (folder / "key.pem").write_text("no key")
    ddp, single = torch.load(folder / "ddp.pth"), torch.load(folder / "single.pth")
    shutil.copy(folder / "ddp.pth", folder / "changed.pth")
    torch.save({name: value + 1 for name, value in ddp.items()}, folder / "other.pth")
    torch.save({name: value + 1 for name, value in single.items()}, folder / "tuned.pth")
    torch.save({name: value for name, value in ddp.items() if "fc2" not in name}, folder / "few.pth")
    wider = {"fc2.weight": torch.zeros(12, 8), "fc2.bias": torch.zeros(12)}
    torch.save({**single, **wider}, folder / "wider.pth")
    torch.save({**single, "features.0.weight": torch.zeros(4, 3, 3, 3)}, folder / "channels.pth")
    torch.save({"model": single, "model_ema": single}, folder / "ema.pth")
    torch.save({"model": {name: value + 1 for name, value in single.items()}}, folder / "tuned-ema.pth")
    torch.save({"rows.weight": torch.zeros(2, 32)}, folder / "rows.pth")
    head = 'format = "ckpt-plan-1"\npatterns = true\n[[tensor]]\n'
    sized = 'old = "rows.weight"\nnew = ["a.weight", "b.weight"]\nstep = "split"\nsizes = ["n", "n"]\n'
    (folder / "sized.toml").write_text(head.replace("[[", "[values]\nn = 2\n[[") + sized)
    (folder / "renamed.toml").write_text(head + 'old = "x.weight"\nnew = "rows.weight"\n')
    ckpt_tools.match(folder / "ddp.pth", like=folder / "single.pth", output=folder / "plan.toml")
    return folder


def commands() -> list[list[str]]:
    """The command lines of `asked`, each with an output of its own."""
    return [[name.split()[0], *line.replace("OUT", f"out/{number}").split()] for number, (name, line) in enumerate(asked())]


@pytest.fixture(scope="module")
def bare(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """What came of every command line where no optional package is there."""
    return tried(place, hide(tmp_path_factory.mktemp("hidden")))


def tried(place: Path, environment: dict[str, str]) -> dict[str, Done]:
    """What came of every command line of `asked`, by its name."""
    here = place.with_name(f"{place.name} again")
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(place, here)
    (here / "out").mkdir()
    names = [name for name, _ in asked()]
    return dict(zip(names, run(commands(), here, environment), strict=True))


def needing(done: dict[str, Done]) -> set[str]:
    """The names of what said that it needs PyTorch."""
    return {name for name, one in done.items() if one.err.startswith(f"Error: {PYTORCH}\n")}


def test_nothing_ends_in_a_traceback(bare: dict[str, Done]) -> None:
    """Every option of every command is tried, a new one too; each works, or says in a sentence what it needs."""
    assert {
        name: one.err for name, one in bare.items() if one.code == -1 or "Traceback" in one.err or "No module" in one.err
    } == {}
    assert {name: one.err for name, one in bare.items() if one.code == 2} == {"match --ask": bare["match --ask"].err}
    refused = {name for name, one in bare.items() if one.code == 3}
    assert {name for name in refused if "needs" not in bare[name].err} == set()
    assert needing(bare) <= refused


def test_each_says_what_for(bare: dict[str, Done]) -> None:
    """Behind the sentence stands what PyTorch is needed for; under --json the document has both."""
    for name in needing(bare):
        assert len(bare[name].err.splitlines()) == 2, name
        if name.endswith(" --json"):
            document = json.loads(bare[name].out)
            assert (document["what"], document["exit_code"]) == (PYTORCH, 3)
            assert document["why"] == bare[name].err.splitlines()[1]


def test_the_page_has_the_list(bare: dict[str, Done]) -> None:
    """docs/without-torch.md names each command and option that needs PyTorch, and no other."""
    needs, whole = needing(bare), {name for name in needing(bare) if " " not in name}
    for name, choices in by_option().items():
        if needs.issuperset(choices):
            needs = needs - choices | {name}
    beside = {f"diff --sort {key}" for key in ("max-abs", "max-rel", "l2", "cosine", "changed")} | {
        "convert --dtype-only",
        "convert --rows",
    }
    needs = {name for name in needs - beside if name in whole or name.split()[0] not in whole}
    table = (ROOT / "docs" / "without-torch.md").read_text("utf-8").partition("\n| ")[2].partition("\n\n")[0]
    assert set(re.findall(r"`ckpt ([^`]*)`", table)) == needs


def by_option() -> dict[str, set[str]]:
    """The choices that were tried of each option."""
    found: dict[str, set[str]] = {}
    for name, _ in asked():
        found.setdefault(" ".join(name.split()[:2]), set()).add(name)
    return found


def test_the_rest_is_the_same(bare: dict[str, Done], place: Path, tmp_path: Path) -> None:
    """What does not need PyTorch or another package prints what it prints where all are installed, and ends alike."""
    full, checked = tried(place, hide(tmp_path / "nothing", [])), 0
    for name, one in bare.items():
        if "This needs" not in one.err:
            assert without_times(one) == without_times(full[name]), name
            checked += 1
        elif name in needing(bare) and "models.py" not in " ".join(dict(asked())[name].split()):
            assert full[name].code in (0, 1), (name, full[name].err)
    assert checked > 100


def without_times(one: Done) -> Done:
    """What was printed, without how long it took."""
    plain = [re.sub(r'(time +|"seconds": ?|in |, )[\d.e-]+( s)?', r"\1", text) for text in (one.out, one.err)]
    return Done(one.code, *plain)


OTHERS = {
    "report ddp.pth -o x.html": "This needs jinja2: pip install jinja2",
    "inspect s3://bucket/model.pth": "This needs fsspec: pip install fsspec",
    "sign ddp.pth --key key.pem": "This needs cryptography: pip install cryptography",
    "inspect frameworks/tiny.weights.h5": "pip install h5py",
    "convert frameworks/types.gguf x.pth": PYTORCH,
    "check --digest views.pth": PYTORCH,
    "convert views.pth x.safetensors": PYTORCH,
    "inspect some.zst": "pip install zstandard",
}


def test_other_packages(place: Path, tmp_path: Path) -> None:
    """What needs a package that is not there names it, in one sentence; nothing is written."""
    (place / "some.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    for line, one in zip(OTHERS, run([line.split() for line in OTHERS], place, hide(tmp_path / "hidden")), strict=True):
        assert OTHERS[line] in one.err, line
        assert (one.code, "Traceback" in one.err) == (3, False)
    assert not [name for name in ("x.html", "x.pth", "x.safetensors") if (place / name).exists()]


BROKEN = {
    "raise OSError('libtorch_cpu.so: cannot open shared object file')": "OSError: libtorch_cpu.so",
    "import torch._C": "ModuleNotFoundError: No module named 'torch._C'",
    "name": "NameError: name 'name' is not defined",
}


@pytest.mark.parametrize("code", BROKEN)
def test_a_broken_torch(code: str, place: Path, tmp_path: Path) -> None:
    """Where torch is installed and its import fails, one sentence says so and why; what needs no torch works."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(code)
    lines = [
        "stats ddp.pth",
        "check --values ddp.pth single.pth",
        f"convert ddp.pth {tmp_path}/x.pth --dtype bf16",
        f"convert ddp.pth {tmp_path}/folder --format dcp",
        f"convert ddp.pth single.pth --to-dir {tmp_path}/many --jobs 2 --dtype bf16",
        "prove ddp.pth ddp.pth --model models.py:net --input 1x4",
    ]
    done = run([line.split() for line in [*lines, "inspect ddp.pth"]], place, hide(tmp_path, []))
    for line, one in zip(lines, done, strict=False):
        assert "PyTorch is installed and cannot be imported." in one.err, line
        assert BROKEN[code] in one.err
        assert one.code == 3
    assert done[-1].code == 0
    assert not (tmp_path / "x.pth").exists()


def test_the_library(place: Path, tmp_path: Path) -> None:
    """In Python it is an error of ours and an ImportError; importing the package and reading a file need nothing."""
    code = (
        "import ckpt_tools\nprint(ckpt_tools.inspect('ddp.pth').container)\n"
        "for call in (lambda: ckpt_tools.stats('ddp.pth'), lambda: ckpt_tools.prove, lambda: __import__('ckpt_tools.torch')):\n"
        "    try:\n        call()\n    except ImportError as error:\n        assert isinstance(error, ckpt_tools.CkptError)\n"
        "        print(error.what)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, env=hide(tmp_path), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["torch-zip", *[PYTORCH] * 3]


def test_what_is_not_needed_is_not_imported(place: Path) -> None:
    """Where they are installed, `inspect` of a local file imports neither torch nor what pages and addresses need."""
    code = (
        "import sys\nfrom ckpt_tools.cli import main\n"
        "try:\n    main(['inspect', 'ddp.pth'])\nexcept SystemExit:\n    print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert "ckpt_tools.operations.inspect" in loaded
    assert {"torch", "numpy", "safetensors", "fsspec", "jinja2", "markupsafe", "cryptography", "h5py"}.isdisjoint(loaded)


NO_NETWORK = """
import socket

def refuse(*_, **__):
    raise AssertionError("a network call")

class Refused(socket.socket):
    __init__ = refuse

socket.socket = Refused
for name in ("create_connection", "getaddrinfo", "gethostbyname"):
    setattr(socket, name, refuse)
"""


def test_no_network(place: Path, tmp_path: Path) -> None:
    """`inspect`, `check`, `scan` and `convert` of local files open no socket: one that raises is in the place of all."""
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    lines = [
        "inspect ddp.pth",
        "check ddp.pth",
        "check --values ddp.pth",
        "scan .",
        f"convert ddp.pth {tmp_path}/x.safetensors --strip-module",
    ]
    done = run(
        [line.split() for line in [*lines, "inspect https://localhost:1/x.pth"]],
        place,
        {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
    )
    assert [one.code for one in done[:-1]] == [0, 1, 1, 1, 0], [one.err for one in done]
    assert "a network call" in done[-1].err
