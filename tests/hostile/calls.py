"""Ways to name and call something in a pickle: name of the case -> (opcodes, the global that must be listed)."""

from __future__ import annotations

from tests.hostile import pickles as p

SYSTEM = p.glob("os", "system")
COMMAND = p.tuple_of(p.text("touch /tmp/evil"))

CALLS = {
    "46_reduce": (SYSTEM + COMMAND + p.REDUCE, "os.system"),
    "46_eval": (p.call("builtins", "eval", p.text("1")), "builtins.eval"),
    "46_python2_name": (p.call("__builtin__", "eval", p.text("1")), "builtins.eval"),
    "46_torch_load": (p.call("torch.serialization", "load", p.text("x")), "torch.serialization.load"),
    "46_only_named": (SYSTEM, "os.system"),
    "46_newobj": (p.glob("subprocess", "Popen") + COMMAND + b"\x81", "subprocess.Popen"),
    "46_newobj_ex": (p.glob("subprocess", "Popen") + COMMAND + p.EMPTY_DICT + b"\x92", "subprocess.Popen"),
    "46_in_a_key": (p.EMPTY_DICT + p.MARK + SYSTEM + b"K\x01" + p.SETITEMS, "os.system"),
    "46_in_a_tuple": (p.tuple_of(SYSTEM + COMMAND + p.REDUCE), "os.system"),
    "46_in_the_state_of_a_known_class": (
        p.glob("argparse", "Namespace") + b")\x81" + p.dict_of(x=SYSTEM) + p.BUILD, "os.system"),
    "46_called_with_a_call": (p.call("builtins", "getattr", p.glob("os", "sys"), p.text("x")), "builtins.getattr"),
    "47_stack_global": (p.text("os") + p.text("system") + b"\x93" + COMMAND + p.REDUCE, "os.system"),
    "47_stack_global_from_the_memo": (
        p.text("system") + p.put(7) + p.text("os") + p.put(8) + b"00" + p.get(8) + p.get(7) + b"\x93" + COMMAND + p.REDUCE,
        "os.system"),
    "47_stack_global_from_two_strings": (b"U\x02os" + b"S'system'\n" + b"\x93" + COMMAND + p.REDUCE, "os.system"),
    "50_inst": (p.MARK + p.text("touch /tmp/evil") + b"ios\nsystem\n", "os.system"),
    "50_inst_without_arguments": (p.MARK + b"icollections\nUserDict\n", "collections.UserDict"),
    "50_obj": (p.MARK + SYSTEM + p.text("touch /tmp/evil") + b"o", "os.system"),
    "50_call_hidden_by_pop": (SYSTEM + COMMAND + p.REDUCE + b"0" + p.NONE, "os.system"),
    "50_call_hidden_by_pop_mark": (p.MARK + SYSTEM + COMMAND + p.REDUCE + b"1" + p.NONE, "os.system"),
    "50_call_hidden_by_a_later_value": (
        p.EMPTY_DICT + p.text("k") + SYSTEM + COMMAND + p.REDUCE + p.SETITEM + p.text("k") + p.NONE + p.SETITEM, "os.system"),
    "50_call_hidden_in_the_memo": (SYSTEM + COMMAND + p.REDUCE + p.put(300) + b"0" + p.NONE, "os.system"),
    "52_build_on_a_global": (p.glob("os", "environ") + p.dict_of(x=p.NONE) + p.BUILD, "os.environ"),
    "52_build_on_a_call": (SYSTEM + COMMAND + p.REDUCE + p.dict_of(x=p.NONE) + p.BUILD, "os.system"),
    "52_build_with_slots": (
        p.glob("os", "system") + p.EMPTY_TUPLE + b"\x81" + p.tuple_of(p.NONE, p.dict_of(a=p.NONE)) + p.BUILD, "os.system"),
    "46_append_to_an_object": (SYSTEM + COMMAND + p.REDUCE + p.NONE + p.APPEND, "os.system"),
    "46_setitem_on_an_object": (SYSTEM + COMMAND + p.REDUCE + p.NONE + p.NONE + p.SETITEM, "os.system"),
}  # fmt: skip
