"""The base of an adapter: its modules by their paths, and which of them an adapter's paths mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ckpt_tools.edit.lora.adapter import DTYPES, Change, Difference
from ckpt_tools.edit.lora.experts import Experts
from ckpt_tools.edit.lora.names import in_other_layout
from ckpt_tools.edit.lora.shapes import is_embedding, last_name, made_shape
from ckpt_tools.errors import ConvertError
from ckpt_tools.text import listed, some
from ckpt_tools.tree.names import unwrap
from ckpt_tools.tree.nodes import Entry, Node
from ckpt_tools.values.numeric import view_of

IN_PROJ = "in_proj_weight"  # torch's MultiheadAttention's
TIED = ("lm_head", "embed_out", "output", "output_layer", "embed_tokens", "shared", "wte")  # heads and embeddings
# Beside a weight they say that it is quantised: bitsandbytes, fp8 with scales, compressed-tensors, GPTQ and AWQ
_QUANTISED = (
    "weight.absmax", "weight.quant_map", "SCB", "weight_scale", "weight_scale_inv", "scale_weight", "weight_packed", "qweight",
    "qzeros", "weight_zero_point", "gate_up_proj_blocks", "down_proj_blocks",
)  # fmt: skip
_MOST_WAYS = 1000  # prefixes that are tried; a model has one
_FIX = "`dequantize='bf16'` makes the base plain first."


class Base:
    def __init__(self, tensors: Mapping[str, Node], path: str) -> None:
        self.tensors, self.path = tensors, path
        self.names: dict[str, str] = {}
        for ending in (IN_PROJ, "weight"):
            self.names |= {name[: -len(ending) - 1]: name for name in tensors if name.endswith(f".{ending}")}
        ends = ((name, name.removesuffix(f".{ending}")) for name in tensors for ending in _QUANTISED)
        self.quantised = {module: name for name, module in ends if module != name}
        self.modules = Modules(self.names.keys() | self.quantised.keys())
        self.experts = Experts(tensors)

    def weight(self, module: str) -> Node:
        return self.tensors[self.names[module]]

    def tied_to(self, change: Change) -> str | None:
        """The embedding that a missing head is tied to: files leave out what is tied. None where none fits."""
        last = last_name(change.module)
        if change.flat or last not in TIED or any(last_name(module) == last for module in self.names):
            return None
        shape = made_shape(change)
        size, width = (shape[-1], shape[0]) if change.embedding else (shape[0], shape[-1])
        found = {}
        for module, name in self.names.items():
            node = self.tensors[name]
            if type(node) is not Entry or node.shape[1:] != (width,) or not is_embedding(module, self.tensors):
                continue
            if change.base is not None or node.shape[0] == size:
                found[view_of(node)] = module
        return next(iter(found.values())) if len(found) == 1 else None

    def entry(self, name: str) -> Entry:
        node = self.tensors[name]
        if type(node) is Entry and node.dtype.name in DTYPES:
            return node
        kind = node.dtype.name if type(node) is Entry else "no plain dense tensor"
        raise ConvertError(
            f"{self.path}: {name!r} is {kind}; an adapter is merged into float32, float16, bfloat16 or float64.",
            fix=_FIX if type(node) is Entry and node.dtype.bits <= 8 else "",
        )

    def check_plain(self, module: str) -> None:
        if module in self.quantised:
            raise ConvertError(
                f"{self.path} is quantised: it has {self.quantised[module]!r}.",
                why="A sum rounded to so few bits would lose most of what an adapter adds.",
                fix=_FIX,
            )


@dataclass(frozen=True, slots=True)
class Way:
    """What leads from an adapter's paths to those of a base: a prefix less, a prefix more."""

    strip: str = ""
    add: str = ""

    def __call__(self, path: str) -> str | None:
        return self.add + path[len(self.strip) :] if path.startswith(self.strip) else None


class Modules:
    """The modules of a base, by their paths without wrappers; for an adapter with underscores for dots also by such."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.all = set(paths)
        self.paths: dict[str, list[str]] = {}
        for path in self.all:
            self.paths.setdefault(unwrap(f"{path}.")[:-1], []).append(path)
        for path, own in list(self.paths.items()):  # transformers 5 writes Mixtral by its old names
            self.paths.setdefault(path.replace(".block_sparse_moe.", ".mlp."), own)
        self.flat: dict[str, list[str]] = {}
        for path, name in (*((path, path) for path in self.paths), *in_other_layout(self.paths)):
            self.flat.setdefault(name.replace(".", "_"), []).extend(self.paths[path])

    def find(
        self, wanted: Sequence[str], like: Change | Difference, given: str, base: str, may_be: Callable[[str, str], bool]
    ) -> tuple[dict[str, str], Way]:
        """The partners of all paths by one way; exactly the same paths before any other way."""
        if not wanted:
            return {}, Way()
        known = self.flat if like.flat else self.paths
        ways = [Way(), *_ways(wanted[0], known, "_" if like.flat else ".")][:_MOST_WAYS]
        whole = [way for way in ways if all(way(path) in known for path in wanted)]
        if not whole:
            missing = min(([path for path in wanted if way(path) not in known] for way in ways), key=len)
            raise _unknown(wanted, missing, like, given, base)
        good = [way for way in whole if all(any(may_be(path, one) for one in known[way(path) or ""]) for path in wanted)]
        chosen = good or whole
        way, several = chosen[0], [way.add for way in chosen] if len(chosen) > 1 and chosen[0] != Way() else []
        partners = {path: known[way(path) or ""] for path in wanted}
        several = several or next((bases for bases in partners.values() if len(bases) > 1), [])
        if several:
            places = listed([repr(place or "(the names as they are)") for place in several], 3)
            raise ConvertError(
                f"{given}: its modules have several partners in {base}, below {places}.",
                fix="Choose one: `select=WHERE`, or `keep` and `drop` before.",
            )
        return {path: bases[0] for path, bases in partners.items()}, way


def _unknown(wanted: Sequence[str], missing: Sequence[str], like: Change | Difference, given: str, base: str) -> ConvertError:
    fix, component = "ckpt inspect shows the names of both.", like.component
    if component and len(missing) == len(wanted):
        prefix = f"{component}_*" if like.flat else f"{component}.*"
        fix = f"If {component} is another file, make adapters of one component each: `keep={prefix!r}` or `drop={prefix!r}`."
    return ConvertError(
        f"{given} changes {len(wanted)} modules, and {len(missing)} of them are not in {base}: {some(missing)}.",
        why="Left out, they would be lost.",
        fix=fix,
    )


def _ways(path: str, known: Iterable[str], separator: str) -> list[Way]:
    """The ways from one path to all that end as it does: the longer the common end the earlier."""
    parts = path.split(separator)
    found: dict[Way, int] = {}
    for base in known:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(parts), reversed(base.split(separator)), strict=False))
        common = sum(1 for _ in same)
        if common and (separator == "." or common == len(parts)):  # of a part with underscores only the whole is meant
            end = len(separator.join(parts[-common:]))
            found[Way(path[: len(path) - end], base[: len(base) - end])] = common
    found.pop(Way(), None)
    return sorted(found, key=lambda way: -found[way])
