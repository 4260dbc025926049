"""The page for the words on a screen is found, whatever the model's own names are."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

import ckpt_tools
from ckpt_tools.errors import NothingMatchedError, UsageError
from docs.explained import PLACE, document, pages
from tests.support.commands import ckpt, main
from tests.support.terminal import ROOT, run

MESSAGES = {
    "module-prefix": [
        "KeyError: 'unexpected key \"module.conv1.weight\" in state_dict'",
        'Missing key(s) in state_dict: "layer1.0.bn1.weight". Unexpected key(s) in state_dict: "module.layer1.0.bn1.weight"',
        'RuntimeError: Error(s) in loading state_dict for ResNet:\n\tMissing key(s) in state_dict: "features.0.weight". \n\t'
        'Unexpected key(s) in state_dict: "module.features.0.weight".',
    ],
    "size-mismatch": [
        "size mismatch for fc.weight",
        "RuntimeError: Error(s) in loading state_dict for ResNet:\n\tsize mismatch for classifier.weight: copying a param with "
        "shape torch.Size([1000, 512]) from checkpoint, the shape in current model is torch.Size([7, 512]).",
    ],
    "orig-mod-prefix": [
        'Unexpected key(s) in state_dict: "_orig_mod.layer.weight"',
        "KeyError: '_orig_mod.conv1.weight'",
    ],
    "cuda-device": [
        "safetensors_rust.SafetensorError: device cuda:0 is invalid",
        "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",
    ],
    "device-tag": ["don't know how to restore data location of torch.storage.UntypedStorage (tagged with hpu:0)"],
    "no-module-named-models": ["ModuleNotFoundError: No module named 'models.yolo'", "No module named 'utils'"],
    "model-optim-rng": ["ModuleNotFoundError: No module named 'megatron'"],
    "windows-path": ["NotImplementedError: cannot instantiate 'WindowsPath' on your system"],
    "lfs-pointer": ["_pickle.UnpicklingError: invalid load key, 'v'."],
    "newly-initialized": [
        "Some weights of Bert were not initialized from the model checkpoint at bert and are newly initialized: ['qa']",
    ],
    "out-of-memory": ["torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"],
    "cant-get-attribute": ["AttributeError: Can't get attribute 'MyModel' on <module '__main__' from 'x.py'>"],
    "html-page": ["_pickle.UnpicklingError: invalid load key, '<'.", "UnpicklingError: unpickling stack underflow"],
    "failed-save": [
        "RuntimeError: [enforce fail at inline_container.cc:778] . unexpected pos 64 vs 0",
        "No space left on device",
    ],
    "central-directory": [
        "_pickle.UnpicklingError: pickle data was truncated",
        "RuntimeError: unexpected EOF, expected 12345 more bytes. The file might be corrupted.",
        "RuntimeError: [enforce fail at inline_container.cc:197] . file not found: checkpoint/data/17",
        "RuntimeError: storage has wrong byte size: expected 9437184 got 2359296",
        "RuntimeError: Invalid magic number; corrupt file?",
        "OSError: Unable to load weights from pytorch checkpoint file for 'bert' at '/x/pytorch_model.bin'.",
    ],
    "adapter-keys": [
        "ValueError: Can't find 'adapter_config.json' at './out'",
        "ValueError: Target modules {'gate'} not found in the base model. Please check the target modules and try again.",
    ],
    "zero-to-fp32": [
        "size mismatch for model.embed_tokens.weight: copying a param with shape "
        "torch.Size([0]) from checkpoint, the shape in current model is torch.Size([32000, 4096])",
        "FileNotFoundError: can't find model_states files in directory './x'",
        "Unable to find 'latest' file at x",
    ],
    "weights-only-class": [
        "RuntimeError: Cannot use ``weights_only=True`` with TorchScript archives passed to ``torch.load``."
    ],
    "state-dict-is-no-model": [
        "RuntimeError: PytorchStreamReader failed locating file constants.pkl: file not found",
        "UnpicklingError: A load persistent id instruction was encountered, but no persistent_load function was specified.",
        "AttributeError: 'dict' object has no attribute 'to'",
        "KeyError: 'state_dict'",
    ],
    "is-it-safe": [
        "FutureWarning: You are using `torch.load` with `weights_only=False` (the current default value)",
        "is this file safe",
        "does it contain malicious code?",
    ],
    "latest-good": ["which checkpoint is the last good one"],
    "what-changed": ["what changed between two checkpoints", "compare two checkpoints"],
    "too-big": ["why is my checkpoint so large"],
    "mixed-dtypes": [
        "RuntimeError: mat1 and mat2 must have the same dtype, but got BFloat16 and Float",
        "RuntimeError: Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same",
        "TypeError: Got unsupported ScalarType BFloat16",
    ],
    "meta-tensor": ["NotImplementedError: Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty()"],
    "newer-torch": [
        "TypeError: load() got an unexpected keyword argument 'weights_only'",
        "RuntimeError: x.pth is a zip archive (did you mean to use torch.jit.load()?)",
        "_pickle.UnpicklingError: invalid load key, 'P'.",
    ],
    "fsdp-checkpoint": [
        "FileNotFoundError: [Errno 2] No such file or directory: 'ckpt/.metadata'",
        "RuntimeError: Missing key in checkpoint state_dict: model.layers.0.attention.wq.weight.",
        "IsADirectoryError: [Errno 21] Is a directory: 'checkpoint'",
        'RuntimeError: Missing key(s) in state_dict: "_fsdp_wrapped_module._flat_param".',
        "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([0, 1])",
    ],
    "gguf-file": ["llama_model_load: error loading model: missing tensor 'token_embd.weight'"],
    "mp-rank-00": ["AssertionError: Client provided checkpoint load path: ./x does not exist ... exiting"],
    "lightning": [
        "FileNotFoundError: [Errno 2] No such file or directory: '/runs/7/last.ckpt'",
        'RuntimeError: Error(s) in loading state_dict for LitNet: Unexpected key(s) in state_dict: "model.layer1.weight".',
        'RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "conv1.weight", "fc.bias".\n\t'
        'Unexpected key(s) in state_dict: "model.conv1.weight", "model.fc.bias".',
    ],
    "quantised-weights": [
        "ValueError: Supplied state dict for 0.down_proj.weight does not contain `bitsandbytes__*` and possibly other "
        "`quantized_stats` components.",
        "ValueError: Unknown quantization type, got awq - supported types are: ['gptq']",
        'Unexpected key(s) in state_dict: "model.layers.0.mlp.gate_proj.qweight", "model.layers.0.mlp.gate_proj.qzeros"',
    ],
    "strict-false": [
        "why does the model give random predictions after loading",
        "_IncompatibleKeys(missing_keys=['layer.weight'], unexpected_keys=['module.layer.weight'])",
    ],
    "shared-memory": ["RuntimeError: The weights trying to be saved contained shared tensors [{'lm_head.weight'}]"],
    "model-tar-gz": ["_pickle.UnpicklingError: invalid load key, '\\x1f'."],
    "safetensors-header": [
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        "SafetensorError: invalid JSON in header: EOF while parsing a value",
    ],
}


@pytest.mark.parametrize(("page", "message"), [(page, message) for page, rows in MESSAGES.items() for message in rows])
def test_a_message_finds_its_page(page: str, message: str) -> None:
    """The message alone, and at the end of a traceback of other words, finds its page first."""
    traceback = f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    run(loader)\n{message}\n'
    for words in (message, traceback):
        assert ckpt_tools.explain(words)[0].page == f"docs/howto/{page}.md"


def test_every_page_is_found_by_its_title() -> None:
    """The title of every page finds it."""
    for page in pages():
        assert ckpt_tools.explain(page["title"])[0].page == page["page"]


def test_every_code_is_explained() -> None:
    """Each code that check may say has its row, with and without brackets."""
    codes = re.findall(r"^\| `([a-z][a-z0-9-]+)`", (ROOT / "docs" / "check.md").read_text().partition("## Findings")[2], re.M)
    assert len(codes) > 50
    for code in codes:
        (found,) = ckpt_tools.explain(f"[{code}]")
        assert found.title.startswith(f"{code} (")
        assert found == ckpt_tools.explain(code)[0]


def test_what_is_known_is_what_the_docs_say() -> None:
    """The file in the package is the one that the pages give: python -m docs.explained writes it."""
    assert PLACE.read_text("utf-8") == document()


def test_other_words() -> None:
    """Words of no page are said to be that, a code with a typing error gets the near one, none are refused."""
    with pytest.raises(NothingMatchedError, match="blargh"):
        ckpt_tools.explain("blargh zonk")
    with pytest.raises(NothingMatchedError, match="wrapper-prefix"):
        ckpt_tools.explain("wraper-prefix")
    for nothing in ("", " \n"):
        with pytest.raises(UsageError):
            ckpt_tools.explain(nothing)


def test_the_command() -> None:
    """From arguments and from a pipe; on a terminal it is drawn; without words there is a list."""
    given = run("explain", "size", "mismatch", "for", "fc.weight")
    piped = CliRunner().invoke(main, ["explain"], input="size mismatch for fc.weight")
    assert given.exit_code == piped.exit_code == 0
    assert given.output == piped.output
    assert "ckpt convert ten.pth three.pth --like like.pth" in given.output
    listed = CliRunner().invoke(main, ["explain"], input="").output
    assert "wrapper-prefix (docs/check.md)\n" in listed
    drawn = CliRunner().invoke(main, ["explain", "wrapper-prefix"], env={"FORCE_COLOR": "1", "COLUMNS": "80"}).output
    assert "names start with" in drawn
    assert "# wrapper" not in drawn
    ckpt("explain", "blargh", code=3)


def test_words_of_every_sentence_find_no_page() -> None:
    """A sentence about nothing that is known is refused, and not answered with a page that has its small words."""
    for words in (
        "no such thing at all",
        "hello world",
        "The size of tensor a (768) must match the size of tensor b (1024) at non-singleton dimension 1",
        "why does my file not load",
        "IndexError: list index out of range",
        "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
        "what is in this pth file",
        "permission denied",
        "KeyError: 'labels'",
        "IndentationError: unexpected indent",
        "RuntimeError: CUDA error: device-side assert triggered",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x512 and 1024x10)",
        "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.csv'",
        "RuntimeError: Trying to backward through the graph a second time",
        "ValueError: Expected input batch_size (32) to match target batch_size (16).",
    ):
        with pytest.raises(NothingMatchedError):
            ckpt_tools.explain(words)


@pytest.mark.parametrize(
    ("subject", "page"),
    [
        ("deepspeed", "zero-to-fp32"), ("DeepSpeed checkpoint", "zero-to-fp32"), ("megatron", "model-optim-rng"),
        ("megatron checkpoint to huggingface", "model-optim-rng"), ("lora", "adapter-keys"),
        ("how do I merge a LoRA adapter", "adapter-keys"), ("fsdp", "rank-files"), ("gguf", "gguf-file"),
        ("lightning", "lightning"), ("gptq", "quantised-weights"), ("accelerate", "fsdp-checkpoint"),
    ],
)  # fmt: skip
def test_a_subject_finds_its_page(subject: str, page: str) -> None:
    """A word or two that are no message find the page that speaks of them most."""
    assert ckpt_tools.explain(subject)[0].page == f"docs/howto/{page}.md"
