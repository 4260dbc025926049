"""Shipped plans: names and numbers are those of the library that is meant, and the way back gives every bit again."""

import argparse
import json
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import CkptError, MatchError
from tests.support import families as make
from tests.support.commands import ckpt
from tests.support.families import HEAD, HEADS, KV_HEADS, MEGATRON, SIDES, SIZES, WIDTH, WORDS, State
from tests.support.samples import converted


def other_way(plan: str) -> str:
    """The name of a plan's inverse: `llama-hf-to-meta` of `llama-meta-to-hf`."""
    family, _, sides = plan.partition("-")
    old, _, new = sides.partition("-to-")
    return f"{family}-{new}-to-{old}"


@pytest.mark.parametrize("plan", SIDES)
def test_there_and_back(plan: str, tmp_path: Path) -> None:
    """The result has the other library's names and shapes, and back again every tensor is what it was, but for the padding."""
    old, new, sizes = SIDES[plan]
    state = old()
    made = converted(state, tmp_path, plan=plan, plan_value=sizes)
    assert {name: tensor.shape for name, tensor in made.items()} == {name: tensor.shape for name, tensor in new().items()}
    more = {"padded_vocab_size": WORDS + 6} if "megatron" in plan else {}
    again = converted(made, tmp_path, plan=other_way(plan), plan_value=sizes | more)
    for name, tensor in again.items():
        if more and ("embeddings" in name or "output_layer" in name):
            assert torch.equal(tensor[:WORDS], state[name][:WORDS])
            assert not tensor[WORDS:].any()
        else:
            assert torch.equal(tensor, state[name]), name
    assert again.keys() == state.keys()
    reverse = converted(made, tmp_path, plan=f"{plan}:reverse", plan_value=sizes | more)  # is the same plan
    assert list(reverse) == list(again)
    assert all(torch.equal(tensor, again[name]) for name, tensor in reverse.items())


def test_rotary_heads_are_turned_as_transformers_does_it(tmp_path: Path) -> None:
    """q and k are what transformers' own conversion makes of them (convert_llama_weights_to_hf.py, `permute`); v stays."""
    state = make.meta()
    made = converted(state, tmp_path, plan="llama-meta-to-hf", plan_value={"heads": HEADS})
    for old, new, heads in (("wq", "q_proj", HEADS), ("wk", "k_proj", KV_HEADS)):
        weight = state[f"layers.1.attention.{old}.weight"]
        turned = weight.view(heads, HEAD // 2, 2, WIDTH).transpose(1, 2).reshape(heads * HEAD, WIDTH)
        assert torch.equal(made[f"model.layers.1.self_attn.{new}.weight"], turned)
    assert torch.equal(made["model.layers.0.self_attn.v_proj.weight"], state["layers.0.attention.wv.weight"])


def test_an_encoder_of_torch_gives_what_bert_gives(tmp_path: Path) -> None:
    """A layer of BERT, written out, and torch.nn.TransformerEncoder with the converted weights."""
    torch.manual_seed(0)
    state = {name: torch.randn(tensor.shape) * 0.3 for name, tensor in make.bert().items()}
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, make.HIDDEN, activation="gelu", batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, make.LAYERS, enable_nested_tensor=False).eval()
    encoder.load_state_dict(converted(state, tmp_path, plan="bert-hf-to-torch"))
    x = torch.randn(2, 5, WIDTH)
    expected = x
    for number in range(make.LAYERS):
        expected = bert_layer(expected, {name.removeprefix(f"encoder.layer.{number}."): t for name, t in state.items()})
    assert torch.allclose(encoder(x), expected, atol=1e-5)


def bert_layer(x: torch.Tensor, state: State) -> torch.Tensor:
    """One layer of BERT: norms come behind the sums."""
    functional = torch.nn.functional

    def linear(name: str, values: torch.Tensor) -> torch.Tensor:
        return functional.linear(values, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(name: str, values: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(values, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"])

    q, k, v = (linear(f"attention.self.{name}", x).view(2, 5, HEADS, -1).transpose(1, 2) for name in make.QKV)
    attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
    x = norm("attention.output.LayerNorm", x + linear("attention.output.dense", attended))
    return norm("output.LayerNorm", x + linear("output.dense", functional.gelu(linear("intermediate.dense", x))))


def test_megatron_groups_are_cut_apart(tmp_path: Path) -> None:
    """Each group has its queries, then its key, then its value; gates come before ups; padding of the vocabulary is cut off."""
    state = make.megatron()
    made = converted(state, tmp_path, plan="llama-megatron-to-hf", plan_value=MEGATRON)
    groups = state["decoder.layers.1.self_attention.linear_qkv.weight"].view(KV_HEADS, HEADS // KV_HEADS + 2, HEAD, WIDTH)
    parts = {"q": groups[:, :-2], "k": groups[:, -2], "v": groups[:, -1]}
    for name, part in parts.items():
        assert torch.equal(made[f"model.layers.1.self_attn.{name}_proj.weight"], part.reshape(-1, WIDTH))
    gate, up = state["decoder.layers.0.mlp.linear_fc1.weight"].chunk(2)
    assert torch.equal(made["model.layers.0.mlp.gate_proj.weight"], gate)
    assert torch.equal(made["model.layers.0.mlp.up_proj.weight"], up)
    assert torch.equal(made["model.embed_tokens.weight"], state["embedding.word_embeddings.weight"][:WORDS])


def test_megatron_norms_may_lie_in_the_layers(tmp_path: Path) -> None:
    """Transformer Engine's names give the same; without an output layer the head is tied to the embedding."""
    state = make.megatron()
    expected = converted(state, tmp_path, plan="llama-megatron-to-hf", plan_value=MEGATRON)
    names = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
             "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}  # fmt: skip
    engine: dict[str, torch.Tensor | None] = {}
    for name, tensor in state.items():
        end = next((end for end in names if name.endswith(end)), "")
        engine[name.removesuffix(end) + names.get(end, "")] = tensor
    del engine["output_layer.weight"]
    engine["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
    engine["decoder.layers.1.mlp.linear_fc1._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    made = converted(engine, tmp_path, plan="llama-megatron-to-hf", plan_value=MEGATRON)
    head = made.pop("lm_head.weight")
    assert made.keys() == expected.keys() - {"lm_head.weight"}
    assert head.data_ptr() == made["model.embed_tokens.weight"].data_ptr()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in made.items())


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_names_may_lack_their_prefix(prefix: str, tmp_path: Path) -> None:
    """GPT-2's files on the hub have no `transformer.`; masks are left out and told; the head is tied to the embedding."""
    state = {name.replace("transformer.", prefix): tensor for name, tensor in make.gpt2(transformers=True).items()}
    del state["lm_head.weight"]
    state[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 5, 5)
    torch.save(state, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", plan="gpt2-hf-to-nanogpt")
    made = torch.load(tmp_path / "out.pth", weights_only=True)
    assert made.keys() == make.gpt2(transformers=False).keys()
    assert made["lm_head.weight"].data_ptr() == made["transformer.wte.weight"].data_ptr()
    assert (f"{prefix}h.0.attn.bias", "the causal mask, which nanoGPT makes itself") in report.dropped


def test_norms_of_tensorflows_time(tmp_path: Path) -> None:
    """`gamma` and `beta`, as BERT's first files have them: renamed first for the plan, known to --like by structure."""
    state = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in make.bert().items()
    }
    torch.save(state, tmp_path / "old.pth")
    names = ["LayerNorm.gamma=LayerNorm.weight", "LayerNorm.beta=LayerNorm.bias"]
    ckpt_tools.convert(tmp_path / "old.pth", tmp_path / "new.pth", rename=names)
    ckpt_tools.convert(tmp_path / "new.pth", tmp_path / "out.pth", plan="bert-hf-to-torch")
    assert torch.load(tmp_path / "out.pth").keys() == make.torch_encoder().keys()
    torch.save(make.bert(), tmp_path / "target.pth")
    found = ckpt_tools.match(tmp_path / "old.pth", like=tmp_path / "target.pth", match="structure").matching
    assert found.complete
    assert all(
        row.old.removeprefix("bert.").replace("gamma", "weight").replace("beta", "bias") == row.new for row in found.matched
    )


# --- sizes


def test_sizes_come_from_the_config_beside(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps({"n_heads": HEADS, "n_kv_heads": KV_HEADS, "dim": WIDTH}))
    torch.save(make.meta(), tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", plan="llama-meta-to-hf")
    assert report.fitted is not None
    assert report.fitted.values == {
        "heads": f"{HEADS} (n_heads of params.json)", "kv_heads": f"{KV_HEADS} (n_kv_heads of params.json)",
        "head_size": f"{HEAD} (the shape of layers.0.attention.wq.weight)",
    }  # fmt: skip


def test_a_tie_that_the_config_denies_is_refused(tmp_path: Path) -> None:
    """Without a head the embedding stands for it, unless config.json says that they are two."""
    state = make.llama()
    del state["lm_head.weight"]
    made = converted(state, tmp_path, plan="llama-hf-to-meta", plan_value=SIZES)
    assert made["output.weight"].data_ptr() == made["tok_embeddings.weight"].data_ptr()
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    with pytest.raises(MatchError, match="tie_word_embeddings = false"):
        converted(state, tmp_path, plan="llama-hf-to-meta", plan_value=SIZES)


def test_a_checkpoint_of_another_family_is_refused(tmp_path: Path) -> None:
    """The error says what is missing, and what is not named; a layer with a gap is named."""
    with pytest.raises(MatchError, match="is not what the plan llama-hf-to-meta is for") as caught:
        converted(make.gpt2(transformers=True), tmp_path, plan="llama-hf-to-meta")
    assert "match nothing" in str(caught.value)
    state = make.meta()
    del state["layers.1.ffn_norm.weight"]
    with pytest.raises(CkptError, match=r"no 'layers\.1\.ffn_norm\.weight'"):
        converted(state, tmp_path, plan="llama-meta-to-hf", plan_value=SIZES)


def test_help_and_page_name_every_shipped_plan() -> None:
    """`ckpt convert --help` and docs/plans.md have each, and the page its other way."""
    words = ckpt("convert", "--help-all").output.replace(",", " ").split()
    page = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()
    for name in SIDES:
        assert name in words
        assert f"`{name}`" in page
        assert f"`{other_way(name)}`" in page


def test_sizes_come_from_the_arguments_in_a_checkpoint(tmp_path: Path) -> None:
    """Megatron keeps its arguments beside the model; they count though only the model is selected."""
    arguments = argparse.Namespace(num_attention_heads=HEADS, num_query_groups=KV_HEADS, kv_channels=HEAD, hidden_size=WIDTH)
    torch.save({"args": arguments, "model": make.megatron()}, tmp_path / "in.pth")
    report = ckpt_tools.convert(
        tmp_path / "in.pth", tmp_path / "out.pth", select="model", plan="llama-megatron-to-hf", plan_value=f"vocab_size={WORDS}"
    )
    assert report.fitted is not None
    assert report.fitted.values["groups"] == f"{KV_HEADS} (num_query_groups of args)"
    assert torch.load(tmp_path / "out.pth", weights_only=True).keys() == make.llama().keys()


def test_ranks_are_merged_and_fitted_at_once(tmp_path: Path) -> None:
    """A folder of three tensor parallel ranks through a plan is what the merged model gives through it."""
    folder = Path(__file__).parents[2] / "fixtures" / "megatron" / "tp3"
    (tmp_path / "p.toml").write_text(
        'format = "ckpt-plan-1"\npatterns = true\n[values.heads]\nconfig = "num_attention_heads"\n'
        '[[tensor]]\nold = "decoder.layers.{i}.self_attention.linear_qkv.weight"\nnew = ["{i}.q", "{i}.k", "{i}.v"]\n'
        'step = "split"\naxes = "(heads part size) ..."\naxis = "part"\nsizes = [1, 1, 1]\n'
        '[[tensor]]\nold = "decoder.layers.{i}.mlp.linear_fc2.weight"\nnew = "{i}.down"\nstep = "transpose"\n'
    )
    keep = ["*linear_qkv.weight", "*linear_fc2.weight"]
    ckpt_tools.convert(folder, tmp_path / "whole.pth", select="model", keep=keep)
    whole = torch.load(tmp_path / "whole.pth", weights_only=True)
    ckpt_tools.convert(folder, tmp_path / "out.pth", select="model", keep=keep, plan=tmp_path / "p.toml")
    made = torch.load(tmp_path / "out.pth", weights_only=True)
    for layer in range(2):
        fused = whole[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"].view(3, 3, -1, 6)
        for number, name in enumerate("qkv"):
            assert torch.equal(made[f"{layer}.{name}"], fused[:, number].reshape(-1, 6))
        assert torch.equal(made[f"{layer}.down"], whole[f"decoder.layers.{layer}.mlp.linear_fc2.weight"].T)


@pytest.mark.parametrize("plan", [name for name in SIDES if not name.startswith("vit")])
def test_a_whole_layer_that_is_missing(plan: str, tmp_path: Path) -> None:
    """Layers whose numbers leave one out are refused: the other library would load a model with a hole."""
    old, _, sizes = SIDES[plan]
    state = {name: tensor for name, tensor in old().items() if ".0." not in name}
    with pytest.raises(MatchError) as caught:
        converted(state, tmp_path, plan=plan, plan_value=sizes)
    assert "none of them with the number 0" in caught.value.why
