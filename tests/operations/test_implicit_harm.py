"""What runs though no opcode calls it: what classes do with a state, with what they are given, when they are thrown away."""

from __future__ import annotations

import functools
import inspect
import json
import operator
import pickle
import typing
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ckpt_tools import scan
from ckpt_tools.pickling.callables import PARSER_TEXT
from tests.operations.test_implicit_calls import PAYLOAD, call, holding, name, text, verdict
from tests.operations.test_safety import examined
from tests.support.containers import Net


def new(path: str) -> bytes:
    """An instance of a class, made without its `__init__`."""
    return name(path) + b")\x81"


def state(**values: bytes) -> bytes:
    """A dict for BUILD, and BUILD."""
    return b"}(" + b"".join(text(key) + value for key, value in values.items()) + b"ub"


# Classes that open, write or remove files, or call what they find in themselves.
CLASSES = {
    "a folder that is removed with its instance": new("numpy.lib._datasource:DataSource")
    + state(_istmpdest=b"\x88", _destpath=text("/home")),
    "the same under another name": new("numpy:DataSource") + state(_istmpdest=b"\x88", _destpath=text("/home")),
    "the same by its module's": new("numpy.lib.npyio:DataSource") + state(_istmpdest=b"\x88", _destpath=text("/home")),
    "a file that is written": new("fsspec.caching:MMapCache") + state(size=b"K\x09", location=text("/home/x")),
    "a file that is opened": new("fsspec.implementations.local:LocalFileOpener") + state(mode=text("rb"), path=text("x")),
    "a file that is flushed": new("fsspec.spec:AbstractBufferedFile") + state(mode=text("wb")),
    "a function that is called with its argument": new("torch.multiprocessing.reductions:StorageWeakRef")
    + b"N" + state(cdata=text("id"), _free_weak_ref=name("models:run"))[:-1] + b"\x86b",
    "a method that is another's": new("torch.profiler.profiler:ExecutionTraceObserver")
    + state(unregister_callback=name("models:run")),
    "a pipe that is closed": new("torch.utils.data.datapipes.utils.common:StreamWrapper") + state(close=name("models:run")),
    "a text that is evaluated": new("fontTools.ttLib.tables.otBase:BaseTable") + state(reader=b"\x88"),
    "a file that is opened late": new("click.utils:LazyFile") + state(name=text("x"), mode=text("w")),
    "a module that is imported": new("torch.utils._config_module:ConfigModule") + state(_config=b"}"),
    "an object that is closed": new("torch._inductor.codecache:CUDACodeCache") + state(close=name("models:run")),
}  # fmt: skip


@pytest.mark.parametrize("module", ["_osx_support", "_aix_support", "_pyrepl.pager"])
def test_modules_that_run_programs(module: str, tmp_path: Path) -> None:
    """A function that runs a program is known to do harm, and not to be named either."""
    assert verdict(tmp_path, name(f"{module}:_read_output")).verdict == "dangerous"


@pytest.mark.parametrize("case", CLASSES)
def test_instances_that_do_harm(case: str, tmp_path: Path) -> None:
    """Classes whose `__setstate__` or `__del__` does harm are known."""
    assert verdict(tmp_path, CLASSES[case]).verdict == "dangerous"


NORM = new("scipy.stats._continuous_distns:norm_gen")
SOURCE = text("import os;os.system('id')")


@pytest.mark.parametrize(
    "data",
    [
        NORM + state(_parse_arg_template=SOURCE),
        new("models:Distribution") + state(_parse_arg_template=SOURCE),
        NORM + state(_parse_arg_template=call("builtins:str", SOURCE)),
        NORM + b"}" + call("builtins:str", text("_parse_arg_template")) + SOURCE + b"sb",
        NORM + b"](" + text("_parse_arg_template") + SOURCE + b"\x86eb",
        call("copyreg:_reconstructor", name("scipy.stats:norm_gen"), name("builtins:object"), b"N") + b"](K\x01eb",
    ],
    ids=["text", "another's class", "computed text", "a computed name", "pairs", "as protocol 0 makes it"],
)
def test_source_in_a_distribution(data: bytes, tmp_path: Path) -> None:
    """Distributions of scipy run a text in their state: only the one that they have written themselves is none."""
    assert verdict(tmp_path, data).verdict == "dangerous"


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_honest_distributions(protocol: int, tmp_path: Path) -> None:
    """What scipy itself pickles needs code."""
    stats = pytest.importorskip("scipy.stats")
    for value in (stats.norm, stats.beta, stats.uniform(0, 1), stats.gaussian_kde([1.0, 2.0, 4.0])):
        assert examined(tmp_path / "a.pkl", pickle.dumps(value, protocol)).verdict == "needs-code"
    for value in vars(stats).values():
        if isinstance(value, stats.rv_continuous | stats.rv_discrete):
            assert PARSER_TEXT.fullmatch(vars(value)["_parse_arg_template"]), value


TENSOR = call("torch:FloatTensor")
FUNCTION = name("models:run")


def parameter(attributes: bytes) -> bytes:
    """A parameter with these attributes."""
    return call("torch._utils:_rebuild_parameter_with_state", TENSOR, b"\x89", b"N", attributes)


def attribute(key: bytes, value: bytes = FUNCTION) -> bytes:
    """A dict of one."""
    return b"}" + key + value + b"s"


COMPUTED = call("builtins:str", text("append"))
OF_TYPE = "torch._tensor:_rebuild_from_type_v2"
REBUILD = name("torch._utils:_rebuild_tensor_v2")
TENSORS = {
    "a state": parameter(attribute(text("__setstate__"))) + text("id") + b"b",
    "an item": parameter(attribute(text("append"))) + text("id") + b"a",
    "an item under a computed name": parameter(attribute(COMPUTED)) + text("id") + b"a",
    "slots": parameter(b"N" + attribute(text("__setstate__")) + b"\x86") + text("id") + b"b",
    "a tensor of a type": call(OF_TYPE, REBUILD, name("models:Quantised"), b")", attribute(COMPUTED)) + text("id") + b"a",
    "a parameter of a type": call(
        OF_TYPE, name("torch._utils:_rebuild_parameter_with_state"), name("torch.nn.parameter:Parameter"),
        b"(" + TENSOR + b"\x89N" + attribute(COMPUTED) + b"t", b"N",
    ) + text("id") + b"a",
    "a number of it": call("numpy:float64", parameter(attribute(text("__array__")))),
    "a parameter of it": call(
        "torch._utils:_rebuild_parameter",
        call(OF_TYPE, REBUILD, name("models:Quantised"), b")", attribute(text("detach"))),
        b"\x88N",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_attributes_of_tensors(case: str, tmp_path: Path) -> None:
    """A function among the attributes that a tensor is made with may be called by the next opcode, or by who is given it."""
    assert verdict(tmp_path, TENSORS[case]).verdict == "dangerous"


@pytest.mark.parametrize(
    "value", [call("builtins:getattr", new("models:Loader"), text("load_weight")), new("models:Layout"), name("models:Layout")]
)
def test_honest_attributes_of_tensors(value: bytes, tmp_path: Path) -> None:
    """A bound method, an instance or a class as an attribute is none, also where the tensor goes on into a parameter."""
    held = attribute(text("layout"), value)
    made = call(
        OF_TYPE,
        name("torch._utils:_rebuild_wrapper_subclass"),
        name("models:Quantised"),
        name("models:Quantised") + b"\x85",
        held,
    )
    for data in (parameter(held), call("torch._utils:_rebuild_parameter", made, b"\x88N")):
        assert verdict(tmp_path, data).verdict == "needs-code"


KEEPER = new("collections:UserDict")
MODULES = {
    "a table of a module": KEEPER + state(data=name("models:table")) + text("a") + FUNCTION + b"s",
    "several tables": new("collections:ChainMap")
    + state(maps=b"]" + name("models:table") + b"a")
    + text("a")
    + FUNCTION
    + b"s",
    "the names of a module": name("models:__dict__"),
    "the names that a function sees": name("models:Net.forward.__globals__"),
    "the builtins": name("models:__builtins__"),
    "a class's class": name("models:Net.__class__"),
    "a longer way than is looked at": name("models:" + "a." * 17 + "os"),
    "a module of a module": name("torch.serialization:os"),
    "a module of a module's module": name("torch:serialization.os"),
}


@pytest.mark.parametrize("case", MODULES)
def test_names_of_modules(case: str, tmp_path: Path) -> None:
    """Who may write into a module makes any other name of it mean what he likes."""
    assert verdict(tmp_path, MODULES[case]).verdict == "dangerous"


@pytest.mark.parametrize("path", ["torch:trace", "models:signal", "numpy:trace", "models:__init_weights", "models:Net.forward"])
def test_names_of_functions(path: str, tmp_path: Path) -> None:
    """A function that is called as a module is, or has underscores, is one."""
    assert verdict(tmp_path, name(path)).verdict == "needs-code"


ENTRY = attribute(text("update"))
SHARED = {
    path: call(f"torch.jit._pickle:{path}", name("collections:UserDict"), text("")) + b"N" + ENTRY + b"\x86b"
    for path in ("restore_type_tag", "build_intlist", "build_doublelist", "build_boollist", "build_tensorlist")
}
ALIAS = name("typing:_GenericAlias")
SHARED |= {
    "an alias": ALIAS + b")\x81N" + ENTRY + b"\x86b",
    "an alias by a function": call("copyreg:__newobj__", ALIAS) + b"N" + ENTRY + b"\x86b",
    "an alias of protocol 0": call("copyreg:_reconstructor", ALIAS, name("builtins:object"), b"N") + b"N" + ENTRY + b"\x86b",
    "a member of an enumeration": name("peft.utils.peft_types:TaskType") + text("LORA") + b"\x85\x81" + ENTRY + b"b",
}


@pytest.mark.parametrize("case", SHARED)
def test_what_is_not_the_pickles_own(case: str, tmp_path: Path) -> None:
    """A state for what a call or an instance stands for, a class of the program, changes that."""
    assert verdict(tmp_path, SHARED[case]).verdict == "dangerous"


def module(path: str) -> bytes:
    """A global as torch-legacy has the class of a model, where it comes first."""
    return b"(" + text("module") + name(path) + b"NNtQ"


PERSISTENT = {
    "a function that is called": module("models:run") + text("id") + b"\x85R",
    "a function that a generator calls": call("numpy.random._pickle:__generator_ctor", text("id"), module("models:run")),
    "under bytes": b"(C\x06module" + name("models:run") + b"NNtQ" + text("id") + b"\x85R",
    "as torch-tar has it": name("models:run") + b"NN\x87Q" + text("id") + b"\x85R",
    "a class that is changed": module("collections:UserDict") + b"N" + ENTRY + b"\x86b",
    "of another program": text("reduce_package") + name("models:run") + b"\x86Q",
    "a computed one": call("builtins:tuple", b"](" + text("module") + name("models:run") + b"NNe") + b"Q",
    "a device that holds a function": b"("
    + text("storage")
    + name("torch:FloatStorage")
    + text("0")
    + holding("startswith")
    + b"K\1tQ",
}


@pytest.mark.parametrize("case", PERSISTENT)
def test_persistent_ids(case: str, tmp_path: Path) -> None:
    """What torch gives for the persistent id of a model's class is the class itself, or a function in its place."""
    assert verdict(tmp_path, PERSISTENT[case]).verdict == "dangerous"


@pytest.mark.parametrize("pid", [module("models:Net"), name("models:Net") + text("a.py") + text("class Net") + b"\x87Q"])
def test_classes_of_old_models(pid: bytes, tmp_path: Path) -> None:
    """An instance of a class that stands there with its source needs code."""
    assert verdict(tmp_path, pid + b")\x81" + state(training=b"\x88")).verdict == "needs-code"


MASKED, INSTANCE = name("numpy.ma.core:MaskedArray"), holding("__array__")
ARRAY = call("numpy.core.multiarray:_reconstruct", name("numpy:ndarray"), b"K\0\x85", b"C\x01b")
MASK = call("numpy.ma.core:_mareconstruct", MASKED, name("numpy:ndarray"), b"K\0\x85", b"C\x01b")
F8, O8 = call("numpy:dtype", text("f8")), call("numpy:dtype", text("O"))
SEVERAL = call("numpy:dtype", text("V8")) + b"(K\x03" + text("|") + F8 + b"K\x01\x85\x86NNK\x08K\x01K\0tb"
FIELDS = b"}(" + text("a") + O8 + b"K\0\x86" + text("b") + SEVERAL + b"K\x08\x86u"
NAMES = b"N" + text("a") + text("b") + b"\x86"
RECORD = call("numpy:dtype", text("V16")) + b"(K\x03" + text("|") + NAMES + FIELDS + b"K\x10K\x01K\x1btb"
PAIR = call("numpy:dtype", text("O,(1,)f8"))
PART = call("builtins:slice", b"N")
ARGUMENTS = {
    "a keyword": MASKED + b")" + attribute(text("data"), INSTANCE) + b"\x92",
    "a keyword of a function": call("copyreg:__newobj_ex__", MASKED, b")", attribute(text("data"), INSTANCE)),
    "a list as a state": MASK + b"](K\x01" + b"K\x01\x85" + F8 + b"\x89C\x08" + bytes(8) + b"C\x01\0" + INSTANCE + b"eb",
    "a computed state": MASK + call("builtins:tuple", b"](K\x01" + INSTANCE + b"e") + b"b",
    "a state without a function": MASKED + b")\x81](K\x01" + INSTANCE + b"eb",
    "an array by a function": call("copyreg:__newobj__", MASKED) + b"(K\x01]" + INSTANCE + b"atb",
    "fields": ARRAY + b"(K\x01K\x01\x85" + RECORD + b"\x89](N" + INSTANCE + b"\x86etb",
    "fields in a text": ARRAY + b"(K\x01K\x01\x85" + PAIR + b"\x89](N" + INSTANCE + b"\x86etb",
    "a list as an item": ARRAY + b"(K\x01K\x01\x85" + F8 + b"\x89C\x08" + bytes(8) + b"tbK\0]" + INSTANCE + b"as",
    "a list for a part": ARRAY + b"(K\x01K\x01\x85" + F8 + b"\x89C\x08" + bytes(8) + b"tb" + PART + b"]" + INSTANCE + b"as",
    "a computed keyword": MASKED + b")" + call("builtins:dict", b"](" + text("data") + INSTANCE + b"\x86e") + b"\x92",
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_what_arrays_are_given(case: str, tmp_path: Path) -> None:
    """NumPy calls the `__array__` of an instance wherever it is given one: a keyword, a part of a state, an item."""
    assert verdict(tmp_path, ARGUMENTS[case]).verdict == "dangerous"


def test_honest_arrays(tmp_path: Path) -> None:
    """Arrays of objects, records among them, and masked arrays keep what they hold."""
    values = [
        np.array([Net().forward, Net], dtype=object), np.array([(1.0, Net())], dtype=[("a", "f8"), ("b", "O")]),
        np.ma.masked_array([1.0, 2.0], [True, False]), np.ma.masked_array(np.array([Net, None], dtype=object), [True, False]),
    ]  # fmt: skip
    for protocol in (0, 2, 4):
        assert examined(tmp_path / "a.pkl", pickle.dumps(values, protocol)).verdict == "needs-code"


TABLE = new("models:Table") + state(text=text("import os"))
LOOKED_UP = {
    "a second state": TABLE + b"}b",
    "an item behind a state": TABLE + b"Na",
    "an element behind a state": TABLE + b"(N\x90",
    "a text of it": call("builtins:str", TABLE),
    "a list of it": call("builtins:list", TABLE),
    "a dict of it": call("builtins:dict", TABLE),
    "an instance of protocol 0": call(
        "builtins:dict", call("copyreg:_reconstructor", name("models:Table"), name("builtins:object"), b"N") + state(text=b"N")
    ),
    "a dtype of it": call("numpy:dtype", TABLE),
    "a UUID of it": call("uuid:UUID", TABLE),
    "a state that is one": new("models:Net") + TABLE + b"b",
    "an iterator of it": call("builtins:iter", TABLE),
    "an iterator of an instance": call("builtins:iter", new("models:Loader")),
    "a part of a type": call("_operator:getitem", name("typing:List"), TABLE),
    "a literal": call("_operator:getitem", name("typing:Literal"), holding("_hash_key")),
    "a kind of parameter": call("inspect:Parameter", text("x"), TABLE),
    "a signature": call("inspect:Signature", TABLE + b"\x85"),
    "the parameters of one": call("inspect:Signature", TABLE),
}  # fmt: skip


@pytest.mark.parametrize("case", LOOKED_UP)
def test_attributes_of_instances_that_have_a_state(case: str, tmp_path: Path) -> None:
    """To look up an attribute of an instance with a state runs the `__getattr__` of its class on that, which no data needs."""
    assert verdict(tmp_path, LOOKED_UP[case]).verdict == "dangerous"


BEFORE = {
    "items before a state": new("models:Runs") + b"(Ne" + state(name=text("a")),
    "pairs before a state": new("models:Runs") + b"NNs" + state(name=text("a")),
    "an instance in a list": call("builtins:list", b"]" + TABLE + b"a"),
    "a partial of an instance": call("functools:partial", TABLE),
    "an iterator of a list": call("builtins:iter", b"]" + TABLE + b"a"),
    "a type of a class": call("_operator:getitem", name("typing:List"), name("models:Net")),
}


@pytest.mark.parametrize("case", BEFORE)
def test_states_that_are_not_looked_at(case: str, tmp_path: Path) -> None:
    """Items come before a state, and what only keeps an instance looks up nothing."""
    assert verdict(tmp_path, BEFORE[case]).verdict == "needs-code"


def test_honest_signatures_and_iterators(tmp_path: Path) -> None:
    """What `pickle` writes of signatures, iterators and types is no more than that."""
    values = [inspect.signature(Net.forward), iter([1, 2]), iter((Net(),)), list[Net], typing.Callable[[Net], int]]
    for protocol in (2, 4):
        assert examined(tmp_path / "a.pkl", pickle.dumps(values, protocol)).verdict == "needs-code"


BYTES = b"C" + bytes([len(PAYLOAD)]) + PAYLOAD
OLD = call("copyreg:_reconstructor", name("models:Net"), name("builtins:object"), b"N")
NESTED = {
    "protocol 0": OLD + state(data=BYTES),
    "a function": call("copyreg:__newobj__", name("models:Net")) + state(data=BYTES),
    "a bytearray": new("models:Net") + state(data=call("builtins:bytearray", BYTES)),
    "a list": new("models:Net") + state(data=b"]" + BYTES + b"a"),
    "a dict": new("models:Net") + state(data=b"}" + text("a") + BYTES + b"s"),
    "a tuple's dict": new("models:Net") + b"N" + state(data=BYTES)[:-1] + b"\x86b",
    "an argument": name("models:Net") + BYTES + b"\x85\x81",
    "a keyword": name("models:Net") + b")" + attribute(text("data"), BYTES) + b"\x92",
    "text of Python 2": new("models:Net") + b"}" + text("a") + b"U" + BYTES[1:] + b"sb",
}


@pytest.mark.parametrize("case", NESTED)
def test_pickles_in_instances(case: str, tmp_path: Path) -> None:
    """Bytes that are a pickle count as one, however the instance that gets them is made, and a list deeper."""
    assert verdict(tmp_path, NESTED[case]).verdict == "dangerous"


@pytest.mark.parametrize("path", ["mailcap:test", "dbm.dumb:open", "uuid:_get_command_stdout", "glob:glob", "copy:_copy.x"])
def test_functions_of_the_standard_library(path: str, tmp_path: Path) -> None:
    """One that an instance holds may be called by its class, when a state is set or when it is thrown away."""
    assert verdict(tmp_path, new("models:Net") + state(close=name(path))).verdict == "dangerous"


@pytest.mark.parametrize(
    "path",
    [
        "math:sqrt", "builtins:len", "operator:add", "uuid:uuid4", "copy:deepcopy", "itertools:chain", "re:compile",
        "models:run",
    ],
)  # fmt: skip
def test_functions_that_compute(path: str, tmp_path: Path) -> None:
    """Those that compute, and those of a program's own, need code."""
    assert verdict(tmp_path, new("argparse:Namespace") + state(key=name(path))).verdict == "needs-code"


HOLDER = "scipy.optimize._optimize:OptimizeResult"
MESH = holding("_hash_key", "torch.distributed.device_mesh:DeviceMesh", FUNCTION)
KEYED = "torch.nn.modules.module:Module"
DEFERRED = call("functools:partial", FUNCTION)


def deferred(function: bytes, *args: bytes) -> bytes:
    """A partial as pickle writes it: its arguments are a state."""
    return call("functools:partial", function) + b"(" + function + b"(" + b"".join(args) + b"t}}tb"


SHADOWS = {
    "an item before a state": new(HOLDER) + text("x") + FUNCTION + b"s" + state(a=b"N"),
    "an item under __setstate__": new(HOLDER) + text("__setstate__") + FUNCTION + b"s",
    "an item under append": new(HOLDER) + text("append") + FUNCTION + b"s" + text("id") + b"a",
    "an item under a computed name": new(HOLDER) + COMPUTED + FUNCTION + b"s" + text("id") + b"a",
    "a method that __setstate__ calls": new("scipy.stats._continuous_distns:norm_gen") + state(_attach_methods=DEFERRED),
    "the same under a computed name": new("models:Net")
    + b"}"
    + call("builtins:str", text("_attach_methods"))
    + DEFERRED
    + b"sb",
    "the same under a text of Python 2": new("models:Net") + b"}U\x08_build_f" + DEFERRED + b"sb",
    "keys of a state": new(KEYED) + holding("keys") + b"b",
    "items of a state": new("torch.fx.node:Node") + holding("items", "models:Thing", FUNCTION) + b"b",
    "items of a state's slots": new("models:Net") + b"N" + holding("items") + b"\x86b",
}  # fmt: skip


@pytest.mark.parametrize("case", SHADOWS)
def test_attributes_that_shadow_methods(case: str, tmp_path: Path) -> None:
    """What an instance's class, or the opcode behind, looks up there and calls is the pickle's own function."""
    assert verdict(tmp_path, SHADOWS[case]).verdict == "dangerous"


HASHED = {
    "a key": b"}" + MESH + b"Ns",
    "one of several keys": b"}(K\x01N" + MESH + b"Nu",
    "a key of protocol 0": b"(" + MESH + b"Nd",
    "a key in a tuple": b"}" + MESH + b"K\x01\x86\x85Ns",
    "a key of an instance": new("models:Table") + MESH + b"Ns",
    "an element": b"\x8f(" + MESH + b"\x90",
    "a frozen element": b"(" + MESH + b"\x91",
    "an element of a list": call("builtins:set", b"]" + MESH + b"a"),
    "an element of a computed list": call("builtins:frozenset", call("builtins:list", b"]" + MESH + b"a")),
    "a count": call("collections:Counter", b"]" + MESH + b"a"),
    "a pair": call("collections:OrderedDict", b"]" + MESH + b"N\x86a"),
    "a list for a base": call("copyreg:_reconstructor", name("models:Bag"), name("builtins:set"), b"]" + MESH + b"a"),
    "an instance in a key": b"}" + new("models:Spec") + state(mesh=MESH) + b"Ns",
    "a method": b"}" + new("models:Mesh") + state(_x=call("builtins:getattr", new("models:Net"), text("run"))) + b"Ns",
}


@pytest.mark.parametrize("case", HASHED)
def test_keys_that_call(case: str, tmp_path: Path) -> None:
    """The hash of an instance may call what it holds."""
    assert verdict(tmp_path, HASHED[case]).verdict == "dangerous"


PARTIALS = {
    "as no pickle writes it": call("functools:partial", FUNCTION, b"K\x01"),
    "without a call": name("functools:partial") + FUNCTION + text("id") + b"\x86\x81",
    "a text": deferred(FUNCTION, text("id")),
    "bytes": deferred(FUNCTION, b"C\x02id"),
    "a computed text": deferred(FUNCTION, call("builtins:str", text("id"))),
    "a text in a list": deferred(FUNCTION, b"]" + text("id") + b"a"),
    "a text of NumPy's": deferred(FUNCTION, call("numpy.core.multiarray:scalar", call("numpy:dtype", text("U2")), b"C\x01i")),
    "a text for a method": deferred(call("builtins:getattr", name("models:Net"), text("run")), text("id")),
    "a computed state": call("functools:partial", FUNCTION) + call("builtins:tuple", b"]") + b"b",
}


@pytest.mark.parametrize("case", PARTIALS)
def test_partials_of_texts(case: str, tmp_path: Path) -> None:
    """A function that is given a text may run it, whoever calls it."""
    assert verdict(tmp_path, PARTIALS[case]).verdict == "dangerous"


@pytest.mark.parametrize(
    "path",
    [
        "torch.jit.unsupported_tensor_ops:execWrapper", "torch.ops:load_library", "torch._ops:import_module",
        "torch.testing._internal.common_utils:shell", "torch.export._unlift:_convert_guards_code_to_fn",
        "scipy._lib._bunch:_make_tuple_bunch", "torch._dynamo.backends.debugging:aot_eager",
    ],
)  # fmt: skip
def test_functions_that_run_text(path: str, tmp_path: Path) -> None:
    """Functions of torch and scipy that run a text or load a library are not even to be named."""
    assert verdict(tmp_path, name(path)).verdict == "dangerous"


def test_a_registration_that_is_taken_back(tmp_path: Path) -> None:
    """Thrown away, it calls its `unregister`."""
    path = "torch.distributed._symmetric_memory._nccl:NcclCommRegistration"
    assert verdict(tmp_path, holding("unregister", path, FUNCTION)).verdict == "dangerous"


ACT: Any = F
HONEST: list[Any] = [
    functools.partial(ACT.interpolate, mode="nearest"), functools.partial(torch.nn.Linear, 3),
    functools.partial(ACT.pad, (1, 2)), functools.partial(max, "a"), functools.partial(ACT.relu, np.float64(1)),
    {F.relu: "relu", torch.nn.Linear: 1, (F.relu, (F.gelu,)): 2}, {Net(): "net"}, {Net(), 1}, frozenset([Net().forward]),
    {(Net(), 1): 2}, operator.itemgetter(1), {"key": operator.itemgetter("a", "b")}, {"layer": torch.nn.ReLU},
    {int | None: 1, (1, 2): 3},
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(HONEST)))
@pytest.mark.parametrize("protocol", [2, 4])
def test_honest_functions_and_keys(at: int, protocol: int, tmp_path: Path) -> None:
    """Functions that nobody has armed, and keys that hold none, need code."""
    assert examined(tmp_path / "a.pkl", pickle.dumps(HONEST[at], protocol)).verdict == "needs-code"


def test_honest_items(tmp_path: Path) -> None:
    """A class as an item of an instance, as configurations have it, stays one; so does a function that nothing follows."""
    data = new("models:Config") + text("layer") + name("torch.nn.modules.linear:Linear") + b"s" + state(layer=b"N")
    assert verdict(tmp_path, data).verdict == "needs-code"
    assert verdict(tmp_path, new(HOLDER) + text("fun") + FUNCTION + b"s" + text("x") + FUNCTION + b"s").verdict == "needs-code"


def test_pickles_where_storages_would_lie(tmp_path: Path) -> None:
    """A record `data/0` beside `data.pkl` that is no storage of the archive's own: torch.export loads it by its JSON."""
    torch.export.save(torch.export.export(Net(), (torch.ones(1, 3),)), tmp_path / "a.pt2")
    with zipfile.ZipFile(tmp_path / "a.pt2") as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    config = next(path for path in records if path.endswith("weights_config.json"))
    root, folder = config.partition("/")[0], config.rpartition("/")[0].replace("config", "")
    described = json.loads(records[config])
    for weight in described["config"].values():
        weight["path_name"], weight["use_pickle"] = "x/data/0", True
    records[config] = json.dumps(described).encode()
    for place in (f"{root}/data/weights/x/data", f"{root}/data", f"{folder}/constants"):
        edited = records | {f"{place}.pkl": b"\x80\x02}.", f"{place}/0": PAYLOAD}
        with zipfile.ZipFile(tmp_path / "b.pt2", "w") as archive:
            for path, data in edited.items():
                archive.writestr(path, data)
        assert scan(tmp_path / "b.pt2")[0].verdict == "dangerous", place


@pytest.mark.parametrize("place", ["archive/deeper/data", "archive/data/constants", "archive/x/y/data"])
def test_pickles_deep_in_an_archive(place: str, tmp_path: Path) -> None:
    """Storages lie right below the archive's folder, and nowhere else."""
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        for path, data in (("archive/data.pkl", b"\x80\x02}."), (f"{place}.pkl", b"\x80\x02}."), (f"{place}/0", PAYLOAD)):
            archive.writestr(path, data)
    assert scan(tmp_path / "a.pt")[0].verdict == "dangerous"
