"""What bit-exact replay holds equal inside a process: kernels, threads, seed."""

from __future__ import annotations

import os

import torch


def prepare(*, deterministic: bool, threads: int | None, seed: int) -> None:
    """Set torch up in the thread that will compute (OpenMP keeps its thread count per thread)."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    if deterministic:
        # cuBLAS wants this before its first call; harmless on CPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def environment() -> dict[str, str | int]:
    """What another process must have equal to compute the same bits; recorded in checkpoints."""
    cuda = torch.cuda.is_available()
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if cuda else f"cpu {torch.backends.cpu.get_cpu_capability()}",
    }
