"""`ckpt_tools.steps`: a conversion said step by step, each a new plan; what carries it out is `convert` itself.

It imports torch for `state_dict` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from ckpt_tools.errors import UsageError
from ckpt_tools.fit.options import FitOptions
from ckpt_tools.io.source import File, as_path
from ckpt_tools.operations.convert.edits import Edits
from ckpt_tools.operations.convert.inputs import open_input
from ckpt_tools.operations.convert.options import ConvertOptions, ObjectsPolicy, SaveOptions
from ckpt_tools.operations.convert.report import Converted
from ckpt_tools.operations.convert.run import convert_with
from ckpt_tools.tree.arguments import Location, Renames
from ckpt_tools.tree.options import as_keywords, natural
from ckpt_tools.values.pytorch import need_torch

if TYPE_CHECKING:
    import torch

# The order in which `convert` does it; those of a row come together.
_ORDER = (
    ("select",), ("objects",), ("ema",), ("slim",), ("keep", "drop"), ("dequantize",),
    ("strip_module",), ("unwrap",), ("strip_prefix",),
    ("rename",), ("add_prefix",), ("add_module",), ("fit",), ("map_location",), ("cast",),
)  # fmt: skip
_PLACES = {step: place for place, row in enumerate(_ORDER) for step in row}
_SEVERAL = ("keep", "drop", "rename")


@natural
def steps(path: File) -> Steps:
    """Begin a conversion of the checkpoint at `path`, step by step; nothing is read before it is saved or loaded.

    >>> steps("in.pth").select("model").unwrap().cast("bf16").save("w.safetensors")  # doctest: +SKIP
    """
    return Steps(path)


@dataclass(frozen=True, slots=True)
class Steps:
    """What is to become of a checkpoint. Every step gives a new plan and leaves this one as it is.

    Steps are said in the order in which `convert` carries them out: select, objects, ema, slim, keep and drop (by the names in
    the file), dequantize, strip_module, unwrap, strip_prefix, rename, add_prefix, add_module, fit, map_location, cast. Another
    is refused.

    Attributes:
        path: the checkpoint. options: what `convert` is asked for. said: the steps so far.
    """

    path: File
    options: ConvertOptions = field(default_factory=ConvertOptions)
    said: tuple[str, ...] = ()

    def _step(self, step: str, **options: Any) -> Self:
        if step in self.said and step not in _SEVERAL:
            raise UsageError(f"`{step}` is said twice.")
        if later := [one for one in self.said if _PLACES[one] > _PLACES[step]]:
            order = ", ".join(" and ".join(row) for row in _ORDER)
            raise UsageError(f"`{step}` comes before `{later[0]}`, and is to be said before it.", fix=f"The order: {order}.")
        return type(self)(self.path, self.options.replace(**options), (*self.said, step))

    def select(self, where: str) -> Self:
        """One state dict or subtree, by the dotted path `where`, becomes the whole."""
        return self._step("select", select=where)

    def objects(self, policy: ObjectsPolicy) -> Self:
        """What happens to objects that are not plain data, by `policy`: "keep", "plain" or "drop"."""
        return self._step("objects", objects=policy)

    def ema(self) -> Self:
        """The averaged weights become the whole."""
        return self._step("ema", ema=True)

    def slim(self) -> Self:
        """State dicts and plain values alone, on storages no larger than they need be."""
        return self._step("slim", slim=True)

    def keep(self, glob: str, *more: str) -> Self:
        """Only tensors whose name matches `glob`, or one of `more`."""
        return self._step("keep", keep=[*self.options.keep, glob, *more])

    def drop(self, glob: str, *more: str) -> Self:
        """Without what `glob`, or one of `more`, matches, by name or dotted path."""
        return self._step("drop", drop=[*self.options.drop, glob, *more])

    def dequantize(self, dtype: Literal["bf16", "fp16", "fp32"] = "bf16") -> Self:
        """With quantised weights made plain ones of this `dtype`."""
        return self._step("dequantize", dequantize=dtype)

    def strip_module(self) -> Self:
        """Without leading `module.` in every state dict."""
        return self._step("strip_module", strip_module=True)

    def unwrap(self) -> Self:
        """Without any known wrapper in the names."""
        return self._step("unwrap", unwrap=True)

    def strip_prefix(self, prefix: str) -> Self:
        """Without the literal `prefix`."""
        return self._step("strip_prefix", strip_prefix=prefix)

    def rename(self, rules: Renames) -> Self:
        """With names changed by `rules`, as `convert` takes them."""
        more = self.options.replace(rename=rules).rename
        return self._step("rename", rename=[*self.options.rename, *more])

    def add_prefix(self, prefix: str) -> Self:
        """With the literal `prefix` before every name."""
        return self._step("add_prefix", add_prefix=prefix)

    def add_module(self) -> Self:
        """With `module.` before every name."""
        return self._step("add_module", add_module=True)

    @as_keywords(FitOptions)
    def fit(self, options: FitOptions) -> Self:
        """Fitted to a target.

        Args:
            options: those of `FitOptions`, as keywords.
        """
        return self._step("fit", **options.asked())

    def map_location(self, location: Location) -> Self:
        """With other device tags: one `location` for all, or a mapping."""
        return self._step("map_location", map_location=location)

    def cast(self, dtype: str | torch.dtype, *, only: str | Sequence[str] = ()) -> Self:
        """With float tensors in another `dtype`; `only` those whose name matches these globs."""
        globs = [only] if isinstance(only, str) else only
        return self._step("cast", dtype=dict.fromkeys(globs, dtype) if globs else dtype)

    @as_keywords(SaveOptions)
    def save(self, target: File, options: SaveOptions) -> Converted:
        """Carry the steps out and write `target`: the whole new file, or nothing. The same as `convert`.

        Args:
            target: the file to write, OUT.
            options: those of `SaveOptions`, as keywords.

        Raises:
            CkptError: see `convert`.
        """
        return convert_with(as_path(self.path), as_path(target), self.options.replace(**options.asked()))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Carry the steps out; the only state dict that is left, as live tensors on the CPU, unless `map_location` was said.

        Raises:
            NothingMatchedError: none is left, or several. CkptError: see `convert`.
        """
        need_torch("Live tensors are PyTorch's.")
        from ckpt_tools.torch.building import Builder
        from ckpt_tools.torch.loading import choose, loadable

        path = as_path(self.path)
        with ExitStack() as stack, open_input(path, self.options) as checkpoint:
            checkpoint.root = Edits(self.options).apply(checkpoint, Converted(str(path), ""), stack).root
            vars(checkpoint).pop("state_dicts", None)  # of the tree as it was
            root = loadable(choose(checkpoint, None).node, path)
            device = "cpu" if self.options.map_location is None else None
            loaded: dict[str, torch.Tensor] = Builder(checkpoint, device).build(root)
            checkpoint.source.check_unchanged()
            return loaded
