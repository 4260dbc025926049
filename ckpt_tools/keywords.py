"""Keywords that a function does not have, and what people mean who give them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckpt_tools.text import did_you_mean

# What other libraries call it -> the arguments here, of which those that the function has are named.
_MEANT = {
    "strict": ("allow_missing", "allow_unexpected"), "ignore_mismatched_sizes": ("on_mismatch",),
    "device": ("map_location",), "device_map": ("map_location",), "location": ("map_location",),
    "torch_dtype": ("dtype",), "precision": ("dtype",), "half": ("dtype",),
    "force": ("overwrite",), "exist_ok": ("overwrite",), "max_shard_size": ("shard_size",),
    "prefix": ("strip_prefix", "add_prefix"), "strip": ("strip_module", "strip_prefix"), "key": ("select",),
    "exclude": ("drop",), "include": ("keep",), "remove": ("drop",), "adapter": ("lora",),
}  # fmt: skip
_SAID = {
    "weights_only": "Nothing that a file says is ever executed: leave it out.",
    "device": "Tensors go where the model has its own.",
}


def check_keywords(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for a keyword that the function does not have, with the one that is meant."""
    for name in given:
        if name in known:
            continue
        meant = [f"`{other}`" for other in _MEANT.get(name, ()) if other in known]
        hint = f"Here it is {' and '.join(meant)}." if meant else _SAID.get(name) or did_you_mean(name, known)
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}. {hint}".rstrip(" "))
