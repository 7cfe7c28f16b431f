"""Muon in float32 for CPUs: momentum SGD whose matrix updates are approximately orthogonalized before each step.

Invariant: the root mean square of an update is typical of AdamW, so both optimizers use the same learning rate.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A quintic polynomial that moves singular values close to one in few iterations.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonal(matrices: Tensor) -> Tensor:
    """Returns approximately orthogonal matrices with the same singular vectors, (n, rows, columns)."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with orthogonalized updates and decoupled weight decay; matrices of the same shape are
    batched."""

    def __init__(
        self, matrices: list[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        shapes = {matrix.shape for matrix in matrices}
        self.by_shape = [[matrix for matrix in matrices if matrix.shape == shape] for shape in sorted(shapes)]

    @torch.no_grad()
    def step(self) -> None:
        """Updates all matrices once."""
        group = self.param_groups[0]
        rate, momentum = group["lr"], group["momentum"]
        for matrices in self.by_shape:
            directions = []
            for matrix in matrices:
                mean = self.state[matrix].setdefault("mean", torch.zeros_like(matrix))
                mean.lerp_(matrix.grad, 1.0 - momentum)
                directions.append(matrix.grad.lerp(mean, momentum))
            scale = 0.2 * max(matrices[0].shape) ** 0.5
            for matrix, update in zip(matrices, orthogonal(torch.stack(directions))):
                matrix.mul_(1.0 - rate * group["weight_decay"]).add_(update, alpha=-rate * scale)
