"""Entry point of group ``vllm.general_plugins``: vLLM calls :func:`register` once in each of its processes."""

from __future__ import annotations

import multiprocessing
import os

TRANSFER_BACKEND = "rollstream"
"""Value of vLLM's ``--weight-transfer-config '{"backend": …}'`` that selects our engine."""

OWNER_VARIABLE = "ROLLSTREAM_ENGINE_SERVER_PID"
"""Set by our server to its pid. Its presence tells vLLM's child processes that they belong to a replica."""


def register() -> None:
    """Register the weight-transfer engine; in a child of our server also tie its life to the parent's.

    vLLM may call this more than once in a process, so a second call changes nothing.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            TRANSFER_BACKEND, "rollstream.inference.transfer", "FilesystemTransferEngine"
        )
    if OWNER_VARIABLE in os.environ and multiprocessing.parent_process() is not None:
        # vLLM's engine core does not notice a killed API server and would stay behind for ever.
        from rollstream.core.leash import hold

        hold()
