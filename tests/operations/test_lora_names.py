"""`--lora`: the names of kohya, LoCon and diffusers, and where an adapter or its configuration lies."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import ConvertError, NotACheckpointError
from tests.operations.test_convert_lora import LORA, Tensors, expected, same
from tests.support.commands import main
from tests.support.servers import Server


def unet() -> Tensors:
    """The modules of a small U-Net, as diffusers names them, and a text encoder's."""
    torch.manual_seed(2)
    block = "down_blocks.0.attentions.0.transformer_blocks.0"
    return {
        f"{block}.attn1.to_q.weight": torch.randn(6, 6), f"{block}.attn1.to_out.0.weight": torch.randn(6, 6),
        f"{block}.ff.net.0.proj.weight": torch.randn(8, 6), "down_blocks.0.resnets.0.conv1.weight": torch.randn(6, 4, 3, 3),
        "mid_block.proj_in.weight": torch.randn(6, 6, 1, 1),
        "text_model.encoder.layers.0.self_attn.q_proj.weight": torch.randn(6, 6),
    }  # fmt: skip


Q = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


def factors(down: tuple[int, ...], up: tuple[int, ...]) -> list[torch.Tensor]:
    """Two factors of these shapes."""
    return [torch.randn(*down), torch.randn(*up)]


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_kohya_names(prefix: str, tmp_path: Path) -> None:
    """`lora_unet_` and underscores for dots; the scale is alpha / rank; convolutions, and 1x1 ones as linear layers."""
    base = {f"{prefix}{name}": value for name, value in unet().items() if not name.startswith("text")}
    flat = {"q": "down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q", "conv": "down_blocks_0_resnets_0_conv1"}
    q_down, q_up = factors((2, 6), (6, 2))
    conv_down, conv_up = factors((3, 4, 3, 3), (6, 3, 1, 1))
    in_down, in_up = factors((2, 6), (6, 2))
    adapter = {
        f"lora_unet_{flat['q']}.lora_down.weight": q_down, f"lora_unet_{flat['q']}.lora_up.weight": q_up,
        f"lora_unet_{flat['q']}.alpha": torch.tensor(1.0, dtype=torch.bfloat16),
        f"lora_unet_{flat['conv']}.lora_down.weight": conv_down, f"lora_unet_{flat['conv']}.lora_up.weight": conv_up,
        f"lora_unet_{flat['conv']}.alpha": torch.tensor(6.0),
        "lora_unet_mid_block_proj_in.lora_down.weight": in_down, "lora_unet_mid_block_proj_in.lora_up.weight": in_up,
    }  # fmt: skip
    save_file(base, tmp_path / "base.safetensors")
    save_file(adapter, tmp_path / "kohya.safetensors")
    ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path / "kohya.safetensors")
    made = load_file(tmp_path / "out.safetensors")
    conv = torch.nn.functional.conv2d(conv_down.transpose(0, 1), conv_up).transpose(0, 1)
    changes = {
        f"{prefix}{Q}.weight": 0.5 * q_up @ q_down, f"{prefix}down_blocks.0.resnets.0.conv1.weight": 2 * conv,
        f"{prefix}mid_block.proj_in.weight": (in_up @ in_down)[:, :, None, None],
    }  # fmt: skip
    wanted = {name: value + changes[name] if name in changes else value for name, value in base.items()}
    same(made, wanted, 2e-6)


def test_a_convolution_in_three_steps(tmp_path: Path) -> None:
    """LoCon's `lora_mid`: 1x1, the kernel, 1x1. Its product is the convolution of the three."""
    base = {"conv.weight": torch.randn(6, 4, 3, 3)}
    down, up = factors((2, 4, 1, 1), (6, 2, 1, 1))
    mid = torch.randn(2, 2, 3, 3)
    names = {"lora_down.weight": down, "lora_up.weight": up, "lora_mid.weight": mid, "alpha": torch.tensor(2)}
    save_file(base, tmp_path / "base.safetensors")
    save_file({f"lora_unet_conv.{name}": value for name, value in names.items()}, tmp_path / "locon.safetensors")
    ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path / "locon.safetensors")
    change = torch.einsum("oi,ijkl,jp->opkl", up[:, :, 0, 0], mid, down[:, :, 0, 0])
    torch.testing.assert_close(load_file(tmp_path / "out.safetensors")["conv.weight"], base["conv.weight"] + change)


@pytest.mark.parametrize(
    ("module", "down", "up"),
    [
        (Q, f"unet.{Q}.lora_A.weight", f"unet.{Q}.lora_B.weight"),
        (Q, f"unet.{Q}.lora.down.weight", f"unet.{Q}.lora.up.weight"),
        (Q, f"unet.{Q[:-5]}.processor.to_q_lora.down.weight", f"unet.{Q[:-5]}.processor.to_q_lora.up.weight"),
        (f"{Q[:-5]}.to_out.0", f"{Q[:-5]}.processor.to_out_lora.down.weight", f"{Q[:-5]}.processor.to_out_lora.up.weight"),
        (
            "text_model.encoder.layers.0.self_attn.q_proj",
            "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_linear_layer.down.weight",
            "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_linear_layer.up.weight",
        ),
        (
            "text_model.encoder.layers.0.self_attn.q_proj",
            "text_encoder.text_model.encoder.layers.0.self_attn.to_q_lora.down.weight",
            "text_encoder.text_model.encoder.layers.0.self_attn.to_q_lora.up.weight",
        ),
        ("text_model.encoder.layers.0.self_attn.q_proj", *(
            f"lora_te_text_model_encoder_layers_0_self_attn_q_proj.lora_{side}.weight" for side in ("down", "up"))),
    ],
)  # fmt: skip
def test_diffusers_names(module: str, down: str, up: str, tmp_path: Path) -> None:
    """The names of diffusers before PEFT and with it; without an alpha the scale is 1."""
    one, two = factors((2, 6), (6, 2))
    save_file(unet(), tmp_path / "base.safetensors")
    save_file({down: one, up: two}, tmp_path / "pytorch_lora_weights.safetensors")
    ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path)
    wanted = unet()
    wanted[f"{module}.weight"] += two @ one
    same(load_file(tmp_path / "out.safetensors"), wanted, 1e-6)


def test_the_configuration_in_a_header(tmp_path: Path) -> None:
    """diffusers writes PEFT's configuration into the safetensors header, for each component."""
    one, two = factors((2, 6), (6, 2))
    said = {"unet.r": 2, "unet.lora_alpha": 6, "unet.use_rslora": False, "unet.target_modules": ["to_q"]}
    save_file(unet(), tmp_path / "base.safetensors")
    save_file(
        {f"unet.{Q}.lora_A.weight": one, f"unet.{Q}.lora_B.weight": two}, tmp_path / "lora.safetensors",
        {"lora_adapter_metadata": json.dumps(said)},
    )  # fmt: skip
    ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path / "lora.safetensors")
    wanted = unet()
    wanted[f"{Q}.weight"] += 3 * two @ one
    same(load_file(tmp_path / "out.safetensors"), wanted, 2e-6)


def test_an_adapter_for_several_files(tmp_path: Path) -> None:
    """What is for another file is refused with the command that divides the adapter, and that command does."""
    one, two = factors((2, 6), (6, 2))
    te = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
    flat = f"lora_unet_{Q.replace('.', '_')}"
    both = {f"{flat}.lora_down.weight": one, f"{flat}.lora_up.weight": two}
    both |= {f"{te}.lora_down.weight": one.clone(), f"{te}.lora_up.weight": two.clone()}
    save_file({name: value for name, value in unet().items() if not name.startswith("text")}, tmp_path / "unet.safetensors")
    save_file(both, tmp_path / "both.safetensors")
    with pytest.raises(ConvertError) as caught:
        ckpt_tools.convert(tmp_path / "unet.safetensors", tmp_path / "out.safetensors", lora=tmp_path / "both.safetensors")
    assert "`drop='lora_te_*'`" in caught.value.fix
    ckpt_tools.convert(tmp_path / "both.safetensors", tmp_path / "own.safetensors", drop="lora_te_*")
    ckpt_tools.convert(tmp_path / "unet.safetensors", tmp_path / "out.safetensors", lora=tmp_path / "own.safetensors")
    torch.testing.assert_close(load_file(tmp_path / "out.safetensors")[f"{Q}.weight"], unet()[f"{Q}.weight"] + two @ one)


def test_underscores_that_could_be_two_modules(tmp_path: Path) -> None:
    """`a_b` is `a.b` or `a_b`: where the base has both, neither is taken."""
    save_file({"a.b.weight": torch.ones(6, 6), "a_b.weight": torch.ones(6, 6)}, tmp_path / "base.safetensors")
    one, two = factors((2, 6), (6, 2))
    save_file({"lora_unet_a_b.lora_down.weight": one, "lora_unet_a_b.lora_up.weight": two}, tmp_path / "lora.safetensors")
    with pytest.raises(ConvertError, match="several partners"):
        ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path / "lora.safetensors")


def test_an_adapter_at_an_address(server: Server, tmp_path: Path) -> None:
    """A file or a folder over HTTP: adapter_config.json is fetched from beside it; where it is not there, that is said."""
    shutil.copytree(LORA / "plain", tmp_path / "adapter")
    for number, name in enumerate(("adapter/adapter_model.safetensors", "adapter")):
        out = tmp_path / f"{number}.safetensors"
        report = ckpt_tools.convert(LORA / "base.safetensors", out, lora=f"{server.url(name)}=1")
        same(load_file(out), expected("plain"), 1e-6)
        assert report.merged[0].adapter == server.url(name)
    said = ckpt_tools.inspect(server.url("adapter/adapter_model.safetensors")).adapter
    assert said is not None
    assert said["alpha"] == 4
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(ConvertError, match=r"no adapter_config\.json beside it"):
        ckpt_tools.convert(LORA / "base.safetensors", tmp_path / "out.safetensors", lora=server.url("adapter"))
    with pytest.raises(NotACheckpointError, match="without an adapter"):
        ckpt_tools.convert(LORA / "base.safetensors", tmp_path / "out.safetensors", lora=server.url("elsewhere"))


def test_the_page_and_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A folder is inspected as its adapter; the page says what it is, and the command that it shows merges it."""
    shutil.copytree(LORA / "plain", tmp_path / "adapter", ignore=shutil.ignore_patterns("merged*"))
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(tmp_path / "adapter")])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "adapter     LoRA, PEFT's names, 4 modules: q x 2, v x 2\n            rank 2, alpha 4" in shown
    assert "not a checkpoint: merged" not in shown
    assert "adapter_config.json" not in shown
    (finding,) = [
        row for row in ckpt_tools.inspect(LORA / "plain" / "adapter_model.safetensors").findings if row.code == "adapter"
    ]
    base, merged = LORA / "base.safetensors", tmp_path / "merged.safetensors"
    command = finding.fix.replace("BASE", str(base)).replace("MERGED.safetensors", str(merged)).split()[1:]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    torch.testing.assert_close(
        load_file(merged)["blocks.0.q.weight"], load_file(LORA / "plain" / "merged.safetensors")["blocks.0.q.weight"]
    )


# Modules of SDXL's U-Net in diffusers' layout and in Stability's. All 263 were compared with diffusers 0.42.
SDXL = {
    "conv_in": "input_blocks.0.0", "conv_out": "out.2", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "down_blocks.0.resnets.1.conv1": "input_blocks.2.0.in_layers.2",
    "down_blocks.0.downsamplers.0.conv": "input_blocks.3.0.op",
    "down_blocks.1.attentions.0.proj_in": "input_blocks.4.1.proj_in",
    "down_blocks.2.attentions.1.transformer_blocks.9.ff.net.0.proj": "input_blocks.8.1.transformer_blocks.9.ff.net.0.proj",
    "down_blocks.1.resnets.0.conv_shortcut": "input_blocks.4.0.skip_connection",
    "mid_block.resnets.0.time_emb_proj": "middle_block.0.emb_layers.1",
    "mid_block.resnets.1.conv2": "middle_block.2.out_layers.3",
    "mid_block.attentions.0.proj_out": "middle_block.1.proj_out",
    "up_blocks.0.attentions.2.transformer_blocks.0.attn2.to_out.0": "output_blocks.2.1.transformer_blocks.0.attn2.to_out.0",
    "up_blocks.0.upsamplers.0.conv": "output_blocks.2.2.conv", "up_blocks.1.upsamplers.0.conv": "output_blocks.5.1.conv",
    "up_blocks.2.resnets.2.conv1": "output_blocks.8.0.in_layers.2",
}  # fmt: skip


def skeleton(layout: str) -> list[str]:
    """A module of every layer of SDXL's U-Net."""
    if layout == "Stability":
        names = [f"{kind}_blocks.{number}.0.in_layers.2" for kind in ("input", "output") for number in range(9)]
        return [*names, "input_blocks.3.0.op", "input_blocks.6.0.op"]
    kinds = (("down", 2), ("up", 3))
    return [f"{kind}_blocks.{block}.resnets.{n}.conv1" for kind, count in kinds for block in range(3) for n in range(count)]


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("layout", ["diffusers", "Stability"])
def test_kohyas_names_in_the_other_layout(layout: str, prefix: str, tmp_path: Path) -> None:
    """Each module of a U-Net gets its change by either name; with three layers a block nothing is guessed."""
    names = {**SDXL} if layout == "diffusers" else {other: own for own, other in SDXL.items()}
    base = {f"{prefix}{name}.weight": torch.zeros(3, 4) for name in {**names, **dict.fromkeys(skeleton(layout))}}
    adapter: Tensors = {}
    for number, name in enumerate(names.values(), 1):
        flat = f"lora_unet_{name.replace('.', '_')}"
        adapter |= {f"{flat}.lora_down.weight": torch.full((1, 4), float(number)), f"{flat}.lora_up.weight": torch.ones(3, 1)}
    save_file(base, tmp_path / "base.safetensors")
    save_file(adapter, tmp_path / "lora.safetensors")
    ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path / "lora.safetensors")
    made = load_file(tmp_path / "out.safetensors")
    assert [made[f"{prefix}{name}.weight"].unique().tolist() for name in names] == [
        [float(n)] for n in range(1, len(names) + 1)
    ]
    more = "down_blocks.1.resnets.2.conv1" if layout == "diffusers" else "input_blocks.9.0.in_layers.2"
    save_file(base | {f"{prefix}{more}.weight": torch.zeros(3, 4)}, tmp_path / "other.safetensors")
    with pytest.raises(ConvertError, match="are not in"):
        ckpt_tools.convert(tmp_path / "other.safetensors", tmp_path / "out2.safetensors", lora=tmp_path / "lora.safetensors")


@pytest.mark.parametrize("flat", [False, True])
def test_differences(tmp_path: Path, flat: bool) -> None:
    """`.diff` and `.diff_b` of ComfyUI are added as they are, times the adapter's weight; each needs a partner of its shape."""

    def called(module: str) -> str:
        return f"lora_unet_{module.replace('.', '_')}" if flat else f"diffusion_model.{module}"

    base = {"blocks.0.q.weight": torch.randn(4, 4), "blocks.0.q.bias": torch.randn(4), "blocks.0.norm3.weight": torch.randn(4)}
    base |= {"head.head.weight": torch.randn(6, 4), "head.head.bias": torch.randn(6)}
    down, up = factors((2, 4), (4, 2))
    adapter = {
        f"{called('blocks.0.q')}.lora_down.weight": down, f"{called('blocks.0.q')}.lora_up.weight": up,
        f"{called('blocks.0.q')}.diff_b": torch.randn(4), f"{called('blocks.0.norm3')}.diff": torch.randn(4),
        f"{called('head.head')}.diff": torch.randn(6, 4), f"{called('head.head')}.diff_b": torch.randn(6),
    }  # fmt: skip
    save_file(base, tmp_path / "base.safetensors")
    save_file(adapter, tmp_path / "lora.safetensors")
    report = ckpt_tools.convert(
        tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=(tmp_path / "lora.safetensors", 0.5)
    )
    made, halves = load_file(tmp_path / "out.safetensors"), {name: value / 2 for name, value in adapter.items()}
    assert (report.merged[0].modules, report.merged[0].differences) == (1, 4)
    assert torch.allclose(made["blocks.0.q.weight"], base["blocks.0.q.weight"] + 0.5 * up @ down)
    for name, own in (
        ("blocks.0.q.bias", "blocks.0.q"),
        ("blocks.0.norm3.weight", "blocks.0.norm3"),
        ("head.head.weight", "head.head"),
    ):
        ending = "diff_b" if name.endswith("bias") else "diff"
        assert torch.equal(made[name], base[name] + halves[f"{called(own)}.{ending}"])
    for wrong, words in (
        ({f"{called('blocks.1.q')}.diff_b": torch.ones(4)}, "are not in"),
        ({f"{called('head.head')}.diff": torch.ones(4, 6)}, r"is \[4, 6\]"),
        ({f"{called('blocks.0.q')}.diff": torch.ones(4, 4)}, "both low-rank matrices and a full difference"),
    ):
        save_file(adapter | wrong, tmp_path / "lora.safetensors")
        with pytest.raises(ConvertError, match=words):
            ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "no.safetensors", lora=tmp_path / "lora.safetensors")


@pytest.mark.parametrize(
    "names", [("transformer.a", "transformer_2.a"), ("lora_te1_a", "lora_te2_a"), ("unet.a", "lora_unet_a")]
)
def test_two_modules_for_one_tensor_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    """Twin components have modules of the same names: the base is of one of them."""
    adapter: Tensors = {}
    for name in names:
        down, up = ("lora_down", "lora_up") if name.startswith("lora_") else ("lora_A", "lora_B")
        adapter |= {f"{name}.{down}.weight": torch.randn(2, 4), f"{name}.{up}.weight": torch.randn(4, 2)}
    save_file({"a.weight": torch.randn(4, 4)}, tmp_path / "base.safetensors")
    save_file(adapter, tmp_path / "lora.safetensors")
    with pytest.raises(ConvertError, match="changes of two modules for"):
        ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path / "lora.safetensors")


def test_magnitudes_of_columns_are_refused(tmp_path: Path) -> None:
    """LyCORIS' dora_scale [1, in] is not that of the rows, whatever the weight's shape."""
    adapter = {"lora_unet_a.lora_down.weight": torch.randn(2, 4), "lora_unet_a.lora_up.weight": torch.randn(4, 2)}
    save_file({"a.weight": torch.randn(4, 4)}, tmp_path / "base.safetensors")
    save_file(adapter | {"lora_unet_a.dora_scale": torch.rand(1, 4)}, tmp_path / "lora.safetensors")
    with pytest.raises(ConvertError, match="a magnitude for each column"):
        ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path / "lora.safetensors")
