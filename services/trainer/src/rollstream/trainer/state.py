"""The policy's weights as a plain state dict: out of a sharded model, and back into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from rollstream.trainer.model import Policy

_PREFIX = "hf."


def full_state(policy: Policy, *, sharded: bool) -> dict[str, Tensor]:
    """Every tensor in full, contiguous on CPU, under the names of the HF model; a tied head is left out.

    With ``sharded`` a collective: rank 0 gets the tensors, the others an empty dict. Unsharded CPU tensors are the
    live parameters, not copies: write them out before the next step.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = cast(dict[str, Any], get_model_state_dict(policy, options=options) if sharded else policy.state_dict())
    left_out = _tied_names(policy)
    return {
        name.removeprefix(_PREFIX): value.detach().cpu().contiguous()
        for name, value in state.items()
        if name.removeprefix(_PREFIX) not in left_out
    }


def load_full_state(policy: Policy, state: Mapping[str, Tensor], *, sharded: bool) -> None:
    """The inverse of :func:`full_state`; every rank passes the same tensors. Raises ``ValueError`` naming misfits."""
    left_out = _tied_names(policy)
    wanted = {name.removeprefix(_PREFIX) for name in policy.state_dict()} - left_out
    if wanted != set(state):
        odd = sorted(wanted ^ set(state))
        raise ValueError(f"the weights are of another model: {', '.join(odd[:4])} do not match")
    complete: dict[str, Any] = {_PREFIX + name: value for name, value in state.items()}
    if left_out:
        embedding = next(name for name, module in policy.named_modules() if module is policy.hf.get_input_embeddings())
        complete |= {_PREFIX + name: complete[f"{embedding}.weight"] for name in left_out}
    if sharded:
        set_model_state_dict(policy, complete, options=StateDictOptions(full_state_dict=True, strict=True))
    else:
        with torch.no_grad():
            policy.load_state_dict(complete)


def _tied_names(policy: Policy) -> set[str]:
    """State-dict names (without prefix) that repeat the embedding."""
    if not policy.tied:
        return set()
    head = policy.hf.get_output_embeddings()
    return {f"{name}.weight" for name, module in policy.hf.named_modules() if module is head}
