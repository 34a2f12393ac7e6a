"""Linear layers on a CPU: the type of their numbers and their order in memory.

A GPU needs none of this, except logits in float32.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.device import upcast

FEW_ROWS = 16  # for so many the order is chosen


def ordered(weight: Tensor) -> Tensor:
    """A weight (out, in) in oneDNN's own order, for `linear` alone: no gradient, no other
    operation knows it. Products with 4 to 96 rows are 1.5 to 2.8 times as fast on AVX2, as
    the weight is not copied into that order each time. Elsewhere the weight as it is.

    The operations behind it are not public. torch's compiler uses them for the same
    purpose; torch.utils.mkldnn, which is public, reorders in each product."""
    capable = torch.cpu.get_capabilities()
    kinds = {torch.float32: "avx2", torch.bfloat16: "avx512_bf16"}
    if weight.is_cuda or not capable.get(kinds.get(weight.dtype), False):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEW_ROWS)


def put(weight: Tensor, new: Tensor) -> None:
    """Give a weight, which may be `ordered`, the values of `new`."""
    if weight.is_mkldnn:
        weight.data = ordered(new.to(weight.dtype))
    else:
        weight.copy_(new)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, with a weight that may be `ordered`."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def head_for(weight: Tensor, few: bool = False) -> Tensor:
    """A head for many calls of `linear_float32`, of `few` rows each or not. On a CPU it is
    converted here, once."""
    if few and weight.itemsize > 2:
        return ordered(weight)
    return weight if weight.is_cuda else upcast(weight)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in float32, without gradients, of matrices of one type, or with a `head_for`.
    bfloat16 would round logits of about 20 to 0.06."""
    if upcast(x) is x:
        return linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    # Both hold bfloat16 numbers. So nothing is lost where a processor multiplies in that
    # and sums in float32; one that cannot multiplies in float32.
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        return F.linear(upcast(x), upcast(weight))
    finally:
        matmul.fp32_precision = before
