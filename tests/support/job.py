"""Jobs of ranks, as torchrun starts them. `python -m tests.support.job COUNT FOLDER` runs the commands of standard input.

The ranks are forks of one process, which imports torch once for all jobs; they have torchrun's variables, and meet at
a store of that process. One that fails ends the others.
"""

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
Done = subprocess.CompletedProcess[str]


def job(count: int, script: Path | str, *arguments: object, cwd: Path = ROOT) -> Done:
    """Run a script, or a module by its name, on so many ranks."""
    return jobs(count, [script, *arguments], cwd=cwd)[0]


def jobs(count: int, *commands: Sequence[object], cwd: Path = ROOT) -> list[Done]:
    """Several jobs, one after another; what came of each."""
    asked = [[str(word) for word in command] for command in commands]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "tests.support.job", str(count), folder]
        subprocess.run(run, input=json.dumps(asked), text=True, cwd=cwd, env=environment, check=True, timeout=240)
        codes = json.loads(Path(folder, "codes").read_text())
        texts = [[Path(folder, f"{number}.{stream}").read_text() for stream in "12"] for number in range(len(codes))]
    return [Done(command, code, *text) for command, code, text in zip(asked, codes, texts, strict=True)]


def _main(count: int, folder: str) -> None:
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401  # what every rank would import

    codes = [_job(count, f"{folder}/{number}", command) for number, command in enumerate(json.load(sys.stdin))]
    Path(folder, "codes").write_text(json.dumps(codes))


def _job(count: int, output: str, command: list[str]) -> int:
    """Forks the ranks of a job, and waits for them; the exit code of the job."""
    import torch.distributed

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    streams = [os.open(f"{output}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for stream in (1, 2)]
    ranks = set()
    for rank in range(count):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.dup2(streams[0], 1)
            os.dup2(streams[1], 2)
            sys.argv = command
            run: Callable[..., object] = runpy.run_path if command[0].endswith(".py") else runpy.run_module
            run(command[0], run_name="__main__")
            sys.exit()
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
    _main(int(sys.argv[1]), sys.argv[2])
