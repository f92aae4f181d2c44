"""Starting Ray in this process, or joining one.

    if start_ray(address=None):                        # joins a Ray, or starts one on this machine
        ...                                            # and then it is ours to end: `end_ray()`

Hosts are started by `processes.py`.

Invariants: a Ray that is started here listens on loopback alone, asks for a token that was drawn
for it, and has its sockets and logs where no other user may enter; what makes it so is undone when
it has started or ended, so that a Ray that the user starts is as Ray has it (docs/security.md). A
Ray that is joined is left as it is. It does not judge whether that asks for a token.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
import ray.exceptions

from dtensor.daft.ray.bootstrap import private_ray
from dtensor.daft.ray.bootstrap.machines import START_S
from dtensor.daft.ray.bootstrap.user_folder import directory_of_sockets
from dtensor.daft.ray.bootstrap.worker_environment import environment, worker_environment
from dtensor.signals import held_back

STARTS = 3
"""How often Ray is started, where its raylet ends itself."""

ANSWER_S = 10.0
"""How long an address may take to answer: Ray is perhaps just starting there."""
RETRY_S = 0.2
ATTEMPT_S = 41.0
"""What each of Ray's attempts takes to join one that answers, but not as Ray does (Ray 2.60)."""

_PATIENT = {
    # 15 by default, with which a rank stands still beside two busy processes
    "RAY_worker_niceness": "0",
    # 60 by default; a driver whose Ray's first workers come later waits for ever (Ray 2.60)
    "RAY_worker_register_timeout_seconds": "600",
}
"""Settings of a Ray that starts here, unless the user has others: the machine may be busy."""

_ray: Any = ray  # Ray's stubs leave most of its types unknown
_own_sessions: set[str] = set()  # Rays started here, whose workers inherit the environment


def start_ray(address: str | None, deadline_s: float = 60.0) -> bool:
    """Make Ray usable; whether it was started here, and is to be shut down here.

    `ConnectionError` if there is none at `address`, or none that lets this process in, and if this
    process has joined another one.
    """
    if ray.is_initialized():
        if address is not None:
            _check_joined(address)
        return False
    if address is not None:
        _join_ray(address, deadline_s)
        return False
    # A failure is raised as the root cause, once: Ray would also log each future nobody read.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    try:
        inherited = {**_PATIENT, **os.environ, **worker_environment(), **_own_token()}
        # Ray that is interrupted while it starts believes that it has not, and the next start of it
        # aborts the process.
        with environment(inherited), _on_loopback(), held_back():
            _read_token()
            _start()
        _own_sessions.add(_session())
    except BaseException:
        end_ray()
        raise
    return True


def _start() -> None:
    """Of a raylet that ends itself the next one may not: its agents are in the disk's cache then,
    and the machine is perhaps less busy."""
    for left in reversed(range(STARTS)):
        try:
            with private_ray.starting(START_S), private_ray.few_processes():
                _ray.init(
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    num_cpus=8,
                    object_store_memory=100 << 20,
                    _temp_dir=str(directory_of_sockets() / "ray"),
                )
            return
        except private_ray.RayletEnded:
            if not left:
                raise


def end_ray() -> None:
    """End what `start_ray` has started. The next Ray of this process has a token of its own."""
    processes = private_ray.own_processes()
    _ray.shutdown()
    _read_token()
    private_ray.await_end(processes)


def _own_token() -> dict[str, str]:
    """The environment of a Ray that takes calls from who knows this launch's token alone: by
    default Ray's is in a file of the user's home that all others may read. Not if the user has said
    which token it is, or that there is none."""
    mode = os.environ.get("RAY_AUTH_MODE")
    if private_ray.tokens is None or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        return {}
    if mode is not None and (mode.lower() != "token" or not private_ray.tokens.has_token(True)):
        return {}  # Ray aborts the process if later it finds none
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _read_token() -> None:
    """Ray reads the environment when it is imported, and a token when it first needs one."""
    if private_ray.tokens is not None:
        private_ray.config.initialize(
            ""
        )  # first, or a thread that still sends would look for a token
        private_ray.tokens.reset_cache()


def _on_loopback() -> AbstractContextManager[None]:
    """Ray that starts on one machine takes loopback for its address, as it does by default on
    macOS; the processes that it starts are told, and inherit nothing."""
    return private_ray.replaced(private_ray.constants, ENABLE_RAY_CLUSTER=False)


def _check_joined(address: str) -> None:
    """`ConnectionError` if this process is in another Ray than that."""
    joined = str(_ray.get_runtime_context().gcs_address)
    wanted, there = _where(address), _where(joined)
    if wanted is None or wanted == there:
        return
    here = (str(_ray.util.get_node_ip_address()), wanted[1])
    if wanted[0].startswith("127.") and here == there:
        return
    raise ConnectionError(
        f"address={address!r}, and this process has joined the Ray at {joined!r} already; it can "
        f"be in one at a time.\n"
        f"  Fix: address={joined!r}, or ray.shutdown() before the launch."
    )


def _where(address: str) -> tuple[str, int] | None:
    """Host, as a number where it has one, and port; None of "auto" and its like."""
    where = urlsplit(address if "//" in address else f"//{address}")
    if where.hostname is None or where.port is None:
        return None
    try:
        return socket.gethostbyname(where.hostname), where.port
    except OSError:
        return where.hostname, where.port


def _join_ray(address: str, deadline_s: float) -> None:
    """Ray itself would look for seven minutes, and leave a thread behind."""
    attempts = max(1, int(deadline_s / ATTEMPT_S))
    patience = {"RAY_gcs_server_port_wait_time_s": str(attempts), **os.environ}
    try:
        _await_answer(address, min(deadline_s, ANSWER_S))
    except OSError as error:
        raise ConnectionError(
            f"No Ray answers at {address!r}: {error}.\n"
            f"  Fix: give the address that `ray start --head` prints, or leave out address= to "
            f"start Ray on this machine."
        ) from error
    _read_token()
    if _token_mode() and not _has_token():
        raise ConnectionError(_no_token(address))
    began = time.monotonic()
    try:
        with environment(patience):
            _ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:
        if time.monotonic() - began < ATTEMPT_S / 2 and _asks_for_a_token(address):
            raise ConnectionError(_no_token(address)) from error
        raise ConnectionError(
            f"What listens at {address!r} is not a Ray that lets this process in: {error}\n"
            f"  Fix: give the address that `ray start --head` prints; if that Ray asks for a "
            f"token, start Python with RAY_AUTH_MODE=token and with RAY_AUTH_TOKEN_PATH, the "
            f"token's file."
        ) from error


def _token_mode() -> bool:
    return private_ray.tokens is not None and os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def _has_token() -> bool:
    try:
        return bool(private_ray.tokens.has_token(True))
    except ray.exceptions.AuthenticationError:  # the file that was stated is not there
        return False


def _asks_for_a_token(address: str) -> bool:
    """Whether what answers there is a Ray that knows no token of this process's."""
    if private_ray.tokens is None:
        return False
    try:
        private_ray.gcs_client(address=address)
    except ray.exceptions.AuthenticationError:
        return True
    except Exception:  # whatever it is that answers, it is no such Ray
        return False
    return False


def _no_token(address: str) -> str:
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or str(Path.home() / ".ray" / "auth_token")
    if not _token_mode():
        fact = "this process sends none: RAY_AUTH_MODE is not set to token"
    elif not _has_token():
        fact = f"this process has none: RAY_AUTH_TOKEN is not set, and there is none in {path}"
    else:
        source = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else path
        fact = f"the one that this process has, in {source}, is another"
        if source != path:
            fix = "set RAY_AUTH_TOKEN to that Ray's token, or unset it and put the token's file at"
            return f"The Ray at {address!r} asks for its token, and {fact}.\n  Fix: {fix} {path}."
    return (
        f"The Ray at {address!r} asks for its token, and {fact}.\n"
        f"  Fix: copy ~/.ray/auth_token from the machine on which that Ray was started to "
        f"{path}, and start Python with RAY_AUTH_MODE=token."
    )


def _await_answer(address: str, patience_s: float) -> None:
    """`OSError` unless something listens there; of "auto" Ray alone knows what it stands for."""
    where = _where(address)
    end = time.monotonic() + patience_s
    while where is not None:
        try:
            left = max(0.1, end - time.monotonic())
            socket.create_connection(where, timeout=left).close()
            return
        except OSError:
            if time.monotonic() + RETRY_S > end:
                raise
            time.sleep(RETRY_S)


def _session() -> str:
    return str(_ray.get_runtime_context().get_session_name())


def missing_environment() -> dict[str, str] | None:
    """What Ray's workers have to be given, where they do not inherit it."""
    return None if _session() in _own_sessions else worker_environment()
