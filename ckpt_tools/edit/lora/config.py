"""adapter_config.json: what PEFT says of an adapter beside its tensors (peft/tuners/lora/config.py)."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ckpt_tools.errors import ConvertError, MissingFileError, NotACheckpointError
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.source import Address
from ckpt_tools.parts.open import open_source

CONFIG = "adapter_config.json"
_Value = TypeVar("_Value")
# Initialisations that take something out of the base, which the file of the base does not tell
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# What PEFT itself does not merge, or merges with more than the tensors say
_NOT_MERGED = {
    "alora_invocation_tokens": "an activated LoRA acts from some token on: it has no merged form",
    "arrow_config": "arrow chooses between adapters token by token: it has no merged form",
    "use_qalora": "QA-LoRA is for quantised bases only",
    "use_bdlora": "its matrices are block-diagonal",
    "kasa_config": "KaSA takes singular components out of the base",
    "monteclora_config": "MonteCLoRA draws samples",
    "layer_replication": "the adapter is for a base whose layers are repeated",
    "trainable_token_indices": "it has rows of an embedding, which are not read here",
}  # fmt: skip
_WORK = 1_000_000_000  # steps that the patterns of a file may take in all, of some three nanoseconds
_LONGEST = 2000  # characters of a pattern, or of a module's name
_STEPS_OF_KEY, _STEPS_OF_CHARACTER = 50_000, 1000  # to compile a pattern
# A repeated group and a reference to one have no bound; a range beyond ASCII, or without regard to case, takes long to compile.
_SLOW = re.compile(r"(?s)\)[*+{]|\\\d|\(\?P=|\[.*(?:[^\x00-\x7f]|\\[uUN])|\(\?[a-zA-Z-]*i.*\[")


@dataclass(frozen=True, slots=True)
class Config:
    rank: int | None = None
    alpha: float | None = None
    rslora: bool = False
    dora: bool | None = None
    biases: bool | None = None
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    fan_in_fan_out: bool = False
    modules_to_save: tuple[str, ...] = ()
    base: str | None = None
    version: tuple[int, int] = (0, 0)
    mica: bool = False
    ties: bool = False
    parameters: tuple[str, ...] = ()

    def scale(self, module: str, rank: int) -> float:
        """What the product of a module's factors is multiplied with; `alpha_pattern` as PEFT's `get_pattern_key` reads it."""
        assert self.alpha is not None
        alpha = _of(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def rank_of(self, module: str) -> int | None:
        return _of(self.rank_pattern, module, self.rank)

    def parameters_of(self, module: str) -> list[str]:
        """The parameters of a module that `target_parameters` may mean, as PEFT's `_inject_parameters` reads it."""
        ends = (name.rpartition(".") for name in self.parameters)
        return list(dict.fromkeys(last for parent, _, last in ends if f".{module}".endswith(f".{parent}" if parent else "")))

    def saves(self, name: str) -> bool:
        return any(f".{module}." in f".{name}" for module in self.modules_to_save)


def read_config(beside: Path) -> dict[str, Any] | None:
    """The adapter_config.json beside a file, which may be an address; None where there is none."""
    path = beside.beside(CONFIG) if isinstance(beside, Address) else beside.parent / CONFIG
    try:
        source = open_source(path)
    except MissingFileError:
        return None
    try:
        said = load_json(source.read(0, source.size))
    except ValueError as error:
        raise NotACheckpointError(f"{path} is not JSON.", why=f"{error}.") from None
    finally:
        source.close()
    if not isinstance(said, dict):
        raise NotACheckpointError(f"{path} is not what PEFT writes: no JSON object.")
    return said


def check_kind(said: Mapping[str, Any], path: str, modules: Iterable[str], *, among: int = 1) -> Config:
    """The configuration of an adapter that can be merged; `among` says of how many in one file."""
    kind = said.get("peft_type")
    if kind != "LORA":
        raise ConvertError(
            f"{path} is an adapter of the kind {str(kind)[:40]!r}; only LoRA (with rsLoRA and DoRA) is merged here.",
            fix="Merge it where it was trained: PEFT's merge_and_unload, then save_pretrained.",
        )
    for key, why in _NOT_MERGED.items():
        if said.get(key):
            raise ConvertError(f"{path} cannot be merged ({key}).", why=f"{why[0].upper()}{why[1:]}.")
    start = str(said.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGES_BASE):
        raise ConvertError(
            f"{path} was initialised by {start[:40]!r}, which changes the base before training.",
            why="The adapter is for that changed base, and the file of the base is not it.",
            fix="Save it with save_pretrained(path_initial_model_for_weight_conversion=...), which makes a plain LoRA of it.",
        )
    config = parse(said, path)
    _check_cost(config, list(modules), path, _WORK / among)
    return config


def parse(said: Mapping[str, Any], path: str) -> Config:
    def get(key: str, wrong: str, is_good: Callable[[Any], bool], empty: Any = None) -> Any:
        value = said.get(key)
        if value is None or (empty is not None and not value):
            return empty
        if not is_good(value):
            raise ConvertError(f"{path}: {key} in {CONFIG} {wrong}.")
        return value

    def flag(key: str) -> Any:
        return get(key, "is neither true nor false", lambda value: isinstance(value, bool))

    def pattern(key: str, is_good: Callable[[Any], bool]) -> Any:
        wrong = "does not map names to numbers"
        return get(key, wrong, lambda value: isinstance(value, dict) and all(map(is_good, value.values())), {})

    def names(key: str) -> tuple[str, ...]:
        def is_good(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(name, str) for name in value)

        return tuple(get(key, "is not a list of names", is_good, ()))

    alpha = get("lora_alpha", "is not a finite number", _is_number)
    alphas = {key: float(value) for key, value in pattern("alpha_pattern", _is_number).items()}
    base, version = said.get("base_model_name_or_path"), re.match(r"(\d{1,4})\.(\d{1,4})", str(said.get("peft_version")))
    return Config(
        rank=get("r", "is not a whole number above 0", _is_whole), alpha=None if alpha is None else float(alpha),
        rslora=bool(flag("use_rslora")), dora=flag("use_dora"), biases=flag("lora_bias"), alpha_pattern=alphas,
        rank_pattern=pattern("rank_pattern", _is_whole), fan_in_fan_out=bool(flag("fan_in_fan_out")),
        modules_to_save=names("modules_to_save"), base=base if isinstance(base, str) else None,
        version=(int(version[1]), int(version[2])) if version else (0, 0), mica=said.get("init_lora_weights") == "mica",
        ties=said.get("ensure_weight_tying") is True, parameters=names("target_parameters"),
    )  # fmt: skip


def _is_whole(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _is_number(value: object) -> bool:
    return (type(value) is int and abs(value) < 1 << 53) or (type(value) is float and math.isfinite(value))


def _check_cost(config: Config, modules: list[str], path: str, most: float) -> None:
    """Refuse patterns that are not regular expressions, or that could take forever: a stranger wrote them."""
    longest, cost = max(map(len, modules), default=0), 0
    longest += max(map(len, config.parameters), default=-1) + 1
    rank_pattern = config.rank_pattern if config.parameters else ()  # else the factors say their rank
    for key in (*config.alpha_pattern, *rank_pattern):
        where = "alpha_pattern" if key in config.alpha_pattern else "rank_pattern"
        repeats = len(re.findall(r"[*+{]|(?<!\()\?", key))  # each may end anywhere, each alternative be tried with each other
        ends = math.comb(min(longest, _LONGEST) + repeats, repeats) if len(key) <= _LONGEST else 0
        alternatives = math.prod(1 + part.count("|") for part in re.split(r"[()]", key))
        cost += _STEPS_OF_KEY + _STEPS_OF_CHARACTER * len(key) + max(1, len(modules)) * (longest + ends * alternatives)
        if not ends or longest > _LONGEST or cost > most or _SLOW.search(key):
            raise ConvertError(
                f"{path}: {where} in {CONFIG} has {key[:80]!r}, which could take forever to match.",
                why=f"{len(config.alpha_pattern) + len(rank_pattern)} patterns are held against {len(modules)} modules.",
                fix="Write the modules' names in full there.",
            )
        try:
            _pattern(key)
        except (re.error, OverflowError, RecursionError):
            raise ConvertError(f"{path}: {where} in {CONFIG} has {key[:80]!r}, which is not a regular expression.") from None


def _of(patterns: Mapping[str, _Value], module: str, other: _Value) -> _Value:
    return next((value for key, value in patterns.items() if _pattern(key).match(module)), other)


@functools.lru_cache(maxsize=1 << 15)
def _pattern(key: str) -> re.Pattern[str]:
    """As PEFT's `get_pattern_key`: the end of the path, from a dot on."""
    return re.compile(rf"(.*\.)?({key})$")
