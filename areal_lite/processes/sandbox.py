"""Boxes for programs that a model writes or steers: ``rollout.agents.sandbox``.

A program in a box has no network, writes only to its folder and to a /tmp of its own, and sees no process outside. Each
gets a new box, so that one finds nothing of an earlier one but in a folder that both are given. bubblewrap shows the
files of this machine, without the home folder, the run's working directory, /run and /tmp, where secrets and sockets
are: a path to a socket works without a network. docker shows the files of its image.

The kernel limits each process, and how many a user has, but not root, so :mod:`.process_tree` looks at a whole box
several times a second. Not promised: that the kernel has no faults, and that a box of root can not read root's files.
"""

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from areal_lite.errors import ConfigError

BUBBLEWRAP = "bubblewrap"
Watch = tuple[Mapping[str, int | None], list[int | None], list[str]]
"""Limits of each process, as RLIMIT_DATA without its prefix; at most how many processes and bytes of memory all of them
are, empty if nobody looks; the command that removes what is left."""
_HIDDEN = "/tmp", "/var/tmp", "/run", "/dev/shm"  # nosec B108 # folders of the box, each empty
_FIXES = {
    BUBBLEWRAP: "Install it (apt-get install bubblewrap); allow user namespaces: kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0, or the options of the container around this process",
    "docker": "Install docker, start its daemon, and pull the image",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits of one program; None is unlimited."""

    cpu_s: int | None = 3600
    """CPU seconds of each process."""
    memory_bytes: int | None = 8 * 2**30
    """Data memory of each process; libraries that are only mapped do not count. In a sandbox, of all together."""
    file_bytes: int | None = 2**30
    """Size of each file it writes."""
    processes: int | None = 8192
    """Processes and threads of the user, all programs together; no limit for root. In a sandbox, those of the box."""
    network: bool = False
    """Use this machine's network in a sandbox: an agent's program needs it to call its model."""


def boxed(
    sandbox: str, command: Sequence[str], folder: str, environment: Mapping[str, str], limits: ProcessLimits
) -> tuple[list[str], Watch]:
    """Return how to start ``command`` in a box that works in ``folder``, and what :mod:`.process_tree` does for it."""
    kind, _, image = sandbox.partition(":")
    each = {"CPU": limits.cpu_s, "DATA": limits.memory_bytes, "FSIZE": limits.file_bytes}
    if kind == "docker":
        host, name = os.environ.get("DOCKER_HOST"), f"areal-lite-{uuid.uuid4().hex}"
        docker = ["docker", *([f"--host={host}"] if host else [])]
        options = _docker_options(name, folder, environment, limits)
        return [*docker, *options, image, *command], ({}, [], [*docker, "rm", "--force", name])
    if kind == BUBBLEWRAP:
        box = bubblewrap(["--bind", folder, folder, "--chdir", folder], [sys.executable], limits)
        return [*box, *command], (each, [limits.processes, limits.memory_bytes], [])
    return [*command], ({**each, "NPROC": limits.processes}, [], [])


def _links(path: Path) -> Iterator[Path]:
    """Yield a path, what it links to, and so on."""
    yield path
    if path.is_symlink():
        yield from _links(path.parent / path.readlink())


def bubblewrap(folder: Sequence[str], programs: Sequence[str], limits: ProcessLimits) -> list[str]:
    """Return what is put before a command; ``folder`` are the options that show its working folder, and ``programs``
    interpreters whose installations are visible wherever they are."""
    bounds = {"nproc": limits.processes, "data": limits.memory_bytes, "fsize": limits.file_bytes}
    options = [f"--{name}={value}" for name, value in bounds.items() if value is not None]
    size = [] if limits.memory_bytes is None else ["--size", str(limits.memory_bytes)]
    hidden = {Path(path).resolve() for path in (*_HIDDEN, Path.home(), Path.cwd())}
    hidden = {path for path in hidden if path.is_dir() and path.parent != path}
    homes = {path.parents[1] for program in map(Path, programs) for path in (*_links(program), program.resolve())}
    shown = [str(path) for path in homes if any(map(path.is_relative_to, hidden))]
    return [
        *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *(["--share-net"] if limits.network else []),
        *("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"),
        *(part for path in sorted(hidden) for part in (*size, "--tmpfs", str(path))),
        *(part for path in shown for part in ("--ro-bind", path, path)),
        *("--remount-ro", "/dev", *folder, "--"),
        *(["prlimit", *options, "--"] if options else []),
    ]


def _docker_options(name: str, folder: str, environment: Mapping[str, str], limits: ProcessLimits) -> list[str]:
    bounds = {"memory": limits.memory_bytes, "memory-swap": limits.memory_bytes, "pids-limit": limits.processes}
    bounds |= {"ulimit=cpu": limits.cpu_s, "ulimit=fsize": limits.file_bytes}
    return [
        *("run", "--rm", "--interactive", "--init", "--read-only"),
        *("--cap-drop=ALL", "--security-opt=no-new-privileges"),
        *(f"--name={name}", f"--network={'host' if limits.network else 'none'}", f"--user={os.getuid()}:{os.getgid()}"),
        *(f"--volume={folder}:{folder}", f"--workdir={folder}", f"--tmpfs=/tmp:size={limits.memory_bytes or 0}"),
        *(f"--{option}={value}" for option, value in bounds.items() if value is not None),
        *(f"--env={variable}" for variable in environment if variable != "PATH"),  # the values are not for ps
    ]


def check_sandbox(sandbox: str) -> None:
    """Start a box and end it; raises ConfigError with the fix if that fails."""
    if sandbox == "none":
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            command = boxed(sandbox, ["true"], folder, {}, ProcessLimits())[0]
            subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        problem = (getattr(error, "stderr", "") or str(error)).strip()
        fix = _FIXES[sandbox.partition(":")[0]]
        raise ConfigError(f"rollout.agents.sandbox is {sandbox!r}, and no box starts: {problem}. {fix}") from None
