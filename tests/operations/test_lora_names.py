"""`--lora`: the names of kohya, LoCon and diffusers, and where an adapter or its configuration lies."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools.errors import ConvertError, NotACheckpointError
from tests.support.commands import ckpt
from tests.support.files import save
from tests.support.lora import LORA, Tensors, expected, merge, same
from tests.support.servers import Server

Q = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
TE = "text_model.encoder.layers.0.self_attn.q_proj"


def unet() -> Tensors:
    """The modules of a small U-Net, as diffusers names them, and a text encoder's."""
    torch.manual_seed(2)
    block = Q.removesuffix(".attn1.to_q")
    linear = {name: torch.randn(6, 6) for name in (f"{Q}.weight", f"{block}.attn1.to_out.0.weight", f"{TE}.weight")}
    return linear | {
        f"{block}.ff.net.0.proj.weight": torch.randn(8, 6), "down_blocks.0.resnets.0.conv1.weight": torch.randn(6, 4, 3, 3),
        "mid_block.proj_in.weight": torch.randn(6, 6, 1, 1),
    }  # fmt: skip


def factors(down: tuple[int, ...] = (2, 6), up: tuple[int, ...] = (6, 2)) -> list[torch.Tensor]:
    return [torch.randn(*down), torch.randn(*up)]


def kohya(module: str, down: torch.Tensor, up: torch.Tensor, part: str = "unet") -> Tensors:
    """The two factors of a module under kohya's names."""
    flat = f"lora_{part}_{module.replace('.', '_')}"
    return {f"{flat}.lora_down.weight": down.clone(), f"{flat}.lora_up.weight": up.clone()}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_kohya_names(prefix: str, tmp_path: Path) -> None:
    """`lora_unet_` and underscores for dots; the scale is alpha / rank; convolutions, and 1x1 ones as linear layers."""
    base = {f"{prefix}{name}": value for name, value in unet().items() if name != f"{TE}.weight"}
    (q_down, q_up), (in_down, in_up) = factors(), factors()
    conv_down, conv_up = factors((3, 4, 3, 3), (6, 3, 1, 1))
    lora = {
        **kohya(Q, q_down, q_up), f"lora_unet_{Q.replace('.', '_')}.alpha": torch.tensor(1.0, dtype=torch.bfloat16),
        **kohya("down_blocks.0.resnets.0.conv1", conv_down, conv_up),
        "lora_unet_down_blocks_0_resnets_0_conv1.alpha": torch.tensor(6.0), **kohya("mid_block.proj_in", in_down, in_up),
    }  # fmt: skip
    conv = torch.nn.functional.conv2d(conv_down.transpose(0, 1), conv_up).transpose(0, 1)
    changes = {
        f"{prefix}{Q}.weight": 0.5 * q_up @ q_down, f"{prefix}down_blocks.0.resnets.0.conv1.weight": 2 * conv,
        f"{prefix}mid_block.proj_in.weight": (in_up @ in_down)[:, :, None, None],
    }  # fmt: skip
    same(merge(tmp_path, base, lora)[0], {name: value + changes.get(name, 0) for name, value in base.items()}, 2e-6)


def test_a_convolution_in_three_steps(tmp_path: Path) -> None:
    """LoCon's `lora_mid`: 1x1, the kernel, 1x1. Its product is the convolution of the three."""
    base = {"conv.weight": torch.randn(6, 4, 3, 3)}
    (down, up), mid = factors((2, 4, 1, 1), (6, 2, 1, 1)), torch.randn(2, 2, 3, 3)
    more = {"lora_unet_conv.lora_mid.weight": mid, "lora_unet_conv.alpha": torch.tensor(2)}
    change = torch.einsum("oi,ijkl,jp->opkl", up[:, :, 0, 0], mid, down[:, :, 0, 0])
    made, _ = merge(tmp_path, base, kohya("conv", down, up) | more)
    torch.testing.assert_close(made["conv.weight"], base["conv.weight"] + change)


ATTENTION = Q.removesuffix(".to_q")


@pytest.mark.parametrize(
    ("module", "down", "up"),
    [
        (Q, f"unet.{Q}.lora_A.weight", f"unet.{Q}.lora_B.weight"),
        (Q, f"unet.{Q}.lora.down.weight", f"unet.{Q}.lora.up.weight"),
        *((Q.replace("to_q", module), *(f"{prefix}{ATTENTION}.processor.{name}_lora.{side}.weight" for side in ("down", "up")))
          for prefix, module, name in (("unet.", "to_q", "to_q"), ("", "to_out.0", "to_out"))),
        *((TE, *(f"text_encoder.{name}.{side}.weight" for side in ("down", "up")))
          for name in (f"{TE}.lora_linear_layer", TE.replace("q_proj", "to_q_lora"))),
        (TE, *(kohya(TE, torch.ones(()), torch.ones(()), "te"))),
    ],
)  # fmt: skip
def test_diffusers_names(module: str, down: str, up: str, tmp_path: Path) -> None:
    """The names of diffusers before PEFT and with it; without an alpha the scale is 1."""
    one, two = factors()
    save(tmp_path / "pytorch_lora_weights.safetensors", {down: one, up: two})
    save(tmp_path / "in" / "base.safetensors", unet())
    wanted = unet()
    wanted[f"{module}.weight"] += two @ one
    same(merge(tmp_path / "in", tmp_path / "in" / "base.safetensors", tmp_path)[0], wanted, 1e-6)


def test_the_configuration_in_a_header(tmp_path: Path) -> None:
    """diffusers writes PEFT's configuration into the safetensors header, for each component."""
    (one, two), wanted = factors(), unet()
    said = {"unet.r": 2, "unet.lora_alpha": 6, "unet.use_rslora": False, "unet.target_modules": ["to_q"]}
    names = {f"unet.{Q}.lora_A.weight": one, f"unet.{Q}.lora_B.weight": two}
    save(tmp_path / "lora.safetensors", names, metadata={"lora_adapter_metadata": json.dumps(said)})
    wanted[f"{Q}.weight"] += 3 * two @ one
    same(merge(tmp_path, unet(), tmp_path / "lora.safetensors")[0], wanted, 2e-6)


def test_an_adapter_for_several_files(tmp_path: Path) -> None:
    """What is for another file is refused with the command that divides the adapter, and that command does."""
    one, two = factors()
    base = {name: value for name, value in unet().items() if name != f"{TE}.weight"}
    with pytest.raises(ConvertError) as caught:
        merge(tmp_path, base, kohya(Q, one, two) | kohya(TE, one, two, "te"))
    assert "`drop='lora_te_*'`" in caught.value.fix
    ckpt_tools.convert(tmp_path / "lora.safetensors", tmp_path / "own.safetensors", drop="lora_te_*")
    made, _ = merge(tmp_path, base, tmp_path / "own.safetensors")
    torch.testing.assert_close(made[f"{Q}.weight"], base[f"{Q}.weight"] + two @ one)


def test_an_adapter_at_an_address(server: Server, tmp_path: Path) -> None:
    """A file or a folder over HTTP: adapter_config.json is fetched from beside it; where it is not there, that is said."""
    shutil.copytree(LORA / "plain", tmp_path / "adapter")
    for name in ("adapter/adapter_model.safetensors", "adapter"):
        made, report = merge(tmp_path, LORA / "base.safetensors", f"{server.url(name)}=1")
        same(made, expected("plain"), 1e-6)
        assert report.merged[0].adapter == server.url(name)
    said = ckpt_tools.inspect(server.url("adapter/adapter_model.safetensors")).adapter
    assert said is not None
    assert said["alpha"] == 4
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(ConvertError, match=r"no adapter_config\.json beside it"):
        merge(tmp_path, LORA / "base.safetensors", server.url("adapter"))
    with pytest.raises(NotACheckpointError, match="without an adapter"):
        merge(tmp_path, LORA / "base.safetensors", server.url("elsewhere"))


def test_the_page_and_the_command(tmp_path: Path) -> None:
    """A folder is inspected as its adapter; the page says what it is, and the command that it shows merges it."""
    shutil.copytree(LORA / "plain", tmp_path / "adapter", ignore=shutil.ignore_patterns("merged*"))
    shown = ckpt("inspect", tmp_path / "adapter").output
    assert "adapter     LoRA, PEFT's names, 4 modules: q x 2, v x 2\n            rank 2, alpha 4" in shown
    assert "not a checkpoint: merged" not in shown
    assert "adapter_config.json" not in shown
    found = ckpt_tools.inspect(LORA / "plain" / "adapter_model.safetensors").findings
    (fix,) = (row.fix for row in found if row.code == "adapter")
    merged = tmp_path / "merged.safetensors"
    ckpt(*fix.replace("BASE", f"{LORA}/base.safetensors").replace("MERGED.safetensors", str(merged)).split()[1:])
    torch.testing.assert_close(load_file(merged)["blocks.0.q.weight"], expected("plain")["blocks.0.q.weight"])


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
    lora: Tensors = {}
    for number, name in enumerate(names.values(), 1):
        lora |= kohya(name, torch.full((1, 4), float(number)), torch.ones(3, 1))
    made, _ = merge(tmp_path, base, lora)
    assert [made[f"{prefix}{name}.weight"].unique().tolist() for name in names] == [[n] for n in range(1, len(names) + 1)]
    more = "down_blocks.1.resnets.2.conv1" if layout == "diffusers" else "input_blocks.9.0.in_layers.2"
    with pytest.raises(ConvertError, match="are not in"):
        merge(tmp_path, base | {f"{prefix}{more}.weight": torch.zeros(3, 4)}, lora)


@pytest.mark.parametrize("flat", [False, True])
def test_differences(tmp_path: Path, flat: bool) -> None:
    """`.diff` and `.diff_b` of ComfyUI are added as they are, times the adapter's weight; each needs a partner of its shape."""

    def called(module: str) -> str:
        return f"lora_unet_{module.replace('.', '_')}" if flat else f"diffusion_model.{module}"

    base = {"blocks.0.q.weight": torch.randn(4, 4), "blocks.0.q.bias": torch.randn(4), "blocks.0.norm3.weight": torch.randn(4)}
    base |= {"head.head.weight": torch.randn(6, 4), "head.head.bias": torch.randn(6)}
    (down, up), q = factors((2, 4), (4, 2)), called("blocks.0.q")
    added = {
        "blocks.0.q.bias": "diff_b",
        "blocks.0.norm3.weight": "diff",
        "head.head.weight": "diff",
        "head.head.bias": "diff_b",
    }
    differences = {
        name: (f"{called(name.rpartition('.')[0])}.{kind}", torch.randn_like(base[name])) for name, kind in added.items()
    }
    lora = {f"{q}.lora_down.weight": down, f"{q}.lora_up.weight": up, **dict(differences.values())}
    made, report = merge(tmp_path, base, (save(tmp_path / "lora.safetensors", lora), 0.5))
    assert (report.merged[0].modules, report.merged[0].differences) == (1, 4)
    assert torch.allclose(made["blocks.0.q.weight"], base["blocks.0.q.weight"] + 0.5 * up @ down)
    for name, (_, value) in differences.items():
        assert torch.equal(made[name], base[name] + value / 2)
    for wrong, words in (
        ({f"{called('blocks.1.q')}.diff_b": torch.ones(4)}, "are not in"),
        ({f"{called('head.head')}.diff": torch.ones(4, 6)}, r"is \[4, 6\]"),
        ({f"{q}.diff": torch.ones(4, 4)}, "both low-rank matrices and a full difference"),
    ):
        with pytest.raises(ConvertError, match=words):
            merge(tmp_path, base, lora | wrong)


A = {f"lora_unet_a.lora_{side}.weight": torch.randn(4, 4) for side in ("down", "up")}
TWINS = [("transformer.a", "transformer_2.a"), ("lora_te1_a", "lora_te2_a"), ("unet.a", "lora_unet_a")]
REFUSED: dict[str, tuple[Tensors, str]] = {
    # Twin components have modules of the same names: the base is of one of them.
    **{f"two modules for one tensor: {names}": (
        {f"{name}.{side}.weight": torch.randn(4, 4) for name in names
         for side in (("lora_down", "lora_up") if name.startswith("lora_") else ("lora_A", "lora_B"))},
        "changes of two modules for") for names in TWINS},
    "LyCORIS' magnitudes of columns, whatever the weight's shape": (
        A | {"lora_unet_a.dora_scale": torch.rand(1, 4)}, "a magnitude for each column"),
    "underscores that could be two modules": (
        {name.replace("_a.", "_a_b."): value for name, value in A.items()}, "several partners"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    lora, message = REFUSED[name]
    with pytest.raises(ConvertError, match=message):
        merge(tmp_path, {f"{module}.weight": torch.randn(4, 4) for module in ("a", "a.b", "a_b")}, lora)
