"""`ckpt match`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from ckpt_tools.cli.options import LOCATION, given, options_of, print_report, report_options, show_progress
from ckpt_tools.matching.advice import Question
from ckpt_tools.operations.match import MatchOptions
from ckpt_tools.render.matched import print_matched
from ckpt_tools.text import printable


@click.command(short_help="Pair the tensors of two models.")
@click.argument("source", metavar="IN", type=LOCATION)
@options_of(
    MatchOptions,
    like={"required": True},
    match={
        "type": click.Choice(["structure", "values", "position"]),
        "help": "How to pair what names do not decide: by shape, names and order of modules; also by values; or just in order.",
    },
    output={"type": LOCATION},
)
@click.option(
    "--ask", is_flag=True, help="Ask about ambiguous tensors on the terminal, and print the answers as --pair options."
)
@click.option("--all", is_flag=True, help="Show every tensor in full.")
@report_options
def match(source: Path, ask: bool, all: bool, quiet: bool, json: bool, **options: Any) -> None:
    """Show which tensor of IN is which tensor of TARGET, and why; and those that are unmatched or ambiguous.

    \b
    ckpt match ddp.pth --like torchvision.models:resnet18
    ckpt match hf.safetensors --like timm:create_model --like-args '{"model_name": "resnet50"}' --match structure
    ckpt match theirs.pth --like ours:Net --from theirs:Net --input 1x3x64x64
    ckpt match theirs.pth --like ours.pth --match structure -o plan.toml && ckpt convert theirs.pth out.pth --plan plan.toml

    --pair comes first, then names: equal, without wrappers, after --rename, without a common prefix or suffix. Nothing is
    guessed. With --from both models run once, and the order of their layers decides more. For unmatched tensors the options
    that help are listed.

    Exit code: 0 every tensor is matched, 1 some are not, 2 usage, 3 refused.
    """
    from ckpt_tools.operations.match import match as match_checkpoint

    asked = _asked(source, options) if ask else given(options)
    with show_progress(quiet=quiet):
        report = match_checkpoint(source, **asked)
    print_report(report, print_matched, json=json, quiet=quiet, show_all=all, plan=options["output"])
    sys.exit(0 if report else 1)


def _asked(source: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The options, with the user's answers to one question after another: each may settle others."""
    from ckpt_tools.operations.match import match as match_checkpoint

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError("--ask is for a terminal; elsewhere answer with --pair OLD=NEW.")
    pairs, passed = [*options["pair"]], set[str]()
    while True:
        options = {**options, "pair": tuple(pairs)}
        report = match_checkpoint(source, **{**given(options), "output": None, "overwrite": False})
        question = next((each for each in report.advice.questions if each.new not in passed), None)
        if question is None:
            for pair in pairs:
                click.echo(f"--pair {shlex.quote(pair)}", err=True)
            return given(options)
        answer = _answer(question)
        passed.add(question.new)
        pairs += [question.answer(answer)] if answer else []


def _answer(question: Question) -> str:
    """One of the candidates, or the empty text."""
    click.echo(f"Which is {printable(question.new)} ({question.tensors} tensors)?", err=True)
    for number, candidate in enumerate(question.candidates, 1):
        click.echo(f"  {number}  {printable(candidate)}", err=True)
    most = len(question.candidates)
    number = click.prompt(f"1 to {most}, or 0 for none", type=click.IntRange(0, most), default=0, show_default=False, err=True)
    return question.candidates[number - 1] if number else ""
