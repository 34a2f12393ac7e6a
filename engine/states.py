"""The recurrent states of a hybrid, for the sampler: where they lie. A step reads and
writes them by StepLayout (engine/attention.py). Which state belongs to whom is for
engine/prefix.py.

A state has two parts for each linear layer: the matrix of its delta rule, and the last
inputs of its convolution. Shapes: L linear layers, S states; more in engine/delta.py.
"""
import numpy as np
import torch
from torch import Tensor

STATES_PER_WINDOW = 3  # of the KV cache


def state_bytes(config, itemsize: int) -> int:
    """What a state takes; `itemsize` is of the model's type."""
    if not any(config.is_linear):
        return 0
    window, matrix = shapes(config)
    each = np.prod(window) * itemsize + np.prod(matrix) * max(itemsize, 4)
    return config.is_linear.count(True) * int(each)


def shapes(config) -> tuple[tuple, tuple]:
    """Of a layer: the convolution's last inputs (W - 1, C), and its matrix (H, K, V)."""
    c = config
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    values = c.linear_num_value_heads * c.linear_value_head_dim
    matrix = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    return (c.linear_conv_kernel_dim - 1, 2 * keys + values), matrix


def zeros(shape: tuple, like: Tensor, dtype: torch.dtype) -> Tensor:
    """On the device of `like`. On a CPU only what is written takes up memory."""
    if like.is_cuda:
        return torch.zeros(shape, dtype=dtype, device=like.device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)  # torch would write them
    return torch.from_numpy(raw).view(dtype).view(shape)


class States:
    """`inputs` (L, S, W - 1, C), the last of each convolution, and `matrices`
    (L, S, H, K, V). State 0 is for padding."""

    def __init__(self, model, count: int):
        layers, weight = model.config.is_linear.count(True), model.lm_head.weight
        inputs, matrix = shapes(model.config)
        self.count = count
        self.inputs = zeros((layers, count + 1, *inputs), weight, weight.dtype)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.matrices = zeros((layers, count + 1, *matrix), weight, dtype)

    def copy(self, source: int, target: int) -> None:
        """From state 0 zeros are copied, whatever it holds."""
        for states in (self.inputs, self.matrices):
            states[:, target] = states[:, source] if source else 0
