"""Start the ranks of this node through torchrun's own launcher, and turn their end into one exit code."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence

from rollstream.core.errors import EXIT_FAILURE

LAUNCHER_VARIABLE = "ROLLSTREAM_TRAINER_LAUNCHER"
"""Tells each rank the pid that it must not outlive."""


def launch_ranks(module: str, arguments: Sequence[str], nproc: int) -> int:
    """Run ``nproc`` processes of ``python -m module arguments`` as one torch.distributed group; the exit code.

    0 when all end well, else the first failed rank's own code (a signal's number + 128). The rendezvous port is
    chosen by the OS. When one rank fails, the others are ended.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Without this, many ranks would each take every core.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    # Its report of a failed rank repeats, in forty lines, what the rank itself has said.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=nproc, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1, start_method="spawn",
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        first = error.get_first_failure()[1].exitcode if codes else EXIT_FAILURE
        return first if first > 0 else 128 - first
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
