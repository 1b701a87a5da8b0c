"""Symmetric matrices as the numbers of their upper half, which is all that a message needs of them."""

from __future__ import annotations

import torch
from torch import Tensor


def upper_half(matrix: Tensor) -> Tensor:
    """Numbers of a square matrix on and above its diagonal, row by row, shape (p (p + 1) / 2,)."""
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns]


def from_upper_half(numbers: Tensor, size: int) -> Tensor:
    """The symmetric matrix, float64, shape (size, size), that has these numbers as its upper half."""
    matrix = torch.zeros(size, size, dtype=torch.float64, device=numbers.device)
    rows, columns = torch.triu_indices(size, size, device=numbers.device)
    matrix[rows, columns] = matrix[columns, rows] = numbers.double()
    return matrix
