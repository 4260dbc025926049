"""Command lines that try every command of `ckpt` by itself and with each of its options, and the files that they name."""

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import torch

import ckpt_tools
from tests.support.commands import main
from tests.support.samples import FIXTURES
from tests.support.without import Done, run

# Each command as far as it goes by itself; files are those of `place`.
COMMANDS = {
    "inspect": "ddp.pth", "show": "ddp.pth module.fc1.bias", "convert": "ddp.pth OUT.pth", "match": "ddp.pth --like single.pth",
    "check": "ddp.pth", "scan": "ddp.pth", "repair": "ddp.pth OUT.pth", "diff": "ddp.pth other.pth", "stats": "ddp.pth",
    "average": "ddp.pth other.pth OUT.pth", "extract-lora": "single.pth tuned.pth OUT --rank 1",
    "report": "ddp.pth -o OUT.html", "prove": "ddp.pth ddp.pth --model models.py:net --input 1x3x4x4",
    "sign": "ddp.pth --key key.pem", "verify": "ddp.pth --key key.pem --signature key.pem", "explain": "wrapper-prefix",
    "completion": "bash", "help": "inspect",
}  # fmt: skip
# What an option takes in every command that has it.
VALUES = {
    "--depth": "1", "--filter": "*", "--jobs": "2", "--limit": "records=2000000", "--seed": "1", "--runs": "1",
    "--tolerance": "0.1", "--rank": "1", "--model": "models.py:net", "--model-args": "{}",
    "--shard-size": "1MB", "--strip-prefix": "module.", "--add-prefix": "x.", "--rename": "x=y", "--keep": "*",
    "--drop": "*.bias", "--select": "", "--map-location": "cpu", "--device": "cpu", "--ignore": "wrapper-prefix",
    "--set-metadata": "a=b", "--key": "key.pem", "--certificate": "OUT.json", "--signature": "key.pem", "--weights": "1,2",
    "--only": "*", "--like": "single.pth", "--pair": "module.fc1.bias=fc1.bias", "--output": "OUT2.pth",
    "--against": "other.pth", "--reinit": "zeros", "--input": "1x4",
}  # fmt: skip
# Options that want another command line, by command, option and choice; the last name that fits counts.
LIKE = "ddp.pth OUT.pth --like single.pth"
MODELS = "ddp.pth --like models.py:net --from models.py:net"
WIDER = "ddp.pth OUT.pth --like wider.pth"
WHOLE = {
    "show --select": "training.pth module.fc1.bias --select model",
    "show --output": "ddp.pth module.fc1.bias -o OUT.npy",
    "convert --rename": "ddp.pth OUT.pth --rename fc1=fc9",
    "convert --select": "training.pth OUT.pth --select model",
    "convert --fold": "weight-norm.pth OUT.pth --fold",
    "convert --lora": "lora/base.safetensors OUT.safetensors --lora lora/plain",
    "convert --fill-from": "few.pth OUT.pth --fill-from ddp.pth",
    "convert --tie": "copied/in.pth OUT.pth --tie",
    "convert --dequantize": "quantised/gptq.safetensors OUT.safetensors --dequantize",
    "convert --dtype": "ddp.pth OUT.pth --dtype bf16",
    "convert --like": LIKE,
    "convert --like-args": "ddp.pth OUT.pth --like models.py:net --like-args {}",
    "convert --match": f"{LIKE} --match",
    "convert --allow-reshape": f"{LIKE} --allow-reshape",
    "convert --pair": f"{LIKE} --pair module.fc1.bias=fc1.bias",
    "convert --plan": "ddp.pth OUT.pth --plan plan.toml",
    "convert --plan-value": "rows.pth OUT.pth --plan sized.toml --plan-value n=1",
    "convert --reinit": "few.pth OUT.pth --like single.pth --reinit zeros",
    "convert --on-mismatch": f"{WIDER} --reinit fc2.*=zeros --on-mismatch",
    "convert --on-mismatch error": f"{LIKE} --on-mismatch error",
    "convert --on-mismatch skip": f"{WIDER} --on-mismatch skip",
    "convert --adapt": "channels.pth OUT.pth --like single.pth --adapt",
    "convert --seed": f"{LIKE} --seed 1",
    "convert --ema": "ema.pth OUT.pth --ema",
    "convert --shard-size": "ddp.pth OUT --shard-size 1MB",
    "convert --set-metadata": "ddp.pth OUT.safetensors --set-metadata a=b",
    "convert --output": "ddp.pth -o OUT.pth",
    "convert --in-place": "changed.pth --in-place --strip-module",
    "convert --to-dir": "ddp.pth single.pth --to-dir OUT",
    "convert --part": "ddp.pth single.pth --to-dir OUT --part 1/2",
    "convert --skip-done": "ddp.pth single.pth --to-dir OUT --skip-done",
    "convert --under": "ddp.pth OUT.pth --under params",
    "match --like": "ddp.pth --like single.pth",
    "match --like-args": "ddp.pth --like models.py:net --like-args {}",
    "match --from": MODELS,
    "match --input": f"{MODELS} --input 1x3x4x4",
    "match --rename": "ddp.pth --like single.pth --rename fc1=fc1x",
    "match --select": "training.pth --like single.pth --select model",
    "match --output": "ddp.pth --like single.pth -o OUT.toml",
    "match --overwrite": "ddp.pth --like single.pth -o OUT.toml --overwrite",
    "check --output": "ddp.pth --digest -o OUT.digest",
    "check --overwrite": "ddp.pth --digest -o OUT.digest --overwrite",
    "repair --output": "ddp.pth -o OUT.pth",
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


def make_files(folder: Path) -> None:
    """Make a folder with what the command lines name."""
    shutil.copytree(FIXTURES, folder)
    (folder / "models.py").write_text("import torch\nfrom torch import nn\n\n\ndef net():\n    return nn.Linear(2, 2)\n")
    (folder / "key.pem").write_text("no key")
    ddp, single = torch.load(folder / "ddp.pth"), torch.load(folder / "single.pth")
    shutil.copy(folder / "ddp.pth", folder / "changed.pth")
    torch.save({name: value + 1 for name, value in ddp.items()}, folder / "other.pth")
    torch.save({name: value + 1 for name, value in single.items()}, folder / "tuned.pth")
    torch.save({name: value for name, value in ddp.items() if "fc2" not in name}, folder / "few.pth")
    (folder / "copied").mkdir()
    torch.save({name: torch.ones(2) for name in ("shared.weight", "lm_head.weight")}, folder / "copied" / "in.pth")
    (folder / "copied" / "config.json").write_text('{"tie_word_embeddings": true}')
    wider = {"fc2.weight": torch.zeros(12, 8), "fc2.bias": torch.zeros(12)}
    torch.save({**single, **wider}, folder / "wider.pth")
    torch.save({**single, "features.0.weight": torch.zeros(4, 3, 3, 3)}, folder / "channels.pth")
    torch.save({"model": single, "model_ema": single}, folder / "ema.pth")
    torch.save({"model": {name: value + 1 for name, value in single.items()}}, folder / "tuned-ema.pth")
    torch.save(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)).state_dict(), folder / "weight-norm.pth")
    torch.save({"rows.weight": torch.zeros(2, 32)}, folder / "rows.pth")
    head = 'format = "ckpt-plan-1"\npatterns = true\n[[tensor]]\n'
    sized = 'old = "rows.weight"\nnew = ["a.weight", "b.weight"]\nstep = "split"\nsizes = ["n", "n"]\n'
    (folder / "sized.toml").write_text(head.replace("[[", "[values]\nn = 2\n[[") + sized)
    ckpt_tools.match(folder / "ddp.pth", like=folder / "single.pth", output=folder / "plan.toml")


def commands() -> list[list[str]]:
    """The command lines of `asked`, each with an output of its own."""
    return [[name.split()[0], *line.replace("OUT", f"out/{number}").split()] for number, (name, line) in enumerate(asked())]


def tried(place: Path, environment: dict[str, str], start: Sequence[str] = ()) -> dict[str, Done]:
    """What came of every command line of `asked`, by its name."""
    here = place.with_name(f"{place.name} again")
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(place, here)
    (here / "out").mkdir()
    names = [name for name, _ in asked()]
    return dict(zip(names, run(commands(), here, environment, start), strict=True))


def without_times(one: Done) -> Done:
    """What was printed, without how long it took."""
    plain = [re.sub(r"(time\W+|seconds\W+)[\d.e-]+", r"\1", text) for text in (one.out, one.err)]
    return Done(one.code, *plain)
