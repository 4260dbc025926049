"""Messages as torch, transformers, safetensors, Lightning, mmcv, timm, diffusers, DeepSpeed, NumPy and pickle print them."""

# ruff: noqa: E501

ERRORS = "RuntimeError: Error(s) in loading state_dict for {}:\n\t{}"
NET = ERRORS.replace("{}", "Net", 1)
UNSAFE = (
    "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two options, do those "
    "steps only if you trust the source of the checkpoint. \n\t(1) In PyTorch 2.6, we changed the default value of the "
    "`weights_only` argument in `torch.load` from `False` to `True`. Re-running `torch.load` with `weights_only` set to `False` "
    "will likely succeed, but it can result in arbitrary code execution. Do it only if you got the file from a trusted source.\n"
    "\t(2) Alternatively, to load with `weights_only=True` please check the recommended steps in the following error message.\n"
    "\tWeightsUnpickler error: "
)
LOADING = (
    'Traceback (most recent call last):\n  File "/home/u/run.py", line 12, in <module>\n    ckpt = torch.load("last.pth")\n'
    '           ^^^^^^^^^^^^^^^^^^^^^^\n  File "/usr/lib/python3/torch/serialization.py", line 1530, in load\n    return _load(\n'
    '  File "/usr/lib/python3/torch/serialization.py", line 2122, in _load\n    result = unpickler.load()\n'
)
TRAINING = 'Traceback (most recent call last):\n  File "/home/u/train.py", line 3, in <module>\n    {}\n'


def names(missing: str = "", unexpected: str = "") -> str:
    """torch's error about names."""
    quoted = [", ".join(f'"{name}"' for name in listed.split()) for listed in (missing, unexpected)]
    parts = [f"Missing key(s) in state_dict: {quoted[0]}. "] * bool(missing)
    parts += [f"Unexpected key(s) in state_dict: {quoted[1]}. "] * bool(unexpected)
    return NET.replace("{}", "\n\t".join(parts))


def sizes(name: str, file: str, model: str) -> str:
    """torch's error about a shape."""
    said = f"size mismatch for {name}: copying a param with shape torch.Size([{file}]) from checkpoint, the shape in current model is"
    return NET.replace("{}", f"{said} torch.Size([{model}]).")


SEEN: dict[str, list[str]] = {
    "lightning": [
        names("conv1.weight conv1.bias", "epoch global_step pytorch-lightning_version state_dict loops callbacks"),
        names("fc.weight", "state_dict epoch pytorch-lightning_version hyper_parameters"),
    ],
    "one-level-down": [names('backbone.conv1.weight', 'epoch netG_state_dict optimizer_state_dict'), 'KeyError: \'unexpected key "state_dict" in state_dict\'', names('bert.encoder.weight', 'epoch arch state_dict optimizer version args amp_scaler state_dict_ema metric'), names('a.weight', 'model optimizer epoch previous_best'), names('a.weight b.bias', 'weird other_thing'),
        names("conv1.weight fc.bias", "epoch state_dict"),
        names("conv1.weight fc.bias", "epoch arch state_dict best_acc1 optimizer scheduler"),
        names("encoder.stages.0.0.convs.0.conv.weight", "network_weights optimizer_state grad_scaler_state logging trainer_name"),
        names("0.weight 0.bias", "model_state_dict optimizer_state_dict epoch loss"),
        names("stem.weight", "model optimizer lr_scheduler epoch args"),
        names("conv_first.weight conv_first.bias", "params_ema"),
        names("conv_first.weight", "params"),
        names("l.weight", "net acc epoch"),
        "The model and loaded state dict do not match exactly\n\nunexpected key in source state_dict: meta, state_dict, optimizer\n\n"
        "missing keys in source state_dict: backbone.conv1.weight, backbone.bn1.weight\n",
    ],
    "missing-key": ["RuntimeError: No state_dict found in checkpoint file x.pth", "KeyError: 'global_step'",
        "KeyError: 'params_ema'", "KeyError: 'state_dict'", "KeyError: 'model_state_dict'",
        'Traceback (most recent call last):\n  File "inference.py", line 61, in main\n'
        "    model.load_state_dict(torch.load(args.model_path)['params_ema'], strict=True)\nKeyError: 'params_ema'",
        'Traceback (most recent call last):\n  File "eval.py", line 9, in <module>\n    net.load_state_dict(checkpoint["net"])\n'
        "KeyError: 'net'",
    ],
    "not-lightning": ["KeyError: 'Trying to restore training state but checkpoint contains only the model. This is probably due to `ModelCheckpoint.save_weights_only` being set to `True`.'", "KeyError: 'pytorch-lightning_version'"],
    "mp-rank-00": [
        names("fc.weight", "module buffer_names optimizer param_shapes frozen_param_shapes lr_scheduler"),
        ERRORS.format("DeepSpeedEngine", 'Missing key(s) in state_dict: "a.weight". '),
    ],
    "lora-rank": [sizes("base_model.model.q.lora_A.default.weight", "8, 64", "16, 64")],
    "lightning-arguments": [
        'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    m = LitNet.load_from_checkpoint("last.ckpt")\n'
        "TypeError: __init__() missing 1 required positional argument: 'backbone'",
    ],
    "path-for-state-dict": ["TypeError: Expected state_dict to be dict-like, got <class 'str'>."],
    "pickled-code": ["TypeError: code() argument 13 must be str, not int", "TypeError: code expected at most 16 arguments, got 18"],
    "old-format": [
        "RuntimeError: mmap can only be used with files saved with `torch.save(x.pth, _use_new_zipfile_serialization=True), please",
        "RuntimeError: Cannot use ``weights_only=True`` with files saved in the legacy .tar format.",
    ],
    "metadata-pkl": ["metadata.pkl with model_0.pt, model_1.pt, and half a model"],
    "silent-corruption": ["torch.load raises nothing, but the values are wrong"],
    "other-outputs": ["the outputs are different after a conversion"],
    "lora-names": [
        names("q.weight", "base_model.model.q.lora_A.weight base_model.model.q.lora_B.weight"),
        names("", "lora_unet_down_blocks_0.lora_down.weight"),
        "ValueError: Can't find 'adapter_config.json' at './out'",
        "ValueError: Target modules {'gate', 'up'} not found in the base model. Please check the target modules and try again.",
    ],
    "lora-missing": [names("base_model.model.q.lora_A.default.weight", "q.weight")],
    "quantised-weights": [
        names("", "model.layers.0.mlp.gate_proj.qweight model.layers.0.mlp.gate_proj.qzeros"),
        names("", "fc.weight_scale_inv"), names("", "fc.weight.absmax fc.weight.quant_map"), names("", "l.SCB"),
        names("", "m.weight_packed m.weight_scale"),
        "ValueError: Supplied state dict for layers.0.weight does not contain `bitsandbytes__*` and possibly other "
        "`quantized_stats` components.",
        "ValueError: Unknown quantization type, got awq - supported types are: ['gptq']",
        sizes("model.layers.0.self_attn.q_proj.weight", "8388608, 1", "4096, 4096"),
    ],
    "weight-norm": [
        names("conv.weight", "conv.weight_g conv.weight_v"),
        names("dec.conv_pre.parametrizations.weight.original0", "dec.conv_pre.weight_g dec.conv_pre.weight_v"),
        names("l.weight_orig l.weight_u", "l.weight"),
        names("fc.weight", "fc.bias_mask fc.weight_mask fc.weight_orig"),
    ],
    "flat-param": [names("_fsdp_wrapped_module._flat_param"), names("w.weight", "_fsdp_wrapped_module.layers.0._flat_param")],
    "nested-wrappers": [names("a.weight", "_orig_mod.module.a.weight"), names("a.weight", "module._orig_mod.a.weight")],
    "orig-mod-prefix": [
        names("conv1.weight", "_orig_mod.conv1.weight"), "KeyError: '_orig_mod.conv1.weight'",
        names("", "_fsdp_wrapped_module.layer.weight"), names("l.0.weight", "l.0._checkpoint_wrapped_module.weight"),
    ],
    "module-prefix": [
        names("layer1.0.bn1.weight", "module.layer1.0.bn1.weight"),
        "KeyError: 'unexpected key \"module.conv1.weight\" in state_dict'",
        "KeyError: 'module.conv1.weight'",
        "unexpected key in source state_dict: module.backbone.conv1.weight\n\nmissing keys in source state_dict: backbone.conv1.weight",
        "_IncompatibleKeys(missing_keys=['layer.weight'], unexpected_keys=['module.layer.weight'])",
        "missing keys: ['a.weight']\nunexpected keys: ['module.a.weight']",
    ],
    "inner-module-prefix": [names("features.0.weight classifier.weight", "features.module.0.weight")],
    "model-is-wrapped": [names("module.conv1.weight", "conv1.weight"), names("_orig_mod.a.weight", "a.weight")],
    "old-buffers": [
        names("", "text_model.embeddings.position_ids"), names("", "layers.0.rotary_emb.inv_freq layers.1.rotary_emb.inv_freq"),
        names("", "bn1.num_batches_tracked"),
    ],
    "num-batches-tracked": [names("bn1.num_batches_tracked layer1.0.bn1.num_batches_tracked")],
    "meta-llama-names": [
        names("model.embed_tokens.weight model.norm.weight", "tok_embeddings.weight norm.weight"),
        "safetensors_rust.SafetensorError: File does not contain tensor model.embed_tokens.weight",
    ],
    "vit-names": [names("encoder.layers.encoder_layer_0.ln_1.weight", "blocks.0.norm1.weight")],
    "prefix": [names('cls.weight layer.bias', 'module2.net.layer.bias'),
        names("conv1.weight fc.bias", "model.conv1.weight model.fc.bias"),
        names("patch_embed.proj.weight", "mask_token encoder.patch_embed.proj.weight"),
        ERRORS.format("LitNet", 'Unexpected key(s) in state_dict: "model.layer1.weight". '),
        "unexpected key in source state_dict: backbone.conv1.weight\n\nmissing keys in source state_dict: conv1.weight\n",
    ],
    "prefix-missing": [names("backbone.conv1.weight backbone.fc.bias", "conv1.weight fc.bias")],
    "loss-weights": [
        names("", "criterion.weight"), names("", "loss_fn.weight"), names("", "perceptual_loss.vgg.0.weight"),
        ERRORS.format("LitClassifier", 'Unexpected key(s) in state_dict: "criterion.pos_weight". '),
        names("", "train_acc.confmat"),
    ],
    "loss-missing": [names("criterion.weight")],
    "newly-initialized": [
        "Some weights of BertForSequenceClassification were not initialized from the model checkpoint at bert-base-uncased and are "
        "newly initialized: ['classifier.bias', 'classifier.weight']\nYou should probably TRAIN this model on a down-stream task to "
        "be able to use it for predictions and inference.",
        "Some weights of the model checkpoint at bert were not used when initializing BertModel: ['cls.predictions.bias']\n- This IS "
        "expected if you are initializing BertModel from the checkpoint of a model trained on another task",
        "BertModel LOAD REPORT from: ./bert\nKey          | Status  | \n-------------+---------+-\nqa_outputs.w | MISSING | \n",
    ],
    "strict-false": ["_IncompatibleKeys(missing_keys=['a.weight'], unexpected_keys=['b.weight'])"],
    "mmcv": [
        "mmengine - WARNING - The model and loaded state dict do not match exactly\n\nmissing keys in source state_dict: "
        "bbox_head.fc_cls.weight\n",
        "WARNING:root:The model and loaded state dict do not match exactly\n\nunexpected key in source state_dict: fc.weight, fc.bias\n",
    ],
    "other-names": [names("encoder.0.weight", "body.first.weight"), "KeyError: 'encoder.layer.0.weight'"],
    "missing-tensors": ["ValueError: Cannot load <class 'diffusers.UNet2DConditionModel'> from ./unet because the following keys are missing: \n up_blocks.0.conv.weight, down.bias. \n Please make sure to pass `low_cpu_mem_usage=False`", names("head.weight head.bias"), "SafetensorError: File does not contain tensor head.bias"],
    "unexpected-tensors": [names("", "head.weight head.bias")],
    "zero-to-fp32": [
        sizes("model.embed_tokens.weight", "0", "32000, 4096"), "FileNotFoundError: can't find model_states files in directory './x'",
        "ValueError: Unable to find 'latest' file at /runs/x/latest",
    ],
    "consolidated": [sizes("layers.0.attention.wq.weight", "2048, 4096", "4096, 4096")],
    "flat-shard": [sizes("fc.weight", "6", "3, 4")],
    "vocabulary": [
        sizes("model.embed_tokens.weight", "32001, 4096", "32000, 4096"), sizes("transformer.wte.weight", "50258, 768", "50257, 768"),
        'ValueError: Trying to set a tensor of shape torch.Size([32064, 4096]) in "weight" (which has shape torch.Size([32000, 4096])), '
        "this looks incorrect.",
    ],
    "channels-or-positions": [
        sizes("conv1.weight", "64, 3, 7, 7", "64, 1, 7, 7"), sizes("pos_embed", "1, 197, 768", "1, 577, 768"),
        sizes("patch_embed.proj.weight", "96, 3, 4, 4", "96, 4, 4, 4"),
        sizes("vision_model.embeddings.position_embedding.weight", "50, 768", "257, 768"),
        "The model and loaded state dict do not match exactly\n\nsize mismatch for backbone.conv1.weight: copying a param with shape "
        "torch.Size([64, 3, 7, 7]) from checkpoint, the shape in current model is torch.Size([64, 5, 7, 7]).",
        "ValueError: Cannot load unet because conv_in.weight expected shape tensor(..., device='meta', size=(320, 9, 3, 3)), but got "
        "torch.Size([320, 4, 3, 3]). If you want to instead overwrite randomly initialized weights, please make sure to pass both "
        "`low_cpu_mem_usage=False` and `ignore_mismatched_sizes=True`.",
    ],
    "size-mismatch": [
        "size mismatch for fc.weight", sizes("classifier.weight", "1000, 512", "7, 512"), sizes("head.bias", "21841", "10"),
        sizes("roi_heads.box_predictor.cls_score.weight", "91, 1024", "3, 1024")
        + "\n\tYou may consider adding `ignore_mismatched_sizes=True` in the model `from_pretrained` method.",
        "RuntimeError: You set `ignore_mismatched_sizes` to `False`, thus raising an error. For details look at the above report!",
        "ValueError: Size mismatch between saved torch.Size([10, 4]) and current: torch.Size([3, 4]) for fc.weight",
        'While copying the parameter named "fc.weight", whose dimensions in the model are torch.Size([3, 4]) and whose dimensions in '
        "the checkpoint are torch.Size([10, 4]).",
        "The model and loaded state dict do not match exactly\n\nsize mismatch for bbox_head.fc_cls.weight: copying a param with shape "
        "torch.Size([81, 1024]) from checkpoint, the shape in current model is torch.Size([4, 1024]).",
    ],
    "cuda-device": [
        "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. If you are running "
        "on a CPU-only machine, please use torch.load with map_location=torch.device('cpu') to map your storages to the CPU.",
        "RuntimeError: Attempting to deserialize object on CUDA device 3 but torch.cuda.device_count() is 1.",
        "RuntimeError: Attempting to deserialize object on a MPS device but torch.mps.is_available() is False.",
        "safetensors_rust.SafetensorError: device cuda:0 is invalid",
    ],
    "no-cuda": [f"{LOADING}AssertionError: Torch not compiled with CUDA enabled"],
    "device-tag": [
        "RuntimeError: don't know how to restore data location of torch.storage.UntypedStorage (tagged with hpu:0)",
        "RuntimeError: don't know how to restore data location of torch.FloatStorage (tagged with mps)",
    ],
    "mixed-dtypes": [
        "RuntimeError: expected scalar type Half but found Float", "TypeError: Got unsupported ScalarType BFloat16",
        "RuntimeError: mat1 and mat2 must have the same dtype, but got BFloat16 and Float",
        "RuntimeError: Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same",
        "RuntimeError: \"slow_conv2d_cpu\" not implemented for 'Half'", "AttributeError: module 'torch' has no attribute 'float8_e4m3fn'",
    ],
    "meta-tensor": ["NotImplementedError: Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty()"],
    "out-of-memory": [f"{LOADING}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"],
    "wrapped-attribute": [
        "AttributeError: 'DataParallel' object has no attribute 'fc'",
        "AttributeError: 'DistributedDataParallel' object has no attribute 'save_pretrained'",
    ],
    "state-dict-is-no-model": [
        "AttributeError: 'collections.OrderedDict' object has no attribute 'eval'", "AttributeError: 'dict' object has no attribute 'to'",
        "TypeError: 'collections.OrderedDict' object is not callable",
        "RuntimeError: PytorchStreamReader failed locating file constants.pkl: file not found",
    ],
    "persistent-load": [
        "_pickle.UnpicklingError: A load persistent id instruction was encountered, but no persistent_load function was specified.",
        "_pickle.UnpicklingError: A load persistent id instruction was encountered,\nbut no persistent_load function was specified.",
        "pickle.UnpicklingError: unsupported persistent id encountered",
    ],
    "torchscript": [
        "RuntimeError: Cannot use ``weights_only=True`` with TorchScript archives passed to ``torch.load``. In PyTorch 2.6, we changed "
        "the default value of the `weights_only` argument in `torch.load` from `False` to `True`.",
        "UserWarning: 'torch.load' received a zip file that looks like a TorchScript archive dispatching to 'torch.jit.load'",
        "TypeError: Expected state_dict to be dict-like, got <class 'torch.jit._script.RecursiveScriptModule'>.",
        "AttributeError: 'RecursiveScriptModule' object has no attribute 'copy'",
    ],
    "parameter-group": [
        "ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
        "ValueError: loaded state dict has a different number of parameter groups",
    ],
    "only-tensors": ["ValueError: Key `epoch` is invalid, expected torch.Tensor but received <class 'int'>"],
    "shared-memory": [
        "RuntimeError: \n            Some tensors share memory, this will lead to duplicate memory on disk and potential differences",
        "RuntimeError: The weights trying to be saved contained shared tensors [{'lm_head.weight'}] that are mismatching",
    ],
    "non-contiguous": ["ValueError: You are trying to save a non contiguous tensor: `weight` which is not allowed."],
    "blocked-global": [
        f"{UNSAFE}Trying to load unsupported GLOBAL posix.system whose module posix is blocked.",
        f"{UNSAFE}Unsupported global: GLOBAL builtins.eval was not an allowed global by default.",
    ],
    "dtensor": [
        "RuntimeError: aten.copy_.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor",
        f"{UNSAFE}``torch.distributed.tensor`` must be imported to load DTensors",
    ],
    "weights-only-numpy": [
        f"{UNSAFE}Unsupported global: GLOBAL numpy.core.multiarray._reconstruct was not an allowed global by default. Please use "
        "`torch.serialization.add_safe_globals([_reconstruct])`",
    ],
    "weights-only-class": [
        f"{UNSAFE}Unsupported global: GLOBAL argparse.Namespace was not an allowed global by default.",
        f"{UNSAFE}Unsupported global: GLOBAL ultralytics.nn.tasks.DetectionModel was not an allowed global by default.",
        "_pickle.UnpicklingError: Weights only load failed. Re-running `torch.load` with `weights_only` set to `False` will likely "
        "succeed. WeightsUnpickler error: Unsupported class argparse.Namespace",
        "RuntimeError: weights_only=True blocked loading this checkpoint because it requires non-allowlisted pickle globals.",
    ],
    "pickle-protocol": [
        f"{UNSAFE}Unsupported operand 149", "ValueError: unsupported pickle protocol: 5",
        "UserWarning: Detected pickle protocol 4 in the checkpoint, which was not the default pickle protocol used by `torch.load` (2).",
    ],
    "megatron": ["ModuleNotFoundError: No module named 'megatron'", f"{LOADING}ModuleNotFoundError: No module named 'megatron.core'"],
    "numpy-core": [
        "ModuleNotFoundError: No module named 'numpy._core'", "ModuleNotFoundError: No module named 'numpy._core.multiarray'",
        "ValueError: <class 'numpy.random._pcg64.PCG64'> is not a known BitGenerator module.",
    ],
    "path-of-another-system": [
        "NotImplementedError: cannot instantiate 'WindowsPath' on your system",
        "pathlib._abc.UnsupportedOperation: cannot instantiate 'PosixPath' on your system",
        "ModuleNotFoundError: No module named 'pathlib._local'; 'pathlib' is not a package",
    ],
    "python-2": [
        "UnicodeDecodeError: 'ascii' codec can't decode byte 0xd0 in position 0: ordinal not in range(128)",
        f"{LOADING}UnicodeDecodeError: 'ascii' codec can't decode byte 0xb0 in position 12: ordinal not in range(128)",
        'Traceback (most recent call last):\n  File "x.py", line 2, in <module>\n    d = pickle.load(f)\n'
        "UnicodeDecodeError: 'ascii' codec can't decode byte 0xc7 in position 1: ordinal not in range(128)",
    ],
    "read-as-text": [
        'Traceback (most recent call last):\n  File "x.py", line 2, in <module>\n    m = AutoModel.from_pretrained("./model.bin")\n'
        "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte",
    ],
    "newer-function": [
        "AttributeError: Can't get attribute '_rebuild_tensor_v2' on <module 'torch._utils' from '/x/torch/_utils.py'>",
        "AttributeError: module 'torch._utils' has no attribute '_rebuild_tensor_v2'",
        "AttributeError: Can't get attribute '_rebuild_parameter_with_state' on <module 'torch._utils' from '/x/torch/_utils.py'>",
        "AttributeError: module 'torch' has no attribute 'UntypedStorage'",
    ],
    "cant-get-attribute": [
        "AttributeError: Can't get attribute 'MyModel' on <module '__main__' from 'x.py'>",
        f"{LOADING}AttributeError: Can't get attribute 'C3k2' on <module 'ultralytics.nn.modules.block' from '/x/block.py'>",
    ],
    "no-module-named": [
        "ModuleNotFoundError: No module named 'models.yolo'", "No module named 'utils'",
        "TypeError: Expected state_dict to be dict-like, got <class 'models.Net'>.",
    ],
    "pickled-import": [f"{LOADING}ModuleNotFoundError: No module named 'my_project'"],
    "old-module": ["AttributeError: 'Conv2d' object has no attribute '_padding_repeated_twice'",
        "AttributeError: 'GELU' object has no attribute 'approximate'",
        "torch.nn.modules.module.ModuleAttributeError: 'BatchNorm2d' object has no attribute '_non_persistent_buffers_set'"],
    "cant-pickle": [
        'Traceback (most recent call last):\n  File "t.py", line 9, in <module>\n    torch.save(model, "m.pth")\n'
        "AttributeError: Can't pickle local object 'make.<locals>.Net'",
    ],
    "allow-pickle": ["ValueError: Object arrays cannot be loaded when allow_pickle=False",
        "ValueError: Cannot load file containing pickled data when allow_pickle=False"],
    "serious-vulnerability": [
        "ValueError: Due to a serious vulnerability issue in `torch.load`, even with `weights_only=True`, we now require users to upgrade",
    ],
    "weights-only": ["_pickle.UnpicklingError: Weights only load failed. In PyTorch 2.6, we changed the default value"],
    "is-it-safe": [
        "FutureWarning: You are using `torch.load` with `weights_only=False` (the current default value)",
        "is this file safe", "does this checkpoint contain malicious code?",
    ],
    "html-page": ["_pickle.UnpicklingError: invalid load key, '<'.", f"{UNSAFE}Unsupported operand 60"],
    "lfs-pointer": [
        "_pickle.UnpicklingError: invalid load key, 'v'.", f"{UNSAFE}Unsupported operand 118",
        "OSError: You seem to have cloned a repository without having git-lfs installed. Please install git-lfs",
        f"{LOADING}_pickle.UnpicklingError: invalid load key, 'v'.\n\nDuring handling of the above exception, another exception occurred:"
        "\n\nOSError: Unable to load weights from pytorch checkpoint file for 'b' at 'b/pytorch_model.bin'.",
    ],
    "packed": ["_pickle.UnpicklingError: invalid load key, '\\x1f'.", "KeyError: \"filename 'storages' not found\""],
    "newer-torch": [
        "RuntimeError: Attempted to read a PyTorch file with version 10, but the maximum supported version for reading is 5.",
        "TypeError: load() got an unexpected keyword argument 'weights_only'", "_pickle.UnpicklingError: invalid load key, 'P'.",
        "RuntimeError: x.pth is a zip archive (did you mean to use torch.jit.load()?)",
        "version_ <= kMaxSupportedFileFormatVersion INTERNAL ASSERT FAILED at ../caffe2/serialize/inline_container.cc:132",
    ],
    "gguf-file": [
        "llama_model_load: error loading model: missing tensor 'token_embd.weight'",
        "gguf_init_from_file: invalid magic characters 'PK'", "UnpicklingError: invalid load key, '\\x00'.",
    ],
    "crlf": ["_pickle.UnpicklingError: the STRING opcode argument must be quoted"],
    "empty-file": ["EOFError: Ran out of input", f"{LOADING}EOFError: Ran out of input"],
    "failed-save": [
        "RuntimeError: [enforce fail at inline_container.cc:778] . unexpected pos 64 vs 0",
        "RuntimeError: [enforce fail at inline_container.cc:595] . unexpected pos 704 vs 598",
        "RuntimeError: PytorchStreamWriter failed writing file data/0: file write failed",
        "OSError: [Errno 28] No space left on device",
    ],
    "not-safetensors": [
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        "safetensors_rust.SafetensorError: Error while deserializing header: header too large",
        "SafetensorError: Error while deserializing header: invalid JSON in header: expected value at line 1 column 1",
        "safetensors_rust.SafetensorError: Error while deserializing header: InvalidHeaderDeserialization",
    ],
    "safetensors-header": [
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered",
    ],
    "safetensors-metadata": [
        "OSError: The safetensors archive passed at m.safetensors does not contain the valid metadata. Make sure you save your model "
        "with the `save_pretrained` method.",
        'Traceback (most recent call last):\n  File "modeling_utils.py", line 508, in load_state_dict\n    with safe_open(f) as s:\n'
        '  File "modeling_utils.py", line 510, in load_state_dict\n    if metadata.get("format") not in ["pt"]:\n'
        "AttributeError: 'NoneType' object has no attribute 'get'",
    ],
    "central-directory": [
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "RuntimeError: PytorchStreamReader failed reading file data/12: invalid header or archive is corrupted",
        "_pickle.UnpicklingError: pickle data was truncated", "RuntimeError: Invalid magic number; corrupt file?",
        "RuntimeError: unexpected EOF, expected 12345 more bytes. The file might be corrupted.",
        "RuntimeError: [enforce fail at inline_container.cc:197] . file not found: checkpoint/data/17",
        "RuntimeError: storage has wrong byte size: expected 9437184 got 2359296",
        "RuntimeError: PytorchStreamReader failed locating file data.pkl: file not found",
    ],
    "bad-zip": ["zipfile.BadZipFile: File is not a zip file"],
    "unable-to-load": ["OSError: Unable to load weights from pytorch checkpoint file for 'bert' at '/x/pytorch_model.bin'."],
    "not-hdf5": ["OSError: Unable to synchronously open file (file signature not found)"],
    "invalid-load-key": ["_pickle.UnpicklingError: invalid load key, '{'.", "UnpicklingError: unpickling stack underflow",
        "_pickle.UnpicklingError: invalid load key, '\\xef'."],
    "dp-world-size": ["FileNotFoundError: [Errno 2] No such file or directory: 'g/zero_pp_rank_4_mp_rank_00_optim_states.pt'",
        "deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 2 but the current world "
        "size is 4. Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not currently supported.",
    ],
    "fsdp-checkpoint": [
        "ValueError: Checkpoint found at run/checkpoint-2 is only supported when using PyTorch FSDP",
        "FileNotFoundError: [Errno 2] No such file or directory: 'ckpt/.metadata'",
        "RuntimeError: Missing key in checkpoint state_dict: model.layers.0.attention.wq.weight.",
        "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([0, 1])",
    ],
    "is-a-directory": [
        "IsADirectoryError: [Errno 21] Is a directory: 'checkpoint-500'", "IsADirectoryError: [Errno 21] Is a directory: '/runs/7/epoch_3.ckpt'",
        "IsADirectoryError: [Errno 21] Is a directory: 'runs/global_step200'",
    ],
    "is-a-directory-load": [f"{LOADING}IsADirectoryError: [Errno 21] Is a directory: '/data/saved'"],
    "sharded-checkpoint": [
        "OSError: Error no file named pytorch_model.bin, model.safetensors, tf_model.h5, model.ckpt.index or flax_model.msgpack found in "
        "directory ./x.",
        "OSError: ./x does not appear to have a file named pytorch_model.bin or model.safetensors.",
        "FileNotFoundError: [Errno 2] No such file or directory: 'x/model-00002-of-00004.safetensors'",
    ],
    "load-path": [
        "AssertionError: Client provided checkpoint load path: ./x does not exist ... exiting",
        "FileNotFoundError: [Errno 2] No such file or directory: '/runs/7/last.ckpt'",
        "FileNotFoundError: Checkpoint file not found: runs/last.ckpt",
        "FileNotFoundError: work_dirs/epoch_12.pth can not be found.",
    ],
    "latest-good": ["which checkpoint is the last good one"],
    "what-changed": ["what changed between two checkpoints", "compare two checkpoints"],
    "too-big": ["why is my checkpoint so large"],
}  # fmt: skip

OTHERS = [
    "no such thing at all", "hello world", "why does my file not load", "what is in this pth file", "permission denied",
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    TRAINING.format("loss.backward()") + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
    TRAINING.format("import my_dataset") + "ModuleNotFoundError: No module named 'my_dataset'",
    TRAINING.format("from models import Net") + "ModuleNotFoundError: No module named 'models'",
    TRAINING.format("from utils.checkpoint import load_checkpoint") + "ModuleNotFoundError: No module named 'utils.checkpoint'",
    "ModuleNotFoundError: No module named 'my_dataset'", "ModuleNotFoundError: No module named 'torchvision'",
    "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/api/models/x",
    "urllib.error.HTTPError: HTTP Error 403: Forbidden",
    "OSError: We couldn't connect to 'https://huggingface.co' to load this file, couldn't find it in the cached files",
    "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error.",
    "The size of tensor a (768) must match the size of tensor b (1024) at non-singleton dimension 1",
    "RuntimeError: size mismatch, m1: [32 x 512], m2: [1024 x 10]",
    "IndexError: list index out of range", "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
    "KeyError: 'labels'", "KeyError: 'image_id'", "IndentationError: unexpected indent",
    TRAINING.format('lr = config["model"]["lr"]') + "KeyError: 'model'",
    TRAINING.format('text = open("notes.txt").read()') + "UnicodeDecodeError: 'ascii' codec can't decode byte 0xe2 in position 8",
    "RuntimeError: CUDA error: device-side assert triggered", "RuntimeError: Trying to backward through the graph a second time",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x512 and 1024x10)",
    "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.csv'",
    "IsADirectoryError: [Errno 21] Is a directory: 'data/images'",
    "ValueError: Expected input batch_size (32) to match target batch_size (16).",
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "AttributeError: 'NoneType' object has no attribute 'shape'", "AttributeError: 'Net' object has no attribute 'forwrad'",
    "RuntimeError: DataLoader worker (pid 3) is killed by signal: Killed.", "AssertionError: Torch not compiled with CUDA enabled",
    TRAINING.format("for batch in loader:") + "AttributeError: Can't pickle local object 'main.<locals>.<lambda>'",
    TRAINING.format("output = model(x)") + "AttributeError: 'Linear' object has no attribute 'wieght'",
    "subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.",
    "ImportError: cannot import name 'AdamW' from 'transformers'", "json.decoder.JSONDecodeError: Expecting value: line 1 column 1",
    "RuntimeError: Given groups=1, weight of size [64, 3, 7, 7], expected input[1, 1, 224, 224] to have 3 channels",
    "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1691", "Segmentation fault (core dumped)",
    "TypeError: forward() missing 1 required positional argument: 'x'", "Epoch 3: loss nan, step 100",
    "NameError: name 'model' is not defined", "ValueError: too many values to unpack (expected 2)",
]  # fmt: skip
