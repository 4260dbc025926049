"""`python -m tests.support.job COUNT SCRIPT [ARGUMENT ...]`: a job of ranks, as torchrun starts one.

The ranks are forks of one process, which imports torch once for all; they have torchrun's variables, and meet at
a store of that process. One that fails ends the others.
"""

import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def job(count: int, script: Path | str, *arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a script, or a module by its name, on so many ranks."""
    command = [sys.executable, "-m", "tests.support.job", str(count), str(script), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False, timeout=240)


def _main(count: int, script: str) -> int:
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # what every rank would import

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks = set()
    for rank in range(count):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            run: Callable[..., object] = runpy.run_path if script.endswith(".py") else runpy.run_module
            run(script, run_name="__main__")
            return 0
        ranks.add(child)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    code = 0
    while ranks:
        ended, status = os.wait()
        ranks.discard(ended)
        if status and not code:
            code = 1
            time.sleep(0.2)  # as torchrun, which looks a few times a second
            for other in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGTERM)
    del store  # nobody meets any more
    return code


if __name__ == "__main__":
    _, number, name, *rest = sys.argv
    sys.argv = [name, *rest]
    sys.exit(_main(int(number), name))
