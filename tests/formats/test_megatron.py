"""Megatron-LM's mp_rank folders become one checkpoint, equal to the model that was cut, or an error names what does not fit."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import NotACheckpointError, PartError
from ckpt_tools.torch import load_state_dict
from tests.support.graphs import equal
from tests.support.samples import FIXTURES

State = dict[str, torch.Tensor]
H, FFN, WORDS, LAYERS, EXPERTS = 12, 24, 24, 4, 4
COLUMNS, ROWS = ("word_embeddings", "linear_qkv", "linear_fc1", "output_layer"), ("linear_proj", "linear_fc2")


def gpt(dtype: torch.dtype = torch.float32, *, gated: bool = True, experts: bool = False) -> State:
    """A small GPT under Megatron-core's names."""
    torch.manual_seed(0)
    wide = 2 * FFN if gated else FFN
    state: State = {"embedding.word_embeddings.weight": torch.randn(WORDS, H)}
    for number in range(LAYERS):
        layer = f"decoder.layers.{number}."
        state[f"{layer}self_attention.linear_proj.weight"] = torch.randn(H, H)
        state[f"{layer}self_attention.linear_proj.bias"] = torch.randn(H)
        state[f"{layer}self_attention.linear_qkv.layer_norm_weight"] = torch.randn(H)
        state[f"{layer}self_attention.linear_qkv.weight"] = torch.randn(3 * H, H)
        state[f"{layer}self_attention.linear_qkv.bias"] = torch.randn(3 * H)
        for mlp in [f"mlp.experts.local_experts.{index}." for index in range(EXPERTS)] if experts else ["mlp."]:
            state[f"{layer}{mlp}linear_fc1.weight"] = torch.randn(wide, H)
            state[f"{layer}{mlp}linear_fc1.bias"] = torch.randn(wide)
            state[f"{layer}{mlp}linear_fc2.weight"] = torch.randn(H, FFN)
        if experts:
            state[f"{layer}mlp.router.weight"] = torch.randn(EXPERTS, H)
    state |= {"decoder.final_layernorm.weight": torch.randn(H), "output_layer.weight": torch.randn(WORDS, H)}
    return {name: value.to(dtype) for name, value in state.items()}


def part(name: str, value: torch.Tensor, rank: int, world: int, gated: bool) -> torch.Tensor:
    """What a tensor parallel rank has of a tensor, by Megatron's rules."""
    module, _, role = name.rpartition(".")
    kind = module.rpartition(".")[2]
    if kind == "linear_fc1" and gated:
        return torch.cat([half.chunk(world)[rank] for half in value.chunk(2)])
    if kind in COLUMNS and role in ("weight", "bias"):
        return value.chunk(world)[rank].clone()
    return value.chunk(world, 1)[rank].clone() if kind in ROWS and role == "weight" else value.clone()


def stage_of(name: str, stages: int) -> tuple[int, str]:
    """Which of so many (virtual) stages a tensor is on, and its name there."""
    if name.startswith("decoder.layers."):
        number, rest = name.removeprefix("decoder.layers.").split(".", 1)
        each = LAYERS // stages
        return int(number) // each, f"decoder.layers.{int(number) % each}.{rest}"
    return (0 if name.startswith("embedding") else stages - 1), name


def expert_of(name: str, ranks: int) -> tuple[int | None, str]:
    """Which rank of expert parallelism has a tensor (None: all), and its name there."""
    head, found, rest = name.partition(".local_experts.")
    if not found:
        return None, name
    number, rest = rest.split(".", 1)
    each = EXPERTS // ranks
    return int(number) // each, f"{head}.local_experts.{int(number) % each}.{rest}"


def save(
    folder: Path, tp: int = 1, pp: int = 1, ep: int = 1, *, virtual: int = 1, state: State | None = None, gated: bool = True,
    edit: Callable[[str, dict[str, Any]], object] = lambda folder, content: None, **more: Any,
) -> State:  # fmt: skip
    """The folders of all ranks, as `--ckpt-format torch` lays them out; returns the model that was cut."""
    state = gpt(gated=gated) if state is None else state
    names = {name: (*stage_of(name, pp * virtual), *expert_of(name, ep)[:1]) for name in state}
    for at in [(t, p, e) for t in range(tp) for p in range(pp) for e in range(ep)]:
        args = argparse.Namespace(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep, num_layers=LAYERS,
            num_query_groups=12, swiglu=gated, padded_vocab_size=WORDS, **{"untie_embeddings_and_output_weights": True, **more},
        )  # fmt: skip
        content: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 2}
        for chunk in range(virtual):
            own = {
                expert_of(names[name][1], ep)[1]: part(name, value, at[0], tp, gated)
                for name, value in state.items()
                if names[name][0] == chunk * pp + at[1] and names[name][2] in (None, at[2])
            }
            content[f"model{chunk}" if virtual > 1 else "model"] = own | {"output_layer._extra_state": None}
        name = f"mp_rank_{at[0]:02d}{f'_{at[1]:03d}' if pp > 1 else ''}{f'_{at[2]:03d}' if ep > 1 else ''}"
        (folder / name).mkdir(parents=True)
        edit(name, content)
        torch.save(content, folder / name / "model_optim_rng.pt")
    return state


def merged(folder: Path) -> State:
    """What comes out."""
    return {name: value for name, value in load_state_dict(folder, select="model").items() if "_extra_state" not in name}


@pytest.mark.parametrize(("gated", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
@pytest.mark.parametrize(
    ("tp", "pp", "virtual"), [(1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 4, 1), (2, 2, 2)]
)
def test_the_merged_tensors_are_the_models(
    tp: int, pp: int, virtual: int, gated: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Bit for bit over tensor and pipeline parallelism, with a gate and without it, from the folder and from one file."""
    expected = save(tmp_path, tp, pp, virtual=virtual, state=gpt(dtype, gated=gated), gated=gated)
    ckpt_tools.convert(tmp_path, tmp_path / "out.pth", select="model")
    assert equal(torch.load(tmp_path / "out.pth", weights_only=True), expected)
    last = sorted(tmp_path.glob("mp_rank*"))[-1] / "model_optim_rng.pt"
    assert equal(merged(last), expected)


NORMS = {"input_layernorm": "self_attention.linear_qkv.layer_norm", "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm"}


def test_a_genuine_folder() -> None:
    """Three ranks of Megatron-core: what torch's own reader made of the same job's torch_dist checkpoint."""
    folder = FIXTURES / "megatron" / "tp3"
    reference = torch.load(folder / "reference.pth", weights_only=False)
    model = load_state_dict(folder, select="model")
    assert len(model) == 20
    for name, value in model.items():
        _, found, rest = name.partition("decoder.layers.")
        number, _, inner = rest.partition(".")
        module, _, role = inner.rpartition(".")
        inner = f"{NORMS[module]}_{role}" if module in NORMS else inner
        assert torch.equal(value, reference[f"decoder.layers.{inner}"][int(number)] if found else reference[name]), name


@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 2), (2, 1, 2), (1, 2, 4), (2, 2, 2)])
def test_experts(tp: int, pp: int, ep: int, tmp_path: Path) -> None:
    """Experts are numbered over the ranks that share them; what those ranks all have is compared."""
    expected = save(tmp_path, tp, pp, ep, state=gpt(experts=True))
    found = merged(tmp_path)
    assert {*found} == {*expected}
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_tied_embeddings_in_a_pipeline(tmp_path: Path) -> None:
    """The last stage's copy of the embedding is compared, and is no tensor of the whole model."""
    state = gpt()
    state["output_layer.weight"] = state["embedding.word_embeddings.weight"]
    save(tmp_path / "a", 2, 2, state=state, untie_embeddings_and_output_weights=False)
    assert [*merged(tmp_path / "a")] == [name for name in state if name != "output_layer.weight"]
    save(tmp_path / "b", 2, 2, untie_embeddings_and_output_weights=False)
    with pytest.raises(PartError, match=r"hold different values for 'embedding\.word_embeddings\.weight'"):
        merged(tmp_path / "b")


def test_old_names_and_the_order_of_the_first_version(tmp_path: Path) -> None:
    """Nested dicts of old names become dotted ones; before version 1 each rank has its q, k and v behind one another."""
    qkv = torch.arange(24.0).view(12, 2)
    words = torch.arange(16.0).view(8, 2)

    def rename(folder: str, content: dict[str, Any]) -> None:
        rank = int(folder[-2:])
        own = torch.cat([third.chunk(2)[rank] for third in qkv.chunk(3)])
        layer = {"layers.0.attention.query_key_value.weight": own, "layers.0.input_layernorm.weight": torch.ones(2)}
        embedding = {"word_embeddings": {"weight": words.chunk(2)[rank].clone()}}
        content["model"] = {"language_model": {"embedding": embedding, "transformer": layer}}
        content["checkpoint_version"] = 0
        content["args"].num_layers, content["args"].padded_vocab_size = 1, 8

    save(tmp_path, 2, edit=rename)
    found = merged(tmp_path)
    assert torch.equal(found["language_model.transformer.layers.0.attention.query_key_value.weight"], qkv)
    assert torch.equal(found["language_model.embedding.word_embeddings.weight"], words)


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    """The optimizer, random states and extra states are cut as the ranks are; padding of the vocabulary is told."""
    save(tmp_path, 2, vocab_size=WORDS - 3, edit=lambda folder, content: content.update({"optimizer": {"a": torch.ones(1)}}))
    (tmp_path / "mp_rank_01" / "distrib_optim.pt").write_bytes(b"")
    notes = " ".join(note.text for note in ckpt_tools.convert(tmp_path, tmp_path / "out.pth", objects="plain").notes)
    assert "optimizer, distrib_optim.pt: cut as the ranks are" in notes
    assert "2 values of the model that are not tensors" in notes
    assert f"3 rows of the vocabulary are padding ({WORDS} for {WORDS - 3} tokens)" in notes
    assert "optimizer" not in torch.load(tmp_path / "out.pth", weights_only=True)


def on(rank: str, change: Callable[[dict[str, Any]], object]) -> Callable[[str, dict[str, Any]], None]:
    """A change of one rank's file."""

    def edit(folder: str, content: dict[str, Any]) -> None:
        if folder == rank:
            change(content)

    return edit


def set_argument(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Another argument."""
    return lambda content: setattr(content["args"], name, value)


def change_model(edit: Callable[[State], object]) -> Callable[[dict[str, Any]], None]:
    """Another model."""

    def change(content: dict[str, Any]) -> None:
        edit(content["model"])

    return change


NORM, PROJ = "decoder.final_layernorm.weight", "decoder.layers.1.self_attention.linear_proj.bias"


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (on("mp_rank_01_000", set_argument("tensor_model_parallel_size", 4)), "not have the same tensor_model_parallel_size"),
        (on("mp_rank_00_000", set_argument("tensor_model_parallel_size", 4)), "mp_rank_02_000, mp_rank_02_001"),
        (on("mp_rank_00_000", set_argument("tensor_model_parallel_size", 1)), "does not fit the args"),
        (on("mp_rank_00_000", set_argument("pipeline_model_parallel_size", 1)), "does not fit the args"),
        (on("mp_rank_00_000", set_argument("pipeline_model_parallel_size", 1 << 40)), "impossible number"),
        (on("mp_rank_00_000", set_argument("tensor_model_parallel_size", -2)), "impossible number"),
        (on("mp_rank_00_000", set_argument("expert_model_parallel_size", "x")), "impossible number"),
        (on("mp_rank_01_001", set_argument("rank", 2)), "mp_rank_01_001 holds the part of rank 2"),
        (on("mp_rank_01_000", lambda content: content.update(iteration=3)), "do not have the same iteration"),
        (on("mp_rank_01_000", lambda content: content.pop("args")), "carries no args"),
        (on("mp_rank_01_000", lambda content: content.pop("model")), "holds no model"),
        (
            on("mp_rank_01_001", change_model(lambda model: model[NORM].add_(1))),
            "mp_rank_00_001, mp_rank_01_001 hold different",
        ),
        (on("mp_rank_01_001", change_model(lambda model: model.pop(NORM))), "final_layernorm.weight' is not in mp_rank_01_001"),
        (on("mp_rank_01_000", change_model(lambda model: model.pop(PROJ))), "is not in mp_rank_01_000"),
        (
            on("mp_rank_01_001", change_model(lambda model: model.update({"output_layer.weight": torch.ones(12, 5)}))),
            r"'output_layer\.weight' is \[12, 5\] on mp_rank_01_001, and \[12, 12\] on mp_rank_00_001",
        ),
        (
            lambda folder, content: content["model"].update({"decoder.layers.1.mixer.in_proj.weight": torch.ones(2, 2)}),
            r"Nothing says how 'decoder\.layers\.1\.mixer\.in_proj\.weight' was cut",
        ),
        (
            lambda folder, content: content["model"].update({"decoder.layers.1.mlp.linear_fc1.weight": torch.ones(5, H)}),
            "has 5 rows on a rank, and the matrix behind it 12 columns",
        ),
        (
            lambda folder, content: content["model"].update({"decoder.layers.9.input_layernorm.weight": torch.ones(2)}),
            "have a gap",
        ),
        (lambda folder, content: setattr(content["args"], "padded_vocab_size", 99), "has 24 rows, and the args say 99"),
        (lambda folder, content: setattr(content["args"], "num_layers", 5), "hold 4 layers, and the args say 5"),
        (lambda folder, content: setattr(content["args"], "num_query_groups", 1), "1 query groups are on 2"),
    ],
)
def test_parts_that_do_not_fit(edit: Callable[[str, dict[str, Any]], object], text: str, tmp_path: Path) -> None:
    """Missing, doubled, of another job or step, lying about its place, disagreeing: the error names ranks and tensors."""
    save(tmp_path / "in", 2, 2, edit=edit)
    with pytest.raises(PartError, match=text):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth", select="model")
    assert not (tmp_path / "out.pth").exists()


def test_a_rank_is_missing(tmp_path: Path) -> None:
    """The folders of missing ranks are named, from the folder and from one file."""
    save(tmp_path, 2, 2)
    (tmp_path / "mp_rank_01_000").rename(tmp_path / "elsewhere")
    for path in (tmp_path, tmp_path / "mp_rank_00_000" / "model_optim_rng.pt"):
        with pytest.raises(PartError, match=r"1 of 4 parts is missing: mp_rank_01_000"):
            merged(path)


def test_a_rank_s_file_under_two_names(tmp_path: Path) -> None:
    """A rank's file that is a copy of another's is refused; ranks of experts hold the same rest by right."""
    save(tmp_path / "in", 2, 1)
    shutil.copy(tmp_path / "in" / "mp_rank_00" / "model_optim_rng.pt", tmp_path / "in" / "mp_rank_01")
    with pytest.raises(PartError, match="mp_rank_00 and mp_rank_01 hold the very same numbers"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth", select="model")
    assert "parts-disagree" in [row.code for row in ckpt_tools.check(tmp_path / "in").findings]


@pytest.mark.parametrize("text", ["7", "../../etc", "release", "", "1" * 40])
def test_what_the_latest_iteration_may_say(text: str, tmp_path: Path) -> None:
    """It is a number or the word release, never a path; what is not there is said."""
    save(tmp_path / "iter_0000002", 2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(NotACheckpointError):
        merged(tmp_path)
