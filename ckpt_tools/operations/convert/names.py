"""The name options of `convert`: checked, put together into one function of a name, applied to every state dict."""

from __future__ import annotations

from ckpt_tools.edit import renaming
from ckpt_tools.edit.renaming import Rename
from ckpt_tools.errors import NothingMatchedError, UsageError
from ckpt_tools.formats.contents import StateDict, find_state_dicts
from ckpt_tools.operations.convert.options import NameOptions
from ckpt_tools.operations.convert.report import Converted, RenamedNames
from ckpt_tools.text import listed
from ckpt_tools.tree import names
from ckpt_tools.tree.nodes import Node


class Names:
    """The name options, checked and put together into one function of a name."""

    def __init__(self, options: NameOptions, *, fitted: bool = False) -> None:
        self.fitted = fitted  # a target says later what becomes of the names
        strip_prefix = options.strip_prefix
        self.steps: list[tuple[str, Rename]] = []
        if options.strip_module:
            self.steps.append(("strip_module", names.strip_module))
        if options.unwrap:
            self.steps.append(("unwrap", names.unwrap))
        if strip_prefix is not None:
            self.steps.append((f"strip_prefix={strip_prefix!r}", lambda name: names.strip_prefix(name, strip_prefix)))
        for text in options.rename:
            pattern, replacement = renaming.parse_rename(text)
            self.steps.append((f"rename={text!r}", lambda name, p=pattern, r=replacement: p.sub(r, name)))  # type: ignore[misc]
        for option, prefix in (
            ("add_prefix", options.add_prefix),
            ("add_module", names.MODULE if options.add_module else None),
        ):
            if prefix is not None:
                self.steps.append((option, lambda name, prefix=prefix: prefix + name))  # type: ignore[misc]

    def apply(self, root: Node, report: Converted) -> None:
        """Rename in every state dict and every optimizer, and report it."""
        found = find_state_dicts(root)
        if self.steps:
            self._check_matches(found, report)
            self._note_uneven(found, report)
        done: dict[int, renaming.Renamed] = {}  # one dict may be there under several paths
        for state_dict in found:
            count, changes = len(state_dict.names), dict[str, str]()
            if self.steps:
                if id(state_dict.node) not in done:
                    done[id(state_dict.node)] = renaming.rename_state_dict(state_dict, self.rename)
                count, changes = done[id(state_dict.node)].tensors, done[id(state_dict.node)].changes
            examples = list(changes.items())[:3]
            report.state_dicts.append(RenamedNames(list(state_dict.where), count, len(changes), examples))
        if self.steps:
            report.optimizer_names = renaming.rename_optimizers(root, self.rename)
        elif wrappers := dict.fromkeys(name for one in found if not self.fitted for name in names.wrappers_in(one.names)):
            option = "strip_module" if [*wrappers] == [names.MODULE] else "unwrap"
            report.note("still-wrapped", f"Names still begin with {listed(list(map(repr, wrappers)))}; `{option}` removes it.")

    def rename(self, name: str) -> str:
        for _, step in self.steps:
            name = step(name)
        return name

    def _check_matches(self, found: list[StateDict], report: Converted) -> None:
        """A `rename` that changes nothing is refused; another option that changes nothing is noted."""
        if not found:
            raise NothingMatchedError("There is no state dict to rename in.", why="No mapping of names to tensors was found.")
        current = [name for state_dict in found for name in state_dict.names]
        for option, step in self.steps:
            new = [step(name) for name in current]
            if new == current and option.startswith("rename="):
                raise NothingMatchedError(f"`{option}` changes no name.", fix="ckpt inspect --all FILE lists the names.")
            if new == current:
                report.note("no-prefix", f"`{option}`: no name has the prefix; {_inside(option, current)}")
            self._check_dots(option, current, new, report)
            current = new

    @staticmethod
    def _check_dots(option: str, before: list[str], after: list[str], report: Converted) -> None:
        """Refuse a prefix that was stripped without its dot, and note one that was added without."""
        pairs = list(zip(before, after, strict=True))
        for old, new in pairs if option.startswith("strip_prefix=") else ():
            if new.startswith(".") and not old.startswith("."):
                prefix = old.removesuffix(new[1:])
                raise UsageError(f"`{option}` leaves {new!r} of {old!r}.", fix=f"With the dot: `strip_prefix={prefix!r}`")
        if option == "add_prefix" and pairs and not pairs[0][1].removesuffix(pairs[0][0]).endswith((".", "_")):
            report.note("no-dot", f"The prefix has no dot at its end: {pairs[0][0]!r} is {pairs[0][1]!r} now.")

    def _note_uneven(self, found: list[StateDict], report: Converted) -> None:
        """Say so where some names of a state dict lose more than one `module.`, and others one."""
        options = [option for option, _ in self.steps if option in ("strip_module", "unwrap")]
        for state_dict in found if options else ():
            pair = names.uneven(map(names.strip_inner, state_dict.names) if "unwrap" in options else state_dict.names)
            if pair is not None:
                text = f"`{options[0]}`: {pair[0]!r} loses one 'module.', {pair[1]!r} more. "
                fix = r"Where the model itself has a sub-module of that name, remove one only: `rename='^module\\.='`."
                report.note("uneven-prefix", text + fix)


def _inside(option: str, current: list[str]) -> str:
    """What becomes of names of which none begins with the prefix: where one has it inside, the option that takes it out."""
    wrapped = next((name for name in current if ".module." in name), None) if option in ("strip_module", "unwrap") else None
    if wrapped is None:  # what all names begin with, where it is one word, may be the prefix that was meant
        first = {name.partition(".")[0] if "." in name else "" for name in current}
        return (f"all begin with '{first.pop()}.'; " if len(first) == 1 and all(first) else "") + "the names stay as they are."
    if names.leading_wrappers(wrapped):
        return f"{wrapped!r} has it inside another wrapper: `unwrap` takes all of them out."
    rule = names.unwrapping(wrapped.partition(".module.")[0])
    return f"{wrapped!r} has it inside, as where DataParallel wrapped a part of the model: then `rename='{rule}'` takes it out."
