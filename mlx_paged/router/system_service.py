"""``mlx-paged service``: a server that the system starts at login, and again after a crash: launchd
on a Mac, systemd's user manager on Linux.
"""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_paged.cli.program import Parser, run_program
from mlx_paged.cli.streams import write
from mlx_paged.errors import ArgumentError, one_line, system_reason
from mlx_paged.router.program import names_of, read_flags, setup_arg_parser
from mlx_paged.server.program import FLAGS, read_settings

LABEL = "mlx-paged"
# Where models, keys and caches are looked for. Tokens and other secrets are not among them.
_KEPT_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "HF_HUB_OFFLINE")
# What the system waits for after SIGTERM, beyond the seconds for answers (--drain-seconds).
_GRACE_SECONDS = 15
# Without this, launchd slows the processes of a job down when the Mac is busy.
_PROCESS_TYPE = "Interactive"


@dataclass(frozen=True)
class Job:
    """What the system runs.

    Attributes:
        argv: the program and its arguments.
        folder: the working directory, to which paths in the arguments are relative.
        environment: variables of the process.
        stop_seconds: how long it may take to end.
    """

    argv: Sequence[str]
    folder: Path
    environment: Mapping[str, str]
    stop_seconds: int


@dataclass(frozen=True)
class Manager:
    """A service manager, and the commands that it takes.

    Attributes:
        name: for messages.
        file: describes the job to the manager.
        render: the contents of the file.
        commands: what each verb runs. A command that begins with ``-`` may fail.
        hint: printed after the installation.
    """

    name: str
    file: Path
    render: Callable[[Job], bytes]
    commands: Mapping[str, Sequence[Sequence[str]]]
    hint: str = ""


def launchd(home: Path, uid: int) -> Manager:
    """The user's launchd, on a Mac; it runs what belongs to the domain of the graphical login."""
    file = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    log = home / "Library" / "Logs" / f"{LABEL}.log"
    domain, target = f"gui/{uid}", f"gui/{uid}/{LABEL}"

    def render(job: Job) -> bytes:
        return plistlib.dumps(
            {
                "Label": LABEL,
                "ProgramArguments": list(job.argv),
                "WorkingDirectory": str(job.folder),
                "EnvironmentVariables": dict(job.environment),
                "RunAtLoad": True,
                "KeepAlive": {"SuccessfulExit": False},
                "ExitTimeOut": job.stop_seconds,
                "ProcessType": _PROCESS_TYPE,
                "StandardOutPath": str(log),
                "StandardErrorPath": str(log),
                "Umask": 0o077,
            }
        )

    start = [("launchctl", "enable", target), ("launchctl", "bootstrap", domain, str(file))]
    stop = ("launchctl", "bootout", target)
    commands: dict[str, Sequence[Sequence[str]]] = {
        "install": [("-launchctl", *stop[1:]), *start],
        "start": start,
        "stop": [stop],
        "uninstall": [("-launchctl", *stop[1:])],
        "status": [("launchctl", "print", target)],
        "logs": [("tail", "-n", "100", "-F", str(log))],
    }
    return Manager("launchd", file, render, commands)


def systemd(home: Path) -> Manager:
    """The user's systemd, on Linux."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    unit = f"{LABEL}.service"

    def render(job: Job) -> bytes:
        variables = [f"Environment={_quoted(f'{k}={v}')}" for k, v in job.environment.items()]
        lines = [
            "[Unit]",
            "Description=mlx_paged server",
            "[Service]",
            "ExecStart=" + " ".join(_quoted(word).replace("$", "$$") for word in job.argv),
            f"WorkingDirectory={str(job.folder).replace('%', '%%')}",
            *variables,
            "Restart=on-failure",
            "RestartSec=5",
            "RestartPreventExitStatus=2",  # a mistake in the flags
            f"TimeoutStopSec={job.stop_seconds}",
            "KillMode=mixed",  # SIGTERM is for the server, which ends the processes of its models.
            "UMask=0077",
            "[Install]",
            "WantedBy=default.target",
        ]
        return "".join(f"{line}\n" for line in lines).encode()

    run = ("systemctl", "--user")
    commands: dict[str, Sequence[Sequence[str]]] = {
        "install": [(*run, "daemon-reload"), (*run, "enable", unit), (*run, "restart", unit)],
        "start": [(*run, "start", unit)],
        "stop": [(*run, "stop", unit)],
        "uninstall": [("-systemctl", "--user", "disable", "--now", unit)],
        "status": [(*run, "status", "--no-pager", "--lines=0", unit)],
        "logs": [("journalctl", "--user", "--unit", unit, "--lines=100", "--follow")],
    }
    hint = "loginctl enable-linger keeps it running while you are not logged in"
    return Manager("systemd", config / "systemd" / "user" / unit, render, commands, hint)


def _quoted(word: str) -> str:
    """A word of a unit file, where systemd expands ``%`` and reads quotes and backslashes."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + escaped.replace("%", "%%") + '"'


def manager_here() -> Manager:
    """The manager of this machine.

    Raises:
        RuntimeError: there is none.
    """
    home = Path.home()
    if sys.platform == "darwin":
        return launchd(home, os.getuid())
    if shutil.which("systemctl"):
        return systemd(home)
    raise RuntimeError("there is neither launchd nor systemd here; run mlx-paged serve yourself")


def setup_service_parser(prog: str | None = None) -> Parser:
    """The argument parser, for a program of this name."""
    parser = Parser(
        prog=prog or "python -m mlx_paged service",
        description="Have the system run a server: from login on, and again after a crash.",
    )
    parser.add_version()
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, what in _VERBS.items():
        verbs.add_parser(verb, help=what, description=f"{what[0].upper()}{what[1:]}.")
    return parser


_VERBS = {
    "install": "install the server with the flags of serve that follow, and start it",
    "start": "start the server",
    "stop": "stop the server until the next login, or start",
    "status": "say whether the server runs",
    "logs": "show the last lines of its log, and follow it",
    "uninstall": "stop the server and remove it from the system",
}


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run ``mlx-paged service`` and return its exit status: 0, that of the manager's command if it
    failed, 2 for invalid arguments, or 130 after Ctrl-C.

    Args:
        argv: the arguments, without the program's name; those of this process by default.
        prog: the program's name in help and errors.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    flags: list[str] = []
    # What follows are flags of another parser.
    if words[:1] == ["install"] and words[1:] not in (["--help"], ["-h"]):
        words, flags = words[:1], words[1:]
    return run_program(
        setup_service_parser(prog), words, lambda args: _run(args.verb, flags), FLAGS
    )


def _run(verb: str, flags: Sequence[str]) -> int:
    manager = manager_here()
    if verb == "install":
        contents = manager.render(job_of(flags))
        try:
            manager.file.parent.mkdir(parents=True, exist_ok=True)
            manager.file.write_bytes(contents)
        except OSError as error:
            raise RuntimeError(
                f"{manager.file} can't be written: {system_reason(error)}"
            ) from error
    elif not manager.file.exists():
        raise RuntimeError("no service is installed; type service install with the flags of serve")
    for command in manager.commands[verb]:
        status = _call(command, shown=verb in ("status", "logs"))
        if status:
            return status
    if verb == "install":
        write(f"installed {manager.file}\n")
        write(f"{manager.hint}\n" if manager.hint else "")
    elif verb == "uninstall":
        manager.file.unlink(missing_ok=True)
        write(f"removed {manager.file}\n")
    return 0


def job_of(flags: Sequence[str]) -> Job:
    """The server with these flags, which are checked.

    Raises:
        ArgumentError: a flag is invalid, or contains a key: other users can read the arguments of
            a process.
        SystemExit: as the server's own parser does, for an unknown flag.
    """
    prog = "mlx-paged serve"
    given, models = read_flags(prog, setup_arg_parser(prog).parse_args(list(flags)), flags)
    if given.api_key:
        raise ArgumentError(
            "a key among the arguments can be read by other users; write it to a file of mode 600 "
            "and give --api-key-file",
            "api_key",
        )
    settings = read_settings(given, names_of(models or {}))
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return Job(
        [sys.executable, "-m", "mlx_paged", "serve", *flags],
        Path.cwd(),
        kept,
        int(settings.drain_seconds) + _GRACE_SECONDS,
    )


def _call(command: Sequence[str], shown: bool) -> int:
    """Run a command of the manager and return its status.

    Raises:
        RuntimeError: it failed and its output is not shown, or it is missing.
    """
    may_fail, words = command[0].startswith("-"), [command[0].removeprefix("-"), *command[1:]]
    try:
        done = subprocess.run(words, capture_output=not shown, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"{words[0]} can't be run: {system_reason(error)}") from error
    if may_fail or shown or done.returncode == 0:
        return 0 if may_fail else done.returncode
    said = one_line(done.stderr.strip() or done.stdout.strip() or "no reason given")
    raise RuntimeError(f"{' '.join(words)} failed: {said}")
