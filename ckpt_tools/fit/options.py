"""The options that name a target, and those that say what becomes of tensors without a partner in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ckpt_tools.errors import UsageError
from ckpt_tools.tree.arguments import Arguments, Renames, Schemes, Sizes
from ckpt_tools.tree.options import Options, flag, option, record, several

if TYPE_CHECKING:
    from ckpt_tools.matching import Stages

OnMismatch: TypeAlias = Literal["error", "reinit", "overlap", "skip"]
COMPARING = ("structure",)  # the stages that look at what models compute


@record
class LikeOptions(Options):
    """What a checkpoint is compared with or fitted to."""

    heading = "Target model"
    like: Any = option(
        "Make names and shapes match TARGET: a checkpoint, package.module:callable or ./models.py:Net (imported).",
        metavar="TARGET", common=True, in_code="An `nn.Module` or a state dict too.",
    )  # fmt: skip
    like_args: Arguments | None = option(
        """Arguments for TARGET: '{"num_classes": 200}'.""", metavar="JSON", in_code="Or a mapping."
    )


@record
class PartnerOptions(Options):
    """How tensors find their partners."""

    heading = "Target model"
    match: Stages | None = option(
        "How to pair tensors: by name without wrappers (the default); also without a common prefix or suffix; also by shape, "
        "order and names of layers; also by values, for two copies of one network; or just in order.",
        choices=["exact+wrappers", "names", "structure", "values", "position"],
    )
    allow_reshape: bool = flag("Also pair tensors whose shapes differ by sizes of 1, or by a flatten before a linear layer.")
    pair: Renames = several(
        "OLD of IN is NEW of TARGET: tensors or modules, by name, glob (*) or number ({i} on both sides).",
        metavar="OLD=NEW", in_code="`OLD=NEW` texts, pairs, or a mapping.",
    )  # fmt: skip

    @property
    def stages(self) -> Stages | None:
        return self.match


@record
class RunOptions(PartnerOptions):
    """The model that IN was made by, which is run beside the target."""

    from_: Any = option(
        "The model class or function of IN, as for TARGET: both run once, and the order of their layers decides what names and "
        "shapes do not.", metavar="CALLABLE", in_code="An `nn.Module` too.",
    )  # fmt: skip
    input: str | Sequence[str] = several(
        "Input of both models, as in ckpt prove (1x3x224x224, input_ids=1x16:30522) [common ones are tried].",
        metavar="[NAME=]SHAPE[:N]",
    )  # fmt: skip

    def check(self) -> None:
        """Raise UsageError for options about the model of IN where nothing would ask it."""
        super().check()
        if self.input and self.stages not in COMPARING:
            raise UsageError("`input` needs `from_`, the model of IN.")
        if self.from_ is not None and self.match not in (None, *COMPARING):
            raise UsageError(
                f"`from_` decides what `match='structure'` leaves open; `match={self.match!r}` leaves nothing to it."
            )

    @property
    def stages(self) -> Stages | None:
        return self.match or ("structure" if self.from_ is not None else None)


@record
class PlanOptions(Options):
    """A plan that names the partners."""

    heading = "Target model"
    plan: str | os.PathLike[str] | None = option(
        "A plan (TOML) that says what becomes of every tensor: from ckpt match, your own, or one that comes with ckpt "
        "(llama-meta-to-hf ...: docs/plans.md). PLAN:reverse goes the other way.",
        metavar="PLAN",
    )  # fmt: skip
    plan_value: Sizes | None = several(
        "A size that the plan needs: heads=32 [from config.json beside IN].",
        default=None, metavar="NAME=N", in_code="Or a mapping.",
    )  # fmt: skip


@record
class LeftOverOptions(Options):
    """What becomes of tensors that the target wants otherwise."""

    heading = "Target model"
    reinit: Schemes | None = several(
        "Initial values for tensors that IN lacks: zeros, ones, normal:STD, trunc_normal:STD, uniform:A, xavier_uniform, "
        "xavier_normal, kaiming_uniform, kaiming_normal, orthogonal, target (from its constructor), default (PyTorch's for "
        "the layer). Without GLOB for weights only: biases get zeros, norms ones. The last glob that matches counts.",
        default=None, metavar="[GLOB=]SCHEME",
        in_code="`SCHEME`, `GLOB=SCHEME` texts, or a mapping from globs.",
    )  # fmt: skip
    on_mismatch: OnMismatch = option(
        "What to do with a tensor of another shape: refuse it, initialise it anew (as PyTorch does, or by --reinit), keep the "
        "rows and columns that both have, or leave it out.",
        choices=["error", "reinit", "overlap", "skip"], default="error",
    )  # fmt: skip
    adapt: bool = flag("Fit a first convolution to other channels, position embeddings to another grid.")
    seed: int = option("Random seed for initial values [0].", default=0, metavar="N")


@record
class FitOptions(LikeOptions, PartnerOptions, PlanOptions, LeftOverOptions):
    """What a checkpoint is fitted to, how, and what becomes of tensors that the target wants otherwise."""

    def check(self) -> None:
        """Raise UsageError for an option about a target where none is named, or one that a plan settles."""
        super().check()
        about = [name for name in self.asked() if name in FitOptions.options and name not in ("like", "plan")]
        if self.plan is None and self.plan_value is not None:
            raise UsageError("`plan_value` is about a plan; `plan=PLAN` is missing.")
        alone = about if self.plan is None else [name for name in about if name == "like_args"]
        if alone and self.like is None:
            raise UsageError(f"`{alone[0]}` is about a target; `like=TARGET` is missing.")
        partners = [name for name in ("match", "allow_reshape", "pair") if name in self.asked()]
        if self.plan is not None and partners:
            raise UsageError(f"`{partners[0]}` does not go with `plan`, which names the partners.")

    @property
    def targeted(self) -> bool:
        return self.like is not None or self.plan is not None
