"""State dicts of the families that plans are shipped for: names and shapes as in the libraries, numbers all different."""

from collections.abc import Callable
from itertools import count

import torch

State = dict[str, torch.Tensor]
WIDTH, HEADS, KV_HEADS, HIDDEN, WORDS, LAYERS = 8, 4, 2, 12, 10, 2
HEAD = WIDTH // HEADS * 2  # larger than width / heads: `head_dim` is a size of its own
QKV = ("query", "key", "value")


def filled(shapes: dict[str, tuple[int, ...]]) -> State:
    """Tensors of these shapes; no number is in two of them."""
    numbers = count()
    made = {}
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        made[name] = torch.tensor([float(next(numbers)) for _ in range(size)]).reshape(shape)
    return made


def layers(pattern: dict[str, tuple[int, ...]], prefix: str) -> dict[str, tuple[int, ...]]:
    """The shapes of one layer, for each layer."""
    return {f"{prefix.format(layer)}{name}": shape for layer in range(LAYERS) for name, shape in pattern.items()}


def linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    """A weight and a bias."""
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def meta() -> State:
    """Llama as Meta's code and torchtitan have it."""
    inside = {
        "attention.wq.weight": (HEADS * HEAD, WIDTH), "attention.wk.weight": (KV_HEADS * HEAD, WIDTH),
        "attention.wv.weight": (KV_HEADS * HEAD, WIDTH), "attention.wo.weight": (WIDTH, HEADS * HEAD),
        "feed_forward.w1.weight": (HIDDEN, WIDTH), "feed_forward.w2.weight": (WIDTH, HIDDEN),
        "feed_forward.w3.weight": (HIDDEN, WIDTH), "attention_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,),
    }  # fmt: skip
    ends = {"norm.weight": (WIDTH,), "output.weight": (WORDS, WIDTH)}
    return filled({"tok_embeddings.weight": (WORDS, WIDTH), **layers(inside, "layers.{}."), **ends})


def llama() -> State:
    """LlamaForCausalLM of transformers."""
    inside = {
        "self_attn.q_proj.weight": (HEADS * HEAD, WIDTH), "self_attn.k_proj.weight": (KV_HEADS * HEAD, WIDTH),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD, WIDTH), "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD),
        "mlp.gate_proj.weight": (HIDDEN, WIDTH), "mlp.up_proj.weight": (HIDDEN, WIDTH), "mlp.down_proj.weight": (WIDTH, HIDDEN),
        "input_layernorm.weight": (WIDTH,), "post_attention_layernorm.weight": (WIDTH,),
    }  # fmt: skip
    ends = {"model.norm.weight": (WIDTH,), "lm_head.weight": (WORDS, WIDTH)}
    return filled({"model.embed_tokens.weight": (WORDS, WIDTH), **layers(inside, "model.layers.{}."), **ends})


def megatron() -> State:
    """GPTModel of Megatron-core with the local layers; the vocabulary is padded by 6."""
    rows = (HEADS + 2 * KV_HEADS) * HEAD
    inside = {
        "input_layernorm.weight": (WIDTH,), "self_attention.linear_qkv.weight": (rows, WIDTH),
        "self_attention.linear_proj.weight": (WIDTH, HEADS * HEAD), "pre_mlp_layernorm.weight": (WIDTH,),
        "mlp.linear_fc1.weight": (2 * HIDDEN, WIDTH), "mlp.linear_fc2.weight": (WIDTH, HIDDEN),
    }  # fmt: skip
    ends = {"decoder.final_layernorm.weight": (WIDTH,), "output_layer.weight": (WORDS + 6, WIDTH)}
    return filled({"embedding.word_embeddings.weight": (WORDS + 6, WIDTH), **layers(inside, "decoder.layers.{}."), **ends})


def gpt2(*, transformers: bool) -> State:
    """GPT-2 of transformers, whose layers are [in, out], or of nanoGPT; the embedding is tied."""
    sizes = {
        "attn.c_attn": (WIDTH, 3 * WIDTH), "attn.c_proj": (WIDTH, WIDTH), "mlp.c_fc": (WIDTH, HIDDEN),
        "mlp.c_proj": (HIDDEN, WIDTH),
    }  # fmt: skip
    inside: dict[str, tuple[int, ...]] = {
        f"{name}.{part}": (WIDTH,) for name in ("ln_1", "ln_2") for part in ("weight", "bias")
    }
    for name, (into, out) in sizes.items():
        inside |= {f"{name}.weight": (into, out) if transformers else (out, into), f"{name}.bias": (out,)}
    ends = {"transformer.ln_f.weight": (WIDTH,), "transformer.ln_f.bias": (WIDTH,)}
    begin = {"transformer.wte.weight": (WORDS, WIDTH), "transformer.wpe.weight": (5, WIDTH)}
    state = filled({**begin, **layers(inside, "transformer.h.{}."), **ends})
    return {**state, "lm_head.weight": state["transformer.wte.weight"]}


def bert() -> State:
    """The encoder of BertModel of transformers."""
    inside: dict[str, tuple[int, ...]] = {}
    for name in QKV:
        inside |= linear(f"attention.self.{name}", WIDTH, WIDTH)
    inside |= linear("attention.output.dense", WIDTH, WIDTH) | linear("attention.output.LayerNorm", WIDTH, WIDTH)
    inside |= linear("intermediate.dense", HIDDEN, WIDTH) | linear("output.dense", WIDTH, HIDDEN)
    inside |= linear("output.LayerNorm", WIDTH, WIDTH)
    shapes = {name: shape[:1] if "LayerNorm" in name else shape for name, shape in inside.items()}
    return filled(layers(shapes, "encoder.layer.{}."))


_HF_ENDS = ("vit.layernorm", "classifier")
_HF_BEGIN = ("vit.embeddings.cls_token", "vit.embeddings.position_embeddings", "vit.embeddings.patch_embeddings.projection")
# library -> class token, positions, patches; layer; attention, its output, norms, the two layers behind; norm, head
VIT = {
    "timm": (
        ("cls_token", "pos_embed", "patch_embed.proj"), "blocks.{}.",
        ("attn.qkv.", "attn.proj", "norm1", "norm2", "mlp.fc1", "mlp.fc2"), ("norm", "head"),
    ),
    "torchvision": (
        ("class_token", "encoder.pos_embedding", "conv_proj"), "encoder.layers.encoder_layer_{}.",
        ("self_attention.in_proj_", "self_attention.out_proj", "ln_1", "ln_2", "mlp.0", "mlp.3"), ("encoder.ln", "heads.head"),
    ),
    "hf": (
        _HF_BEGIN, "vit.encoder.layer.{}.",
        ("attention.attention.{}.", "attention.output.dense", "layernorm_before", "layernorm_after", "intermediate.dense",
         "output.dense"), _HF_ENDS,
    ),
    "hf5": (
        _HF_BEGIN, "vit.layers.{}.",
        ("attention.{:.1}_proj.", "attention.o_proj", "layernorm_before", "layernorm_after", "mlp.fc1", "mlp.fc2"), _HF_ENDS,
    ),
}  # fmt: skip


def vit(library: str) -> State:
    """A vision transformer of a library, with 5 classes."""
    (token, positions, patches), layer, parts, (norm, head) = VIT[library]
    names = dict.fromkeys(parts[0].format(name) for name in QKV)
    inside: dict[str, tuple[int, ...]] = {}
    for name in names:
        rows = 3 * WIDTH // len(names)
        inside |= {f"{name}weight": (rows, WIDTH), f"{name}bias": (rows,)}
    inside |= linear(parts[1], WIDTH, WIDTH) | linear(parts[4], HIDDEN, WIDTH) | linear(parts[5], WIDTH, HIDDEN)
    for name in parts[2:4]:
        inside |= {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
    begin = {token: (1, 1, WIDTH), positions: (1, 5, WIDTH), f"{patches}.weight": (WIDTH, 3, 2, 2), f"{patches}.bias": (WIDTH,)}
    end = {f"{norm}.weight": (WIDTH,), f"{norm}.bias": (WIDTH,), **linear(head, 5, WIDTH)}
    return filled({**begin, **layers(inside, layer), **end})


def torch_encoder() -> State:
    """What torch itself calls an encoder's tensors."""
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN)
    state = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).state_dict()
    return filled({name: tuple(tensor.shape) for name, tensor in state.items()})


SIZES = {"heads": HEADS}
MEGATRON = {"heads": HEADS, "groups": KV_HEADS, "vocab_size": WORDS}
# of each plan the two state dicts and the sizes that it asks for
SIDES: dict[str, tuple[Callable[[], State], Callable[[], State], dict[str, int]]] = {
    "llama-meta-to-hf": (meta, llama, SIZES), "llama-torchtitan-to-hf": (meta, llama, SIZES),
    "llama-meta-to-torchtitan": (meta, meta, {}), "llama-megatron-to-hf": (megatron, llama, MEGATRON),
    "gpt2-hf-to-nanogpt": (lambda: gpt2(transformers=True), lambda: gpt2(transformers=False), {}),
    "bert-hf-to-torch": (bert, torch_encoder, {}), "vit-timm-to-hf": (lambda: vit("timm"), lambda: vit("hf"), {}),
    "vit-timm-to-hf5": (lambda: vit("timm"), lambda: vit("hf5"), {}),
    "vit-torchvision-to-hf": (lambda: vit("torchvision"), lambda: vit("hf"), {}),
    "vit-torchvision-to-hf5": (lambda: vit("torchvision"), lambda: vit("hf5"), {}),
    "vit-timm-to-torchvision": (lambda: vit("timm"), lambda: vit("torchvision"), {}),
}  # fmt: skip
