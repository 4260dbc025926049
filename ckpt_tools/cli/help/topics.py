"""What `ckpt help TOPIC` prints: what holds for all commands."""

from __future__ import annotations

TOPICS = {
    "exit-codes": """\
0    you have what you asked for
1    the answer is no: findings (check), a file that is dangerous or could not be examined (scan), a
     difference (diff, prove), tensors without a partner (match), something that could not be saved (repair),
     another signature, or a file that may run code (verify)
2    the command line is wrong; nothing was done
3    refused: a file cannot be read or written, or the result would not be what you asked for
130  interrupted (Ctrl-C); 143 ended by SIGTERM

Whatever the code, a file is written whole or not at all. `ckpt COMMAND --help` says what 1 means there.
""",
    "formats": """\
Found by content, never by name:

torch-zip, torch-legacy, torch-tar    torch.save, of any age
torchscript, torch-export             torch.jit.save, torch.export.save
safetensors, gguf, onnx, keras, flax  one file, of gguf also several
npz, npy, pickle, zip-bundle          NumPy, pickle.dump, stable-baselines3
sharded, dcp                          folders: an index and shards; torch.distributed.checkpoint
rank-files, consolidated              a file for each rank: FSDP, tensor parallelism, Meta's Llama
megatron, deepspeed                   folders of parts

Each may be packed: gzip, bzip2, xz, zstd, tar. Written are torch-zip, torch-legacy (--format pth-legacy),
safetensors, gguf, sharded (--shard-size) and dcp: by OUT's name, or by --format.
""",
    "globs": """\
*       anything, dots too: --drop 'optimizer*', --keep '*.weight'
?       one character
[ab]    one of these; [!ab] none of these

A glob is for a whole name: 'fc' is not 'fc.weight', 'fc.*' takes all of fc. Names are those in IN, as
ckpt inspect shows them, before --strip-module and --rename; what holds no tensor is named by its dotted path
(--drop optimizer). Of several globs with a value the last that matches counts (--dtype bf16 --dtype
'*.norm.*=fp32'). Quote them, or the shell takes them for files. One that matches nothing is refused.
""",
    "environment": """\
CKPT_COMMAND_OPTION   any option of a command: CKPT_SCAN_JOBS=1, CKPT_CHECK_FORMAT=json; 1 or 0 for one
                      without a value, several values separated by spaces
CKPT_CHECK_IGNORE     "wrapper-prefix device-tags": findings that ckpt check leaves out; also CKPT_IGNORE
CKPT_CONVERT_OBJECTS  what ckpt convert does with Python objects: plain, drop, keep; also CKPT_OBJECTS
CKPT_LIMITS           "records=2000000 depth=50000": raised limits, for files that you trust (docs/limits.md)

An option that is given goes before its variable; an empty variable is not set; ckpt --version --verbose
lists those that are. No file sets anything.
NO_COLOR, COLUMNS, PAGER and TMPDIR mean what they mean elsewhere.
""",
    "json": """\
--json prints one document, of inspect, check and scan one a line for each file; errors too,
with "error", "what" and "exit_code". Text is ASCII with \\u escapes. docs/json.md names every field, and
docs/*.schema.json are the contracts, which tests hold.

ckpt inspect --json model.pth | jq '.totals.parameters'
ckpt check --json runs/ | jq -r 'select(.findings | length > 0) | .path'
""",
}
