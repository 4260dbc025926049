"""What reading a file may not do, and how it is caught doing it: an audit hook, a clock, a limit of memory."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator

CPU_SECONDS, MEGABYTES = 5, 300
# Events that a reader of strange files never has a reason for. `import` is looked at apart.
_FORBIDDEN = (
    "exec", "compile", "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn",
    "pickle.find_class", "marshal.", "ctypes.", "pty.", "webbrowser.", "urllib.", "ftplib.", "smtplib.", "shutil.", "os.kill",
    "os.putenv", "os.chown", "os.symlink", "os.mkdir", "os.rmdir", "code.", "cpython.run_", "sys.settrace", "sys.setprofile",
)  # fmt: skip
_CHANGES = ("os.rename", "os.remove", "os.link", "os.truncate", "os.chmod")


class FindingError(Exception):
    """Something that must not happen has happened."""


class ForbiddenError(BaseException):
    """Reading did something that reading has no business to do. No Exception, so that no handler swallows it."""


class TooSlowError(BaseException):
    """Reading took more CPU time than any file under ten megabytes may take."""


class Guard:
    """Watches what happens inside `watching`; installed once, since an audit hook cannot be removed.

    Args:
        folder: the only place where files may be written, and only when writing is allowed.

    Attributes:
        armed: whether it watches yet. Before, our own code may import what it imports late.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.join(folder, "")
        self.temporaries = tempfile.gettempdir()  # asked for now: the first answer is found by writing a file there
        self.armed = self.active = self.writing = self.asking = False
        self.broken: ForbiddenError | None = None
        sys.addaudithook(self._hook)
        signal.signal(signal.SIGVTALRM, self._too_slow)

    def limit_memory(self) -> None:
        """From now on this process gets MEGABYTES more of address space and no more."""
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        limit = pages * resource.getpagesize() + (MEGABYTES << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    @contextlib.contextmanager
    def watching(self, *, writing: bool = False, asking: bool = False) -> Iterator[None]:
        """Reading happens inside; with `writing`, outputs in the folder too, with `asking`, requests to servers.

        Raises:
            ForbiddenError, TooSlowError: what was caught.
        """
        self.active, self.writing, self.asking, self.broken = self.armed, writing, asking, None
        try:
            with self.hurrying():
                yield
        finally:
            self.active = False
        if self.broken is not None:
            raise self.broken

    @contextlib.contextmanager
    def hurrying(self) -> Iterator[None]:
        """Only the clock.

        Raises:
            TooSlowError: the time is over.
        """
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _too_slow(self, *_: object) -> None:
        raise TooSlowError(f"more than {CPU_SECONDS} s of CPU time")

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.active and self._forbids(event, arguments):
            self.active = False  # the message may itself cause events
            self.broken = ForbiddenError(f"{event} {arguments!r:.300}")
            raise self.broken

    def _forbids(self, event: str, arguments: tuple[object, ...]) -> bool:
        if event == "import":
            return str(arguments[0]) not in sys.modules
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not writes or self._is_nameless(path, mode, flags):
                return False
            return not (self.writing and str(path).startswith(self.folder))
        if event in _CHANGES:
            return not (self.writing and str(arguments[0]).startswith((self.folder, *map(str, range(10)))))
        return event.startswith(_FORBIDDEN) and not (self.asking and event == "urllib.Request")

    def _is_nameless(self, path: object, mode: object, flags: object) -> bool:
        """Whether what is opened is a temporary file that has no name and can get none: for inflated members of archives.

        `tempfile.TemporaryFile` opens the folder itself, by `open` with an opener that calls `os.open`; each is an event.
        """
        never_named = os.O_TMPFILE | os.O_EXCL
        by_open = mode is not None  # without the opener the kernel would refuse a folder
        return path == self.temporaries and (by_open or (isinstance(flags, int) and flags & never_named == never_named))
