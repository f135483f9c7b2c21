"""Under torchrun, rank 0's process ends after the others.

Rank 0 holds XLA's coordination service, and XLA aborts every process that loses it, one that has done its work and is
about to end among them. JAX's processes wait for one another in jax.distributed.shutdown(); torch_xla's do not. So each
rank keeps a connection to rank 0, which the kernel closes once the rank's process is gone, and rank 0 waits for that
at its own exit.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from typing import Any

CONNECTING_S = 10.0  # how long rank 0 waits at its exit for connections that are not there yet
ENDING_S = 60.0  # and for the other ranks to end: longer than ranks that do the same work differ
_KEY = "xla_gpu/exit_order"
_log = logging.getLogger(__name__)


def rank_0_ends_last(rank: int, world_size: int) -> None:
    """Arranges it in a thread. Does nothing where no agent of torchrun keeps a store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        threading.Thread(target=_arrange, args=(rank, world_size), name="xla_gpu exit order", daemon=True).start()


def _arrange(rank: int, world_size: int) -> None:
    try:
        store = _agents_store()
        if rank == 0:
            listener, token = socket.create_server(("", 0), backlog=world_size), secrets.token_hex(16)
            atexit.register(_wait_for_others, os.getpid(), listener, token, world_size - 1)
            store.set(_KEY, f"{listener.getsockname()[1]} {token}")
        else:
            port, token = store.get(_KEY).decode().split()
            connection = socket.create_connection((os.environ["MASTER_ADDR"], int(port)), CONNECTING_S)
            connection.sendall(token.encode())
            # A socket object would be closed with the interpreter, behind which XLA's threads still run.
            handle = connection.detach()
            os.register_at_fork(after_in_child=lambda: os.close(handle))
    except (OSError, RuntimeError, ValueError) as error:  # torch.distributed's errors are RuntimeErrors
        _log.warning("rank %d: rank 0 may end first, which aborts this rank: %s", rank, error)


def _agents_store() -> Any:
    """The store of torchrun's agent, which outlives the ranks, and in it the keys of this start of them."""
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    start = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return PrefixStore(start, store)


def _wait_for_others(pid: int, listener: socket.socket, token: str, others: int) -> None:
    """At rank 0's exit, until the connections of all others are closed.

    Not after an error: the others may wait for this rank, and torchrun ends them once this process is gone.
    """
    if os.getpid() != pid or getattr(sys, "last_value", None) is not None:
        return
    began = time.monotonic()
    missing, running = others, set[socket.socket]()
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while missing or running:
            limit = ENDING_S if running else CONNECTING_S
            left = began + limit - time.monotonic()
            if left <= 0:
                break
            for key, _ in selector.select(left):
                if key.data is not None:  # closed: a rank sends nothing behind the token
                    selector.unregister(key.data)
                    running.remove(key.data)
                    key.data.close()
                elif connection := _accepted(listener, token):
                    selector.register(connection, selectors.EVENT_READ, connection)
                    running.add(connection)
                    missing -= 1
    if running:
        _log.warning("rank 0 ends after %.0f s, while %d other ranks run, which aborts them", ENDING_S, len(running))


def _accepted(listener: socket.socket, token: str) -> socket.socket | None:
    """The connection of a rank, which begins with the token; None where something else connected."""
    connection, _ = listener.accept()
    connection.settimeout(1.0)
    try:
        if connection.recv(len(token), socket.MSG_WAITALL) == token.encode():
            return connection
    except OSError:
        pass
    connection.close()
    return None
