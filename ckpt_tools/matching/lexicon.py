"""What the parts of tensor names mean: the words that libraries use for one thing, and the order that some words imply.

Collected from the names that torchvision, timm, transformers, fairseq and original repositories give. A word that is not here
means nothing, which costs a match at most: evidence that is missing makes a pair ambiguous, never another pair certain.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_VERSION = re.compile(r"(?<![A-Za-z])[A-Za-z](?=\d)")  # the v of `mobilenet_v2` is no value projection
LETTER = "@"
_NUMBER = re.compile(r"\d+")

# Concepts in groups: two names that have different concepts of one group mean different things.
GROUPS: dict[str, dict[str, str]] = {
    "attention part": {
        "query": "q query queries wq",
        "key": "k key keys wk",
        "value": "v value values wv",
        "out": "o out wo proj projection output dense",
    },
    "branch": {"shortcut": "downsample shortcut skip identity proj residual_proj projection_shortcut"},
    "sublayer": {
        "attention": "attn attention sa mha msa selfattention selfattn",
        "cross": "cross crossattention crossattn encdec xattn",
        "feed-forward": "mlp ffn ff feedforward intermediate pwff",
    },
    "partition": {"window": "window windowed", "grid": "grid"},
    "gated": {"gate": "gate wg", "up": "up wu", "down": "down wd"},
    "squeeze": {"se": "se squeeze excite excitation scse"},
    "token": {
        "class": "cls class",
        "distillation": "dist distill distillation distilled",
        "mask": "mask",
        "register": "reg register registers",
    },
    "embedding": {
        "position": "pos position positional wpe",
        "word": "word tok token wte words tokens vocab",
        "type": "type segment segments",
    },
    "end": {
        "head": "head classifier logits predictions heads lm",
        "pooler": "pooler pool pooled",
        "stem": "stem patch embedder",
    },
    "last": {"last": "head classifier logits predictions heads fc"},
    "kind": {
        "norm": "norm bn ln gn layernorm batchnorm groupnorm rmsnorm normalization layrnorm",
        "convolution": "conv convolution",
        "depthwise": "dw dwconv depthwise",
    },
}
_CONCEPTS: dict[str, frozenset[tuple[str, str]]] = {}
for _group, _table in GROUPS.items():
    for _concept, _words in _table.items():
        for _each in _words.split():
            _CONCEPTS[_each] = _CONCEPTS.get(_each, frozenset()) | {(_group, _concept)}

# Words that say where in a block a layer is used; only their order counts.
_RANKS = {
    **dict.fromkeys(("input", "before", "first", "pre", "start"), 0),
    **dict.fromkeys(("expand", "pw", "expansion"), 5),
    **dict.fromkeys(("attn", "attention", "self", "sa", "mha", "msa", "token", "dw", "depthwise"), 10),
    **dict.fromkeys(("cross", "encdec", "encoder"), 20),
    **dict.fromkeys(("intermediate", "ffn", "mlp", "ff", "feedforward", "feed", "fc", "channel", "channels"), 30),
    **dict.fromkeys(("output", "after", "second", "post", "final", "last", "out", "end", "pwl"), 40),
}
_VAGUE = frozenset({("attention part", "out"), ("branch", "shortcut")})
QKV = frozenset(("attention part", part) for part in ("query", "key", "value"))


@lru_cache(maxsize=65536)
def words(component: str) -> tuple[str, ...]:
    """The words of a name's part, lower case, without numbers."""
    return tuple(word.lower() for word in _WORD.findall(_VERSION.sub("", component)))


@lru_cache(maxsize=65536)
def numbers(component: str) -> tuple[int, ...]:
    """The numbers in a name's part: `conv1_2` has 1 and 2; a part that is one letter counts from a."""
    if len(component) == 1 and component.isalpha():
        return (ord(component.lower()) - ord("a") + 1,)
    return tuple(int(digits[:18]) for digits in _NUMBER.findall(component))


@lru_cache(maxsize=65536)
def stem(component: str) -> str:
    """A name's part without its numbers: `conv1` and `conv2` have one stem, and so have single letters."""
    if len(component) == 1 and component.isalpha():
        return LETTER
    return _NUMBER.sub("#", component)


@lru_cache(maxsize=65536)
def concepts(component: str) -> frozenset[tuple[str, str]]:
    """The (group, concept) pairs that a part of a name stands for."""
    found: frozenset[tuple[str, str]] = frozenset()
    for word in words(component):
        found |= _CONCEPTS.get(word, frozenset())
    return sharpened(found)


def sharpened(found: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """Concepts without those that a sharper one explains: in `q_proj` and `up_proj`, `proj` says only that it is a layer."""
    return found - _VAGUE if found & QKV or any(group == "gated" for group, _ in found) else found


_ENDS = {
    **dict.fromkeys(("pre", "embeddings", "embedding", "embed", "embedder", "stem", "patch", "first", "input"), "before"),
    **dict.fromkeys(("final", "last", "post", "f", "head"), "behind"),
}


def end_of(path: Sequence[str]) -> str | None:
    """At which end of a network its name puts a layer: "before" or "behind" the blocks, wherever it is registered."""
    found = {_ENDS[word] for component in path for word in words(component) if word in _ENDS}
    return found.pop() if len(found) == 1 else None


@lru_cache(maxsize=65536)
def rank(component: str) -> int | None:
    """Where in a block a part of a name says that it is used, or None: `pre_attention` comes before `post_attention`."""
    ranks = [_RANKS[word] for word in words(component) if word in _RANKS]
    if len(ranks) > 1 and ranks[0] in (0, 40):  # before or after what the next word names
        return ranks[1] + (1 if ranks[0] else -1)
    return ranks[0] if ranks else None
