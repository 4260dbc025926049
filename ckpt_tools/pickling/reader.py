"""The pickle machine: opcodes in, nodes out. Nothing is imported, called or looked up by a name in the file.

Source for every opcode: CPython's Lib/pickle.py and Lib/pickletools.py. The stack is split at MARK as there, so that
popping below a mark is an underflow. One dispatch table; no recursion; every length is checked against the bytes left.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError, PickleError
from ckpt_tools.pickling import containers, flow, objects, values
from ckpt_tools.pickling.state import Handler, State, Stop
from ckpt_tools.tree.nodes import Node


class Machine(State):
    """One reading of one pickle stream: runs its opcodes."""

    opcodes: Sequence[Callable[[Any], None]]  # set where the table is

    def load(self) -> Node:
        """Run to STOP and return the object."""
        if self.shared.room(limits.MEMORY) < 0:
            raise limits.MEMORY.error(
                "The file's pickles come to far more bytes than the file has, or are read again and again."
            )
        try:
            return self._run()
        except Stop as stop:
            self.settle()
            return stop.value
        except IndexError:
            self.cut = self.position >= self.end
            raise self.error("takes a value that is not there, or the stream ends without STOP") from None
        except struct.error:
            self.cut = True
            raise self.error("is cut off: the stream ends within it") from None
        except DamagedFileError as error:
            if "offset" not in error.what:
                error.why = f"{error.why} It ends at offset {self.position} of the pickle.".strip()
            raise
        finally:  # pickles that break at their end take as long as others
            taken = self.shared.taken
            taken["nodes"] = max(taken.get("nodes", 0), limits.NODES.most(self.shared.file_bytes) - max(0, self.budget))
            taken["memory"] = taken.get("memory", 0) + min(self.position, self.end) - self.start

    def _run(self) -> NoReturn:
        """The hot loop; a `Stop` ends it."""
        data, opcodes = self.data, self.opcodes
        while True:
            while self.position < self.limit:
                opcode = data[self.position]
                self.position += 1
                opcodes[opcode](self)
            if self.limit == self.end:
                raise self.short("ends beyond its frame or the stream")
            if self.position > self.limit:
                self.go_beyond("ends beyond its frame or the stream", self.position)
            self.limit = self.end


def _unsupported(machine: State) -> NoReturn:
    machine.position -= 1
    code = machine.data[machine.position]
    raise PickleError(f"The pickle is malformed: offset {machine.position} holds byte {code:#04x}, which is not an opcode.")


OPCODES: list[Handler] = [_unsupported] * 256
for _kind in (flow, values, containers, objects):
    for _code, _handler in _kind.opcode.handlers.items():
        OPCODES[_code] = _handler
Machine.opcodes = OPCODES
