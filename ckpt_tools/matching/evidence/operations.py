"""What torch's operations mean for the flow between layers: which pass on, which multiply, which make something new."""

from __future__ import annotations

_ALIASES = {
    "unsafe_view": "view", "reshape": "view", "flatten": "view", "unflatten": "view", "view_as": "view", "reshape_as": "view",
    "safe_softmax": "softmax", "log_softmax": "softmax", "special_softmax": "softmax",
    "unsafe_split": "split", "split_with_sizes": "split", "unsafe_chunk": "chunk", "tensor_split": "chunk",
    "swapaxes": "transpose", "swapdims": "transpose", "concat": "cat", "concatenate": "cat", "multiply": "mul", "divide": "div",
    "true_divide": "div", "subtract": "sub", "numpy_T": "t", "adaptive_avg_pool1d": "mean", "adaptive_avg_pool2d": "mean",
    "avg_pool1d": "mean", "avg_pool2d": "mean", "adaptive_avg_pool3d": "mean", "avg_pool3d": "mean",
    "max_pool2d_with_indices": "max_pool2d", "swish": "silu",
}  # fmt: skip


def plain_name(name: str) -> str:
    """One name for what torch calls an operation on its levels.

    >>> plain_name("_softmax"), plain_name("add_"), plain_name("_unsafe_view"), plain_name("native_layer_norm")
    ('softmax', 'add', 'view', 'layer_norm')
    """
    name = name.strip("_").removeprefix("native_")
    return _ALIASES.get(name, name)


# The numbers pass on as they are, in other places at most.
PASSING = frozenset((
    "view", "permute", "transpose", "t", "mT", "expand", "expand_as", "clone", "contiguous", "detach", "to", "to_copy",
    "type_as", "alias", "squeeze", "unsqueeze", "dropout", "feature_dropout", "float", "double", "half", "bfloat16",
    "lift_fresh", "lift_fresh_copy", "repeat", "roll", "flip", "pad", "constant_pad_nd", "slice", "select", "split",
    "chunk", "unbind", "narrow", "movedim", "moveaxis", "copy", "add", "masked_fill", "where", "index_put",
    "slice_scatter", "select_scatter", "neg", "scalar_implicit", "alias_copy", "broadcast_to", "repeat_interleave",
    "unfold", "im2col"
))  # fmt: skip
# A weight beside numbers is one more part of a sum (or of a list); everywhere else it is a layer that they go through.
ADDING = frozenset((
    "add", "sub", "rsub", "cat", "stack", "where", "masked_fill", "index_put", "copy", "slice_scatter", "select_scatter",
    "maximum", "minimum"
))  # fmt: skip
# What they make depends on numbers in no way that a gradient would know, or on sizes alone.
CONSTANT = frozenset((
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and",
    "bitwise_or", "bitwise_not", "isinf", "isnan", "any", "all", "arange", "zeros", "ones", "full", "zeros_like",
    "ones_like", "full_like", "empty", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor",
    "rand", "randn", "rand_like", "randn_like", "bernoulli", "size", "sym_size", "argmax", "argmin", "eye",
    "tril_indices", "triu_indices"
))  # fmt: skip
# The places of the two factors among the arguments.
FACTORS = {
    "mm": (0, 1), "bmm": (0, 1), "matmul": (0, 1), "linear": (0, 1), "mv": (0, 1), "dot": (0, 1), "addmm": (1, 2),
    "baddbmm": (1, 2), "addbmm": (1, 2), "einsum": (0, 1),
}  # fmt: skip
CONVOLUTIONS = ("convolution", "conv1d", "conv2d", "conv3d", "conv_transpose")
ATTENTION = "scaled_dot_product"
# The parts that numbers play in an operation with others. What else is said of their way (activations, pools) differs more
# between two ways of writing one network.
ROLES = frozenset({"query", "key", "product", "times", "over", "minus"})
