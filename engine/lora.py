"""LoRA: small float32 matrices beside frozen weights, which alone are trained.

A layer with the weight W and an adapter A, B computes x W^T + (alpha / rank) (x A^T) B^T.
B is 0 at first, so that adapters change nothing. engine/hf.py reads and writes them in
PEFT's layout.

Tried and failed: TinyLoRA with 13 numbers, which learned nothing. Sources: LoRA (arXiv
2106.09685), LoRA Without Regret (Thinking Machines, 2025). Shapes: B rows, T tokens, R the
rank.
"""
import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.device import upcast
from engine.linear import linear, ordered
from engine.parallel import full_tensor


class Linear(nn.Linear):
    """A linear layer that may have an adapter: lora_A (R, inputs), lora_B (outputs, R)."""
    scale = 0.0  # alpha / rank; 0 without an adapter, or while it is off

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__(inputs, outputs, bias)

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, self.bias)  # B T outputs
        if self.scale:
            low = F.linear(x, self.lora_A.to(x.dtype)) * self.scale  # B T R
            rows = y.view(-1, y.shape[-1])  # a copy would lose the adapter
            rows.addmm_(low.flatten(0, -2), self.lora_B.to(x.dtype).T)
        return y


class Adaptable(nn.Module):
    """A model whose `Linear` layers can have adapters."""
    lora_rank = 0  # the adapters' rank; 0 without any

    def adapted(self) -> list[tuple[str, Linear]]:
        """(name, layer) of those that can have adapters: all large ones but the head."""
        return [(name, m) for name, m in self.named_modules() if isinstance(m, Linear)]

    def adapters(self) -> dict[str, Tensor]:
        return {name: w for name, w in self.named_parameters() if "lora_" in name}

    def weights(self) -> dict[str, Tensor]:
        """All parameters but the adapters. Of two tied weights only the first is there."""
        return {name: w for name, w in self.named_parameters() if "lora_" not in name}

    def add_lora(self, rank: int, alpha: float, seed: int = 0) -> "Adaptable":
        """Freeze all weights and add adapters. With A uniform in +-1/sqrt(inputs) the best
        learning rate hardly depends on the rank."""
        generator = torch.Generator().manual_seed(seed)
        self.requires_grad_(False)
        self.lora_rank, self.alpha = rank, alpha
        for _, layer in self.adapted():
            bound = layer.in_features ** -0.5
            A = torch.empty(rank, layer.in_features).uniform_(
                -bound, bound, generator=generator)
            B = torch.zeros(layer.out_features, rank)
            # Adapters have values even if the weights are on meta.
            device = "cpu" if layer.weight.is_meta else layer.weight.device
            layer.lora_A = nn.Parameter(A.to(device))
            layer.lora_B = nn.Parameter(B.to(device))
            layer.scale = alpha / rank
        return self

    def order(self) -> "Adaptable":
        """For a model that is only sampled from: its linear layers in the order that suits
        few rows (engine/linear.py)."""
        for _, layer in self.adapted():
            layer.weight = nn.Parameter(ordered(layer.weight), requires_grad=False)
        return self

    @contextlib.contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Inside `with`, the model is the one before LoRA: the reference of the KL."""
        for _, layer in self.adapted():
            layer.scale = 0.0
        try:
            yield
        finally:
            for _, layer in self.adapted():
                layer.scale = self.alpha / self.lora_rank

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """(name, weight) of a plain model that computes the same, in its order. An adapted
        weight is a new float32 tensor, the others are this model's own. With sharded
        weights all are new, and all ranks have to iterate."""
        layers = {f"{name}.weight": layer for name, layer in self.adapted()}
        for name, weight in self.weights().items():
            weight = full_tensor(weight.detach())
            if self.lora_rank and name in layers:
                layer = layers[name]
                product = full_tensor(layer.lora_B) @ full_tensor(layer.lora_A)
                weight = upcast(weight) + layer.scale * product
            yield name, weight
