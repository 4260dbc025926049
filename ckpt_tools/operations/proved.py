"""What `ckpt prove` says. The fields are the contract of `ckpt prove --json`, see docs/json.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ckpt_tools.text import Report


@dataclass(frozen=True, slots=True)
class Run:
    """One of the two models that ran.

    Attributes:
        path: its checkpoint. model: what made it.
        digest: SHA-256 over the digests of its checkpoint's tensors, where a certificate was asked for; else the empty text.
    """

    path: str
    model: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """Where two models part.

    Attributes:
        where, new_where: the module's path in the old and in the new model. kind, new_kind: its class in each.
        place: "module": its inputs are equal and its outputs are not; "code": the modules in it are equal, and what its own
            code does between them is not.
        after, before: (of code) the last module in it that is equal, and the first one that is given other numbers.
        reasons: what differs, the likeliest first; empty where it is not known.
    """

    where: str
    new_where: str
    kind: str
    new_kind: str
    place: Literal["module", "code"]
    after: str = ""
    before: str = ""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that two paired modules of one class have with other values.

    Attributes:
        where: the module's path in the old model. name: the setting's. old, new: its values, as Python writes them.
    """

    where: str
    name: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Unproved:
    """A tensor of the new model whose numbers are not the old model's, and that the outputs do not show.

    Attributes:
        name: its name. reached: how many of its elements an output depends on. numel: how many it has.
    """

    name: str
    reached: int
    numel: int


@dataclass(slots=True, repr=False)
class Proved(Report):
    """Whether two models compute the same; true when they do, and no tensor with other numbers is left unproved.

    Attributes:
        old, new: the two models.
        inputs: what was put in, as text. input_digest: SHA-256 of all of its bytes. seed, runs: which numbers, how many sets.
        dtype: what was computed in: "float64", or "float32" where a model does not run in that, or without a given
            tolerance a small difference is gone in that.
        equal: the verdict on the outputs. largest: the largest difference of two outputs. relative: that by the largest output.
            tolerance: how much `relative` may be.
        outputs: how many tensors of the outputs were compared. left_out: those that only one of the models gives.
        unproved: tensors of the new model of which the outputs tell nothing.
        modules: how many modules of the old model have a partner in the new one. calls: how many of their calls were compared.
        fault: where they part, if they do. settings: differences between paired modules, which may matter in training only.
        versions: of python, torch and ckpt_tools.
    """

    old: Run
    new: Run
    inputs: list[str] = field(default_factory=list)
    input_digest: str = ""
    seed: int = 0
    runs: int = 0
    dtype: str = ""
    equal: bool = False
    largest: float | None = None
    relative: float | None = None
    tolerance: float = 0.0
    outputs: int = 0
    left_out: list[str] = field(default_factory=list)
    unproved: list[Unproved] = field(default_factory=list)
    modules: int = 0
    calls: int = 0
    fault: Fault | None = None
    settings: list[Setting] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.equal and not self.unproved
