"""Starts Ray on this machine, or joins a Ray cluster.

    if start_ray(address=None):                        # starts Ray, unless this process has one
        ...
        end_ray()

Invariants: a Ray that is started here listens only on loopback, requires a random token, and has
its sockets and logs in a folder that no other user may enter (docs/security.md). The settings for
it are undone afterwards, so that a Ray that the user starts is unaffected. A Ray that is joined is
not changed.
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
"""How often Ray is started if its raylet ends by itself."""

ANSWER_S = 10.0
"""How long an address may take to answer, since Ray may be starting there."""
RETRY_S = 0.2
ATTEMPT_S = 41.0
"""How long Ray takes for one attempt to join a server that is not Ray (Ray 2.60)."""

_SETTINGS = {
    # 15 by default, with which a rank makes no progress if two other processes are busy
    "RAY_worker_niceness": "0",
    # 60 by default; if the first workers take longer, the driver waits forever (Ray 2.60)
    "RAY_worker_register_timeout_seconds": "600",
}
"""The environment of a Ray that is started here, for busy machines, unless the user sets it."""

_ray: Any = ray  # Ray's stubs leave most of its types unknown
_own_sessions: set[str] = set()  # sessions of Rays started here, whose workers inherit variables


def start_ray(address: str | None, deadline_s: float = 60.0) -> bool:
    """Make Ray usable. Return whether it was started here, so that `end_ray` must end it.

    Raises ConnectionError if no Ray at `address` admits this process, or if this process has joined
    another Ray.
    """
    if ray.is_initialized():
        if address is not None:
            _check_joined(address)
        return False
    if address is not None:
        _join_ray(address, deadline_s)
        return False
    # otherwise Ray would log the error of each future that is never read
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    try:
        inherited = {**_SETTINGS, **os.environ, **worker_environment(), **_own_token()}
        # held_back: if a signal interrupts Ray's start, its next start aborts the process
        with environment(inherited), _on_loopback(), held_back():
            _read_token()
            _start()
        _own_sessions.add(_session())
    except BaseException:
        end_ray()
        raise
    return True


def _start() -> None:
    """Start Ray, again if the raylet ends by itself: the next raylet may succeed, when its agents
    are in the disk's cache."""
    for attempts_left in reversed(range(STARTS)):
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
            if not attempts_left:
                raise


def end_ray() -> None:
    """End the Ray that `start_ray` has started. The next Ray of this process has another token."""
    processes = private_ray.own_processes()
    _ray.shutdown()
    _read_token()
    private_ray.await_end(processes)


def _own_token() -> dict[str, str]:
    """Return environment variables with a new token for Ray, {} if the user has set a token, or no
    token. By default Ray's token is in a file that all users may read."""
    mode = os.environ.get("RAY_AUTH_MODE")
    if private_ray.tokens is None or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        return {}
    if mode is not None and (mode.lower() != "token" or not private_ray.tokens.has_token(True)):
        return {}  # Ray would abort the process if it found no token later
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _read_token() -> None:
    """Let Ray read the environment and its token again. Ray reads them only once by itself."""
    if private_ray.tokens is not None:
        # the environment comes first: a thread that still sends would otherwise look for a token
        private_ray.config.initialize("")
        private_ray.tokens.reset_cache()


def _on_loopback() -> AbstractContextManager[None]:
    """Within the block, a Ray that starts on one machine uses loopback as its address. This is
    Ray's default on macOS."""
    return private_ray.replaced(private_ray.constants, ENABLE_RAY_CLUSTER=False)


def _check_joined(address: str) -> None:
    """Raise ConnectionError if this process has joined a different Ray cluster."""
    joined = str(_ray.get_runtime_context().gcs_address)
    requested, present = _host_and_port(address), _host_and_port(joined)
    if requested is None or requested == present:
        return
    own_address = (str(_ray.util.get_node_ip_address()), requested[1])
    if requested[0].startswith("127.") and own_address == present:
        return
    raise ConnectionError(
        f"address={address!r}, and this process has joined the Ray at {joined!r} already; it can "
        f"be in one at a time.\n"
        f"  Fix: address={joined!r}, or ray.shutdown() before the launch."
    )


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Return the host, as a numeric address if possible, and the port; None for "auto"."""
    parts = urlsplit(address if "//" in address else f"//{address}")
    if parts.hostname is None or parts.port is None:
        return None
    try:
        return socket.gethostbyname(parts.hostname), parts.port
    except OSError:
        return parts.hostname, parts.port


def _join_ray(address: str, deadline_s: float) -> None:
    """Join the Ray at `address`. Raises ConnectionError; Ray itself would try for seven minutes."""
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
    except ray.exceptions.AuthenticationError:  # the stated file does not exist
        return False


def _asks_for_a_token(address: str) -> bool:
    """Return whether a Ray at `address` rejects this process's token."""
    if private_ray.tokens is None:
        return False
    try:
        private_ray.gcs_client(address=address)
    except ray.exceptions.AuthenticationError:
        return True
    except Exception:  # it is not a Ray that checks tokens
        return False
    return False


def _no_token(address: str) -> str:
    """Return the text of the error for a missing or wrong token."""
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
    """Wait until something listens at an address with a port. Raises OSError after `patience_s`."""
    host_and_port = _host_and_port(address)
    end = time.monotonic() + patience_s
    while host_and_port is not None:
        try:
            seconds_left = max(0.1, end - time.monotonic())
            socket.create_connection(host_and_port, timeout=seconds_left).close()
            return
        except OSError:
            if time.monotonic() + RETRY_S > end:
                raise
            time.sleep(RETRY_S)


def _session() -> str:
    return str(_ray.get_runtime_context().get_session_name())


def missing_environment() -> dict[str, str] | None:
    """Return the variables that Ray's workers must be given, None if they inherit them."""
    return None if _session() in _own_sessions else worker_environment()
