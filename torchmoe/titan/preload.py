"""Imports everything that a rank of a torchtitan run needs, so that a fork server can do it once for all ranks."""

import multiprocessing
from multiprocessing import forkserver

__all__ = ["start"]


def start() -> None:
    """Start this process's fork server with torchtitan imported; without effect if it runs already."""
    modules = ["torch", "torch.distributed", "torchmoe.testing.ranks", "torchmoe.comm.c10d", "torchmoe.titan.preloaded"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    forkserver.ensure_running()
