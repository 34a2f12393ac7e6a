"""The recurrent states of a hybrid, for the sampler: where they lie, and how a step reads
and writes them. Which state belongs to whom is for engine/prefix.py.

A state has two parts for each linear layer: the matrix of its delta rule, and the last
inputs of its convolution. Shapes: L linear layers, S states; more in engine/delta.py.
"""
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.delta import Runs, convolve, rule, taps

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


class StepLayout:
    """The tokens of a step of the sampler: one each of B requests that decode, whose states
    are `decoding` (B,), then those of `prompts`, a list of (request, tokens). It has the
    methods of engine.attention.Layout. `attend` is given, and `rule_step`, which computes
    the delta rule for one token."""

    def __init__(self, attend: Callable, rule_step: Callable, states: States | None,
                 decoding: Tensor, prompts: list):
        self.attend, self.rule_step = attend, rule_step
        self.states, self.decoding, self.prompts = states, decoding, None
        if not prompts or states is None:
            return
        requests, counts = zip(*prompts)
        device, kept = decoding.device, states.inputs.shape[2]
        self.prompts = torch.tensor([r.state for r in requests], device=device)  # R
        total, starts = sum(counts), np.cumsum((0, *counts))
        before = np.arange(total) - 1
        before[starts[:-1]] = -1
        self.runs = Runs(before, device)
        # After the tokens stand the kept inputs of their states, which they follow.
        ends = total + kept * np.arange(1, len(counts) + 1)
        before = np.append(before, np.arange(total, ends[-1]) - 1)
        before[starts[:-1]] = ends - 1
        index = taps(before, len(before), kept + 1)
        self.taps = torch.as_tensor(index[:total], device=device)  # N W
        self.last = torch.as_tensor(index[starts[1:] - 1, 1:], device=device)  # R W-1

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        x, inputs, outs = x[0], self.states.inputs[layer], []
        B = len(self.decoding)
        if B:
            seen = torch.cat((inputs[self.decoding], x[:B, None]), 1)  # B W C
            inputs.index_copy_(0, self.decoding, seen[:, 1:])
            index = torch.arange(seen.shape[0] * seen.shape[1], device=x.device)
            outs.append(convolve(seen.flatten(0, 1), index.view(seen.shape[:2]), weight))
        if self.prompts is not None:
            seen = torch.cat((x[B:], inputs[self.prompts].flatten(0, 1)))
            outs.append(convolve(seen, self.taps, weight))
            inputs.index_copy_(0, self.prompts, seen[self.last])
        return torch.cat(outs)[None]  # 1 N C

    def recur(self, layer: int, *inputs: Tensor) -> Tensor:
        inputs, matrices, outs = [x[0] for x in inputs], self.states.matrices[layer], []
        B = len(self.decoding)
        if B:
            outs.append(self.rule_step(matrices, self.decoding, *(x[:B] for x in inputs)))
        if self.prompts is not None:
            out, ends = rule(*(x[B:] for x in inputs), self.runs, matrices[self.prompts])
            matrices.index_copy_(0, self.prompts, ends[self.runs.last])
            outs.append(out)
        return torch.cat(outs)[None]  # 1 N H V
