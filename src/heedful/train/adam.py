"""AdamW that keeps moments only for the rows of a matrix that ever had a gradient.

A row whose gradient has always been zero has zero moments and does not move but for its decay, so leaving it out
changes nothing: the weights are those of ``torch.optim.AdamW``. In an input embedding that is no output layer (every
scalar model's, an untied language model's) those are the tokens that no sequence has held yet, often nine of ten: 8
bytes per parameter that need not exist. The other moments may wait in main memory (``train/moments.py``).

Shapes: V rows of a matrix, N of them seen, D columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from heedful.models.offload import zeros_at_home
from heedful.train.moments import Bucket, Shuttle, cut, wait_at_home

MIN_ROWS = 4096
"""In matrices with fewer rows nobody looks."""
DENSE_FROM = 0.5
"""Share of a matrix's rows from which on it has moments for all: every step copies the rows that were seen."""


@dataclass
class _Seen:
    """The rows of one matrix that had a gradient so far, in the order of their first, with their moments."""

    ids_N: Tensor
    exp_avg_ND: Tensor
    exp_avg_sq_ND: Tensor
    step: Tensor

    @classmethod
    def none(cls, matrix: nn.Parameter) -> _Seen:
        moments_ND = torch.zeros((0, matrix.shape[1]), dtype=matrix.dtype, device=matrix.device)
        ids_N = torch.zeros(0, dtype=torch.int64, device=matrix.device)
        return cls(ids_N, moments_ND, moments_ND.clone(), torch.zeros((), device=matrix.device))

    def add(self, ids_N: Tensor) -> None:
        """Rows that are seen for the first time."""
        if len(ids_N):
            zeros_ND = self.exp_avg_ND.new_zeros(len(ids_N), self.exp_avg_ND.shape[1])
            self.ids_N = torch.cat([self.ids_N, ids_N])
            self.exp_avg_ND = torch.cat([self.exp_avg_ND, zeros_ND])
            self.exp_avg_sq_ND = torch.cat([self.exp_avg_sq_ND, zeros_ND])

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Put them into what torch's optimizer keeps of a matrix, zeros so far, on whatever device that is."""
        state["step"].copy_(self.step)
        for name, some_ND in (("exp_avg", self.exp_avg_ND), ("exp_avg_sq", self.exp_avg_sq_ND)):
            all_VD = state[name]
            all_VD.index_copy_(0, self.ids_N.to(all_VD.device), some_ND.to(all_VD.device))


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(..., fused=True)``, decoupled decay (Loshchilov and Hutter 2019), moments of seen rows only.

    ``state_dict`` holds the matrices with all moments; ``seen_state`` the others. Both are the same with ``offload``,
    under which the former wait in main memory where the device has a memory of its own.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, offload: bool = False
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._seen: dict[nn.Parameter, _Seen] = {}
        device = next(p.device for group in self.param_groups for p in group["params"])
        self._shuttle = Shuttle(device) if wait_at_home(device, wanted=offload) else None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        by_rows = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if self._is_by_rows(parameter) and not self._becomes_dense(parameter):
                    self._move_rows(parameter, group)
                    by_rows[parameter], parameter.grad = parameter.grad, None
        if self._shuttle is None:
            super().step()
        else:
            self._move_offloaded(self._shuttle)
        for parameter, gradient in by_rows.items():
            parameter.grad = gradient

    def state_dict(self) -> dict[str, Any]:
        """As torch's; with ``offload`` its moments are those at home, which the next step changes."""
        if self._shuttle is not None:
            self._shuttle.wait()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but that offloaded moments never are on the device."""
        if self._shuttle is None:
            super().load_state_dict(state_dict)
            return
        self._shuttle.wait()
        super().load_state_dict({**state_dict, "state": {}})
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = dict(zip(ids, (p for group in self.param_groups for p in group["params"]), strict=True))
        loaded = {own[i]: state for i, state in state_dict["state"].items()}
        self._make_state(loaded)
        for parameter, state in loaded.items():
            for name, tensor in self.state[parameter].items():
                tensor.copy_(state[name])

    def seen_state(self, names: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Tensor]]:
        """The rows seen and their moments, by the names of the matrices."""
        return {name: dict(vars(self._seen[p])) for name, p in names.items() if p in self._seen}

    def load_seen_state(self, names: Mapping[str, nn.Parameter], state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what ``seen_state`` gave."""
        self._seen = {
            names[name]: _Seen(**{k: v.to(names[name].device, copy=True) for k, v in seen.items()})
            for name, seen in state.items()
        }

    def _is_by_rows(self, parameter: nn.Parameter) -> bool:
        large = parameter.dim() == 2 and parameter.shape[0] >= MIN_ROWS
        return large and parameter.grad is not None and not self.state.get(parameter)

    def _becomes_dense(self, matrix: nn.Parameter) -> bool:
        """Note the rows with a gradient; whether there are too many for leaving out the others."""
        assert matrix.grad is not None
        # a fifth of the time of torch.any on a CPU
        has_gradient_V = (torch.amax(matrix.grad, dim=1) != 0) | (torch.amin(matrix.grad, dim=1) != 0)
        seen = self._seen.setdefault(matrix, _Seen.none(matrix))
        has_gradient_V[seen.ids_N] = False
        num_new = int(has_gradient_V.sum())
        if len(seen.ids_N) + num_new > DENSE_FROM * len(matrix):
            del self._seen[matrix]
            if len(seen.ids_N):
                self._make_state([matrix])
                seen.fill(self.state[matrix])
            return True
        seen.add(has_gradient_V.nonzero().squeeze(1))
        return False

    def _make_state(self, parameters: Iterable[nn.Parameter]) -> None:
        """Zeros for those parameters, where their moments wait."""
        parameters = list(parameters)
        twice = [p.detach() for p in parameters for _ in range(2)]
        zeros = [torch.zeros_like(p) for p in twice] if self._shuttle is None else zeros_at_home(twice)
        for parameter, first, second in zip(parameters, zeros[::2], zeros[1::2], strict=True):
            step = torch.zeros((), device=parameter.device)
            self.state[parameter] = {"step": step, "exp_avg": first, "exp_avg_sq": second}

    def _move_offloaded(self, shuttle: Shuttle) -> None:
        """torch's step for parameters whose moments are at home."""
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._make_state(p for p in given if not self.state.get(p))
        shuttle.run([bucket for group in self.param_groups for bucket in cut(group, self.state)], _move_bucket)

    def _move_rows(self, matrix: nn.Parameter, group: dict[str, Any]) -> None:
        assert matrix.grad is not None
        seen = self._seen[matrix]
        if group["weight_decay"]:
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
        rows_ND, gradient_ND = matrix.index_select(0, seen.ids_N), matrix.grad.index_select(0, seen.ids_N)
        _move({**group, "weight_decay": 0.0}, [rows_ND], [gradient_ND], [(seen.exp_avg_ND, seen.exp_avg_sq_ND)],
              [seen.step])  # fmt: skip
        matrix.index_copy_(0, seen.ids_N, rows_ND)


def _move_bucket(bucket: Bucket, moments: list[tuple[Tensor, Tensor]]) -> None:
    """The functional step of torch; a parameter in several pieces counts it once, with the last."""
    pieces = bucket.pieces
    steps = [piece.step if piece.is_last else piece.step.clone() for piece in pieces]
    _move(bucket.group, [piece.weights for piece in pieces], [piece.gradient for piece in pieces], moments, steps)


def _move(
    group: Mapping[str, Any],
    weights: list[Tensor],
    gradients: list[Tensor],
    moments: list[tuple[Tensor, Tensor]],
    steps: list[Tensor],
) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        weights, gradients, [first for first, _ in moments], [second for _, second in moments], [], steps, fused=True,
        amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
        maximize=False,
    )  # fmt: skip
