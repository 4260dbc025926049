"""`--lora`: the names of kohya, LoCon and diffusers, where an adapter lies, and adapters of experts (`target_parameters`)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import ConvertError, NotACheckpointError
from tests.support.commands import ckpt
from tests.support.files import save
from tests.support.lora import LORA, Tensors, adapter, base_of, expected, merge, same
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


EXPERTS, WIDTH, INNER = 3, 6, 5
NAME = "model.layers.0.mlp.experts"


def copied(folder: Path, kind: str, **settings: Any) -> Path:
    """An adapter of the fixtures with other settings."""
    shutil.copytree(LORA / kind, folder)
    config = json.loads((folder / "adapter_config.json").read_text()) | settings
    (folder / "adapter_config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def split(gate_up: torch.Tensor, down: torch.Tensor, parent: str, *names: str) -> Tensors:
    """A weight for each expert, of parameters of all experts."""
    parts = zip(names, (*gate_up.chunk(2, dim=1), down), strict=True)
    return {f"{parent}.experts.{n}.{name}.weight": value[n].contiguous() for name, value in parts for n in range(EXPERTS)}


@pytest.mark.parametrize("names", [("block_sparse_moe", "w1", "w3", "w2"), ("mlp", "gate_proj", "up_proj", "down_proj")])
def test_a_base_with_a_weight_for_each_expert(names: tuple[str, ...], tmp_path: Path) -> None:
    """transformers 5 stacks experts when it loads, and writes them one by one; gate and up are one parameter there."""
    base, wanted = (
        split(tensors["experts.gate_up_proj"], tensors["experts.down_proj"], f"layers.0.{names[0]}", *names[1:])
        for tensors in (base_of("experts"), expected("experts"))
    )
    given = copied(tmp_path / "a", "experts")
    parts = load_file(given / "adapter_model.safetensors").items()
    factors = {name.replace("model.experts", f"model.{NAME[6:]}"): value for name, value in parts if ".q." not in name}
    save_file(factors, given / "adapter_model.safetensors")
    made, _ = merge(tmp_path, base, given)
    for name, value in wanted.items():
        torch.testing.assert_close(made[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "ranks"), [("experts", {"2": 3}), ("experts-patterns", {"2": 2, "3": 1})])
def test_what_inspect_tells(kind: str, ranks: dict[str, int]) -> None:
    told = ckpt_tools.inspect(LORA / kind / "adapter_model.safetensors").adapter
    assert told is not None
    assert (told["ranks"], told["experts"], told["modules"], told["problem"]) == (ranks, [3], 3, None)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("experts", {"rank_pattern": {"experts.*": 4}}, r"factors of 'experts', .* fit none of .*gate_up_proj' \[3, 8, 6\]"),
        ("experts", {"target_parameters": ["experts.down_proj"]}, "factors of 2 parameters of 'experts'; .* has 1"),
        ("experts", {"target_parameters": ["experts.down_proj", "experts.other"]}, "factors of 2 parameters"),
        ("experts-018-square", {"peft_version": None}, "'experts.square', .* is unknown"),
        ("experts-018-square", {"peft_version": "0.21.2"}, "'experts.square', .* is unknown"),
        ("experts", {"target_parameters": "experts"}, "target_parameters in .* is not a list of names"),
        ("experts", {"width": 7}, r"fit none of|not in "),
    ],
)
def test_what_does_not_fit_its_experts(kind: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Another rank, another number of parameters, a layout that nothing tells, a base of another width."""
    base = base_of(kind)
    if width := (settings := {**settings}).pop("width", None):
        base["experts.gate_up_proj"] = torch.zeros(3, 8, width)
    with pytest.raises(ConvertError, match=message):
        merge(tmp_path, base, copied(tmp_path / "a", kind, **settings))


def grouped(folder: Path, **settings: Any) -> Tensors:
    """An adapter with NeMo Automodel's factors [experts, in, rank] and [experts, rank, out] of all experts of a layer."""
    torch.manual_seed(4)
    sizes = {"gate_and_up_A": (WIDTH, 2), "gate_and_up_B": (2, 2 * INNER), "down_A": (INNER, 2), "down_B": (2, WIDTH)}
    factors = {name: torch.randn(EXPERTS, *size) for name, size in sizes.items()}
    names = {f"{NAME}.lora_{name}": value for name, value in factors.items()}
    adapter(folder, names, **{"lora_alpha": 6, **settings})
    return factors


def stacked() -> tuple[torch.Tensor, torch.Tensor]:
    """The parameters of all experts, gate and up in one."""
    return torch.randn(EXPERTS, 2 * INNER, WIDTH), torch.randn(EXPERTS, WIDTH, INNER)


@pytest.mark.parametrize("layout", ["stacked", "turned", "split"])
def test_grouped_factors(layout: str, tmp_path: Path) -> None:
    """Into a parameter of all experts [out, in] or [in, out], and into a weight for each expert: gate first, then up."""
    factors, base = grouped(tmp_path / "a"), stacked()
    changed = [
        value + 3 * (factors[f"{own}_A"] @ factors[f"{own}_B"]).mT
        for value, own in zip(base, ("gate_and_up", "down"), strict=True)
    ]

    def laid_out(gate_up: torch.Tensor, down: torch.Tensor) -> Tensors:
        if layout == "split":
            return split(gate_up, down, NAME.removesuffix(".experts"), "gate_proj", "up_proj", "down_proj")
        own = {f"{NAME}.gate_up_proj": gate_up, f"{NAME}.down_proj": down}
        return {name: (value.mT if layout == "turned" else value).contiguous() for name, value in own.items()}

    made, report = merge(tmp_path, laid_out(*base), tmp_path / "a")
    for name, value in laid_out(*changed).items():
        torch.testing.assert_close(made[name], value, rtol=0, atol=2e-6)
    assert report.merged[0].ranks == {2: 2}
    told = ckpt_tools.inspect(tmp_path / "a" / "adapter_model.safetensors").adapter
    assert told is not None
    assert (told["ranks"], told["experts"], told["targets"]) == ({"2": 2}, [3], {"gate_up_proj": 1, "down_proj": 1})


@pytest.mark.parametrize(
    ("gone", "settings", "message"),
    [
        ("lora_down_B", {}, "one factor of"), ("", {"use_dora": True}, "use_dora is true"),
        ("", {"r": 3}, "fit none of"), ("half", {}, "fit none of"),
        ("empty", {}, "do not multiply"), ("adapter_config.json", {}, "has no adapter_config.json"),
    ],
)  # fmt: skip
def test_grouped_factors_that_are_not_whole(gone: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    grouped(tmp_path / "a", **settings)
    path = tmp_path / "a" / "adapter_model.safetensors"
    count = {"half": 1, "empty": 0}.get(gone, EXPERTS)  # of fewer experts than the base has
    tensors = {name: value[:count].clone() for name, value in load_file(path).items() if not gone or not name.endswith(gone)}
    save_file(tensors, path)
    if gone.endswith("json"):
        (tmp_path / "a" / gone).unlink()
    ckpt_tools.inspect(path)
    gate_up, down = stacked()
    with pytest.raises(ConvertError, match=message):
        merge(tmp_path, {f"{NAME}.gate_up_proj": gate_up, f"{NAME}.down_proj": down}, tmp_path / "a")
