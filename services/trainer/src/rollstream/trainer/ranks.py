"""The ranks of a trainer and the few collectives it uses: sums of metrics and counts, objects from rank 0."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore


@dataclass(frozen=True)
class Ranks:
    """This process among ``world`` ranks on ``device``.

    Lifecycle: :meth:`alone` needs no process group; :meth:`join` reads torchrun's environment (without one: a world
    of 1) and opens one, which :meth:`leave` closes. Control traffic runs over gloo on CPU tensors also where gradients
    travel by NCCL.
    """

    rank: int
    world: int
    device: torch.device

    @classmethod
    def alone(cls, device: torch.device | None = None) -> Ranks:
        return cls(0, 1, device or torch.device("cpu"))

    @classmethod
    def join(cls, timeout: float) -> Ranks:
        """The rank that torchrun made this process; collectives that take longer than ``timeout`` seconds fail."""
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        deadline = datetime.timedelta(seconds=timeout)
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=deadline)
        else:
            dist.init_process_group(backend, timeout=deadline, store=HashStore(), rank=0, world_size=1)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def leave(self) -> None:
        """Close the process group, if one is open."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def is_lead(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over ranks of a CPU tensor, on every rank; the same order of additions each time."""
        if self.world == 1:
            return values
        total = values.clone()
        dist.all_reduce(total)
        return total

    def from_lead(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank (what the others pass is ignored)."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            self.sum(torch.zeros(1))
