"""ckpt sign and ckpt verify: one signature for every container, and every tensor that is another is named."""

import base64
import hashlib
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.errors import ChecksumError, SignatureError, UsageError
from tests.support.keys import write_keys
from tests.support.samples import FIXTURES
from tests.support.terminal import run

pytest.importorskip("cryptography", reason="the extra `sign`")
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.commands import ckpt


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A checkpoint of several dtypes, the public key, and the signature."""
    state = {f"layer.{number}.weight": torch.randn(30, 20) for number in range(4)}
    state |= {"half.weight": torch.randn(7).half(), "norm.steps": torch.tensor(3), "strided.weight": torch.randn(6, 4).t()}
    torch.save({"epoch": 3, "model": state}, tmp_path / "model.pth")
    private, public = write_keys(tmp_path, "key")
    report = ckpt_tools.sign(tmp_path / "model.pth", key=private)
    assert report.tensors == 7
    return tmp_path / "model.pth", public, Path(report.signature)


CONVERSIONS: dict[str, dict[str, Any]] = {
    "weights.safetensors": {"select": "model"}, "shards": {"select": "model", "shard_size": "5 KB"},
    "dcp": {"format": "dcp"}, "old.pth": {"format": "pth-legacy"}, "wrapped.pth": {"select": "model", "add_module": True},
    "plain.pth": {"select": "model"},
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSIONS)
def test_one_signature_for_every_container(name: str, signed: tuple[Path, Path, Path]) -> None:
    """A signature of a .pth is valid for what it is converted into, and for what that is converted into."""
    path, public, signature = signed
    target = path.parent / name
    ckpt_tools.convert(path, target, **CONVERSIONS[name])
    report = ckpt_tools.verify(target, key=public, signature=signature)
    assert report, report.compared
    assert (report.tensors, report.compared.equal, report.signed) == (7, 7, "model.pth")
    ckpt_tools.convert(target, path.parent / "again.pth")
    assert ckpt_tools.verify(path.parent / "again.pth", key=public, signature=signature)


@pytest.mark.parametrize("kind", ["fsdp2", "tp", "dcp"])
def test_parts_have_the_digests_of_the_whole(kind: str, tmp_path: Path) -> None:
    """`check --digest` of the parts of four ranks gives what the whole in one file gives."""
    folder = FIXTURES / "parts" / kind
    ckpt_tools.convert(folder, tmp_path / "whole.safetensors")
    parts, whole = (
        {digest.where[-1]: digest.sha256 for digest in ckpt_tools.check(place, digest=True).digests}
        for place in (folder, tmp_path / "whole.safetensors")
    )
    assert {str(name).rpartition(".")[2] for name in parts} == {str(name).rpartition(".")[2] for name in whole}
    assert sorted(parts.values()) == sorted(whole.values())


def flip(path: Path, needle: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(needle) + 3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("container", ["pth", "safetensors"])
def test_one_flipped_bit_is_named(container: str, signed: tuple[Path, Path, Path]) -> None:
    """The tensor that one bit is in is named, and no other; a safetensors file has no checksum that would tell."""
    path, public, signature = signed
    state = torch.load(path)["model"]
    if container == "safetensors":
        save_file({name: value.contiguous() for name, value in state.items()}, path.with_suffix(".safetensors"))
        path = path.with_suffix(".safetensors")
    flip(path, state["layer.2.weight"].numpy().tobytes()[:40])
    report = ckpt_tools.verify(path, key=public, signature=signature)
    assert not report
    assert [(where[-1], how) for where, how in report.compared.different] == [("layer.2.weight", "other bytes")]
    assert report.compared.equal == 6
    result = ckpt("verify", path, "--key", public, "--signature", signature, code=1)
    assert "layer.2.weight: other bytes" in result.output


def test_the_envelope_is_dsse_around_in_toto(signed: tuple[Path, Path, Path]) -> None:
    """The signature is over DSSE's encoding of an in-toto statement, by the key, and says what each tensor's digest is."""
    path, public, signature = signed
    envelope = json.loads(signature.read_text())
    payload = base64.b64decode(envelope["payload"])
    key: Any = serialization.load_pem_public_key(public.read_bytes())
    text = b"DSSEv1 28 application/vnd.in-toto+json " + str(len(payload)).encode() + b" " + payload
    key.verify(base64.b64decode(envelope["signatures"][0]["sig"]), text)
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"][0]["name"] == "model.pth"
    resources = statement["predicate"]["resources"]
    assert [row["name"] for row in resources] == sorted(row["name"] for row in resources)
    values = torch.load(path)["model"]["norm.steps"].numpy().tobytes()
    (row,) = (row for row in resources if row["name"] == "model.norm.steps")
    assert row["digest"] == hashlib.sha256(b"int64 []\n" + values).hexdigest()


def test_what_is_not_this_keys(signed: tuple[Path, Path, Path]) -> None:
    """Another key, a changed statement, a text that is no envelope, keys of other kinds: refused, exit code 3."""
    path, public, signature = signed
    _, other = write_keys(path.parent, "other")
    with pytest.raises(SignatureError, match="is not signed by the key"):
        ckpt_tools.verify(path, key=other)
    envelope = json.loads(signature.read_text())
    forged = base64.b64decode(envelope["payload"]).replace(b'"float16"', b'"float32"')
    for payload in (base64.b64encode(forged).decode(), "%%%", None):
        signature.write_text(json.dumps(envelope | {"payload": payload}))
        with pytest.raises(SignatureError):
            ckpt_tools.verify(path, key=public)
    signature.write_text(json.dumps(envelope | {"payloadType": "\ud800"}))
    with pytest.raises(SignatureError, match="not plain text"):
        ckpt_tools.verify(path, key=public)
    signature.write_text("[1]")
    ckpt("verify", path, "--key", public, code=3)
    private, curve = write_keys(path.parent, "curve", ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(SignatureError, match="not an Ed25519 private key"):
        ckpt_tools.sign(path, key=private, overwrite=True)
    with pytest.raises(SignatureError, match="not an Ed25519 public key"):
        ckpt_tools.verify(path, key=curve)
    with pytest.raises(SignatureError, match="cannot be read"):
        ckpt_tools.sign(path, key=path.with_name("gone.pem"), overwrite=True)


def sealed(payload: bytes, key: Path) -> str:
    """An envelope around a payload, signed as DSSE says."""
    kind = b"application/vnd.in-toto+json"
    text = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
    private: Any = serialization.load_pem_private_key(key.read_bytes(), None)
    signature = base64.b64encode(private.sign(text)).decode()
    fields = {"payload": base64.b64encode(payload).decode(), "payloadType": kind.decode()}
    return json.dumps(fields | {"signatures": [{"sig": signature}]})


ALTERED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no tensors": lambda rows: rows["predicate"].update(resources=[]),
    "a tensor twice": lambda rows: rows["predicate"]["resources"].append(rows["predicate"]["resources"][0]),
    "one less": lambda rows: rows["predicate"]["resources"].pop(),
    "two subjects": lambda rows: rows["subject"].append(rows["subject"][0]),
    "another subject": lambda rows: rows["subject"][0]["digest"].update(sha256="0" * 64),
    "another type": lambda rows: rows.update(_type="x"),
    "a shape of text": lambda rows: rows["predicate"]["resources"][0].update(shape=""),
    "a negative size": lambda rows: rows["predicate"]["resources"][0].update(shape=[-1]),
    "a dtype that is none": lambda rows: rows["predicate"]["resources"][0].update(dtype={}),
    "of another kind": lambda rows: rows.update(predicateType="x"),
    "empty": lambda rows: rows.clear(),
}


@pytest.mark.parametrize("name", ALTERED)
def test_statements_that_say_two_things(name: str, signed: tuple[Path, Path, Path]) -> None:
    """A statement is refused that contradicts itself, whoever has signed it: another reader may take the other half."""
    path, public, signature = signed
    statement = json.loads(base64.b64decode(json.loads(signature.read_text())["payload"]))
    ALTERED[name](statement)
    signature.write_text(sealed(json.dumps(statement).encode(), path.with_name("key.pem")))
    with pytest.raises(SignatureError, match="signs a statement"):
        ckpt_tools.verify(path, key=public)


def test_what_is_not_signed(signed: tuple[Path, Path, Path]) -> None:
    """Nothing is signed that is damaged or whose tensors have no digest; a signature replaces nothing."""
    path, _, _ = signed
    private = path.with_name("key.pem")
    with pytest.raises(FileExistsError):
        ckpt_tools.sign(path, key=private)
    with pytest.raises(UsageError):
        ckpt_tools.sign(path, key=private, output=path.with_name("sig.pth"))
    torch.save({"a.weight": torch.ones(2), "b.weight": torch.eye(3).to_sparse()}, path.with_name("sparse.pth"))
    with pytest.raises(SignatureError, match=r"1 tensors have no digest: b\.weight"):
        ckpt_tools.sign(path.with_name("sparse.pth"), key=private)
    flip(path, torch.load(path)["model"]["layer.0.weight"].numpy().tobytes()[:40])
    with pytest.raises(ChecksumError):
        ckpt_tools.sign(path, key=private, output=path.with_name("new.sig"))
    assert not path.with_name("new.sig").exists()


def test_envelopes_that_are_refused_as_such(signed: tuple[Path, Path, Path]) -> None:
    """With a key twice another reader of DSSE may take the other; each signature takes time, so of 101 none is looked at."""
    path, public, signature = signed
    text = signature.read_text()
    envelope = json.loads(text)
    many = json.dumps(envelope | {"signatures": envelope["signatures"] * 101})
    twice = ['{"%s": "e30=", %s' % (field, text.lstrip()[1:]) for field in ("payload", "payloadType", "signatures")]  # noqa: UP031
    for forged, message in ((many, "101"), *((one, "is not a signature") for one in twice)):
        signature.write_text(forged)
        with pytest.raises(SignatureError, match=message):
            ckpt_tools.verify(path, key=public)
    signature.write_text(sealed(b"\xff", path.with_name("key.pem")))
    with pytest.raises(SignatureError, match="signs a statement"):
        ckpt_tools.verify(path, key=public)


def test_pipes_are_not_waited_for(signed: tuple[Path, Path, Path]) -> None:
    """A pipe or a device in place of a signature or a key is refused, and not read for ever."""
    path, public, _ = signed
    pipe = path.with_name("pipe")
    os.mkfifo(pipe)
    for where in (pipe, Path("/dev/zero"), path.parent):
        with pytest.raises(SignatureError, match=r"is (a directory|not a regular file)|cannot be read"):
            ckpt_tools.verify(path, key=public, signature=where)
        with pytest.raises(SignatureError):
            ckpt_tools.verify(path, key=where)
        with pytest.raises(SignatureError):
            ckpt_tools.sign(path, key=where, overwrite=True)


def test_keys_of_unknown_kinds(signed: tuple[Path, Path, Path]) -> None:
    """A key of a kind that cryptography does not know, as the next library's may be, is refused by name."""
    path, public, _ = signed
    for key in (public, path.with_name("key.pem")):
        begin, *lines, end = key.read_text().splitlines()
        der = base64.b64decode("".join(lines)).replace(bytes.fromhex("2b6570"), bytes.fromhex("2b654f"))
        key.write_text("\n".join((begin, base64.b64encode(der).decode(), end, "")))
    with pytest.raises(SignatureError, match="not an Ed25519 public key"):
        ckpt_tools.verify(path, key=public)
    with pytest.raises(SignatureError, match="not an Ed25519 private key"):
        ckpt_tools.sign(path, key=path.with_name("key.pem"), overwrite=True)


def test_what_lies_beside_is_said_not_to_be_signed(signed: tuple[Path, Path, Path]) -> None:
    """Another epoch and another tensor's dict are no difference; the page says that settings are not covered."""
    path, public, _ = signed
    torch.save({"epoch": 4, "model": torch.load(path)["model"]}, path)
    page = ckpt("verify", path, "--key", public)
    assert page.output.splitlines()[-1] == "not signed everything else: settings, epochs, objects"


class Runs:
    """Runs a command when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


BESIDE: dict[str, tuple[Any, str]] = {
    "a call": (Runs(), "dangerous: it runs posix.system('true')"),
    "a class": (torch.nn.Linear, "needs code: loading it runs torch.nn.modules.linear.Linear"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_signature_does_not_vouch_for_code(name: str, signed: tuple[Path, Path, Path]) -> None:
    """An object beside the signed tensors is named, exit code 1; --tensors-only compares the tensors alone."""
    path, public, signature = signed
    added, said = BESIDE[name]
    torch.save({"model": torch.load(path)["model"], "x": added}, path.with_name("added.pth"))
    call = ("verify", path.with_name("added.pth"), "--key", public, "--signature", signature)
    page = ckpt(*call, code=1)
    assert "added.pth: not verified: its tensors are as signed, but it may run code" in page.output
    assert said in page.output
    assert not ckpt_tools.verify(path.with_name("added.pth"), key=public, signature=signature)
    assert ckpt_tools.verify(path.with_name("added.pth"), key=public, signature=signature, tensors_only=True)
    tensors = ckpt(*call, "--tensors-only")
    assert said in tensors.output


def test_what_cannot_be_examined_is_not_verified(signed: tuple[Path, Path, Path]) -> None:
    path, public, signature = signed
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("model/extra/code", b"7z\xbc\xaf\x27\x1c" + bytes(90))
    report = ckpt_tools.verify(path, key=public, signature=signature)
    assert not report
    assert report.same_tensors
    assert [found.verdict for found in report.not_plain] == ["unexamined"]


def test_every_file_of_a_folder_counts(signed: tuple[Path, Path, Path]) -> None:
    """A pickle that was laid beside signed shards is named; the tensors themselves are still those that were signed."""
    path, public, signature = signed
    folder = path.with_name("shards")
    ckpt_tools.convert(path, folder, select="model", shard_size="5 KB")
    assert ckpt_tools.verify(folder, key=public, signature=signature)
    (folder / "training_args.bin").write_bytes(pickle.dumps(Runs()))
    report = ckpt_tools.verify(folder, key=public, signature=signature)
    assert not report
    assert report.same_tensors
    assert [Path(found.path).name for found in report.not_plain] == ["training_args.bin"]
    (index,) = folder.glob("*.index.json")
    assert ckpt_tools.verify(index, key=public, signature=signature)  # what it names, and no other file


def test_the_current_folder_has_its_signature_beside_it(
    signed: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, public, _ = signed
    ckpt_tools.convert(path, path.with_name("shards"), select="model", shard_size="5 KB")
    monkeypatch.chdir(path.with_name("shards"))
    assert ckpt_tools.sign(".", key=public.with_suffix(".pem")).signature == str(path.with_name("shards.sig"))
    assert ckpt_tools.verify(".", key=public)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.fp16.safetensors", "adapter_model.safetensors", "weights"])
def test_other_weights_beside_signed_shards(name: str, signed: tuple[Path, Path, Path]) -> None:
    """A program may take those instead; the training's own state is no such file."""
    path, public, signature = signed
    folder = path.with_name("shards")
    ckpt_tools.convert(path, folder, select="model", shard_size="5 KB")
    (folder / "optimizer_0").mkdir()
    for state in ("optimizer.pt", "optimizer_0/0.pth"):
        torch.save({"exp_avg": torch.zeros(3)}, folder / state)
    (folder / "config.json").write_text("{}")
    assert ckpt_tools.verify(folder, key=public, signature=signature)
    suffix = "safetensors" if name.endswith("safetensors") else "pth"
    ckpt_tools.convert(path, path.with_name(f"other.{suffix}"), select="model", overwrite=True)
    path.with_name(f"other.{suffix}").rename(folder / name)
    report = ckpt_tools.verify(folder, key=public, signature=signature)
    assert (bool(report), report.same_tensors, [Path(found).name for found in report.beside]) == (False, True, [name])
    assert ckpt_tools.verify(folder, key=public, signature=signature, tensors_only=True)


def test_sign_says_what_it_does_not_cover(signed: tuple[Path, Path, Path]) -> None:
    """Plain values, objects, metadata and other files are named before the signature is written."""
    path = signed[0]
    torch.save({"epoch": 3, "w": torch.ones(2), "x": Runs()}, path.with_name("added.pth"))
    page = run("sign", path.with_name("added.pth"), "--key", path.with_name("key.pem")).output.splitlines()
    assert page[0] == "not signed  values: epoch"
    assert page[1].startswith("not signed ")
    assert page[1].endswith("added.pth: dangerous: it runs posix.system('true')")
    assert page[2].startswith("wrote ")
    folder = path.with_name("shards")
    ckpt_tools.convert(path, folder, select="model", shard_size="5 KB")
    (folder / "config.json").write_text("{}")
    report = ckpt_tools.sign(folder, key=path.with_name("key.pem"))
    assert [Path(file).name for file in report.not_signed.files] == ["config.json"]
    save_file({"w": torch.ones(2)}, path.with_name("m.safetensors"), {"format": "pt"})
    seen: list[Any] = []
    ckpt_tools.sign(path.with_name("m.safetensors"), key=path.with_name("key.pem"), before=seen.append)
    assert [found.metadata for found in seen] == [["format"]]


def reinterpreted(state: dict[str, torch.Tensor]) -> None:
    state["layer.0.weight"] = state["layer.0.weight"].view(torch.int32)


def reshaped(state: dict[str, torch.Tensor]) -> None:
    state["layer.0.weight"] = state["layer.0.weight"].reshape(20, 30)


def swapped(state: dict[str, torch.Tensor]) -> None:
    state["layer.0.weight"], state["layer.1.weight"] = state["layer.1.weight"], state["layer.0.weight"]


def renamed(state: dict[str, torch.Tensor]) -> None:
    state["layer.9.weight"] = state.pop("layer.0.weight")


def wrapped_beside(state: dict[str, torch.Tensor]) -> None:
    state["module.layer.0.weight"] = torch.zeros(30, 20)


def behind_a_text(state: dict[Any, torch.Tensor]) -> None:
    state["None"], state[None] = torch.zeros(2), torch.ones(2)


@pytest.mark.parametrize("alter", [reinterpreted, reshaped, swapped, renamed, wrapped_beside, behind_a_text])
def test_tensors_that_are_altered(alter: Callable[[Any], None], signed: tuple[Path, Path, Path]) -> None:
    """The same bytes as another dtype or in another shape, under other names, or beside what was signed: not verified."""
    path, public, signature = signed
    saved = torch.load(path)
    if alter is behind_a_text:  # signed without the second
        torch.save({"model": saved["model"] | {"None": torch.ones(2)}}, path)
        ckpt_tools.sign(path, key=path.with_name("key.pem"), overwrite=True)
    alter(saved["model"])
    torch.save(saved, path)
    assert not ckpt_tools.verify(path, key=public, signature=signature)
