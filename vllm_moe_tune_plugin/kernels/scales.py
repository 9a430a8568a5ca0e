"""The scales of fp8 tensors, from the forms in which vLLM's experts hold them to the one that the decode kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

#: Where weights are scaled in blocks: the rows that a program may have (searched tiles have up to 16, and twice as many where
#: gate and up rows alternate) and the columns that a thread has always share a scale.
ROWS, COLUMNS = 32, 16


class Scale(NamedTuple):
    """The scales of a tensor of fp8 values.

    Attributes:
        values: float32.
        kind: 1: one for each row of a product (or one for all: strides of 0); 2: one for each group along the contraction.
        strides: (outermost, row, group), in elements; for activations (token, 0, group).
        groups: (rows, columns) of a block that shares one scale.
    """

    values: torch.Tensor
    kind: int
    strides: tuple[int, int, int]
    groups: tuple[int, int] = (1, 1)


def of_input(scale: torch.Tensor | None, tokens: int, hidden: int, block: Sequence[int] | None) -> Scale | None:
    """The scales of a layer's quantised input [tokens, hidden].

    Args:
        scale: float32; [1] for all, [tokens, 1], or [tokens, groups of ``block[1]`` columns] in any strides.
        block: (rows, columns) of the weights' blocks; None where they are not scaled in blocks.

    Returns:
        None where the kernels cannot take it.
    """
    if scale is None or scale.dtype != torch.float32:
        return None
    if block is not None:
        if scale.shape != (tokens, -(-hidden // block[1])):
            return None
        return Scale(scale, 2, (scale.stride(0), 0, scale.stride(1)), (1, block[1]))
    if scale.numel() == 1:
        return Scale(scale, 1, (0, 0, 0))
    return Scale(scale, 1, (scale.stride(0), 0, 0)) if scale.shape == (tokens, 1) else None


def of_weight(scale: torch.Tensor | None, weight: torch.Tensor, block: Sequence[int] | None) -> Scale | None:
    """The scales of the experts' weights [E, rows, columns].

    Args:
        scale: float32; one for each expert, [E, rows, 1], or [E, blocks of rows, blocks of columns] in any strides.
        weight: fp8.
        block: (rows, columns) of a block; None where weights are not scaled in blocks.

    Returns:
        None where the kernels cannot take it.
    """
    if scale is None or scale.dtype != torch.float32:
        return None
    experts, rows, columns = weight.shape
    if block is not None:
        across, along = block
        # Where gate and up rows do not alternate, the latter begin at half of the rows.
        if across % ROWS or along % COLUMNS or rows % 32:
            return None
        if scale.shape != (experts, -(-rows // across), -(-columns // along)):
            return None
        return Scale(scale, 2, (scale.stride(0), scale.stride(1), scale.stride(2)), (across, along))
    if scale.numel() == experts:
        return Scale(scale, 1, (1, 0, 0)) if scale.is_contiguous() else None
    return Scale(scale, 1, (scale.stride(0), scale.stride(1), 0)) if scale.shape == (experts, rows, 1) else None
