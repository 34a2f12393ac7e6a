"""The CUDA path without a GPU: update and sampler on fake tensors, which have a device, a
type and a shape, but no values. An operation on two devices or types fails.

It cannot see: what is special about "cuda" (autograd asks the driver about that, so the
device is "lazy" here); kernels of Triton and AdamW, of which only arguments are checked;
which kernel SDPA takes; graphs and streams (a capture runs its code once, a replay does
nothing); values (what the host reads is made up); inference mode, time, FSDP.
"""
import asyncio
import contextlib
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import numpy as np
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

GPU, BF16, VOCABULARY = "lazy:0", torch.bfloat16, 312
host = SimpleNamespace(capturing=False)


class Kernel:
    """Of Triton: called with a grid, then with arguments."""
    def __init__(self, function):
        pass

    def __getitem__(self, grid):
        assert 0 < min(grid) and max(grid[1:]) < 65536
        return lambda *args: [check(x, x.dtype) for x in args if hasattr(x, "dtype")]


def check(tensor, dtype):
    assert tensor.is_cuda and tensor.is_contiguous() and tensor.dtype == dtype


@contextlib.contextmanager
def capture(*_):
    host.capturing = True
    yield
    host.capturing = False


class Watch(TorchDispatchMode):
    """In a capture, nothing goes between host and device."""
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name, asks = op.name(), True
        if name == "aten::_local_scalar_dense":
            out = 0.0
        elif name == "aten::index.Tensor" and args[1][-1].dtype == torch.bool:
            out = args[0].new_empty(host.sampled, *args[0].shape[args[1][-1].dim():])
        else:
            out = op(*args, **kwargs or {})
            source = {"aten::copy_": args[1:2], "aten::_to_copy": args[:1]}.get(name)
            asks = bool(source) and source[0].device != out.device
        assert name != "aten::cumsum" or out.shape[-1] < VOCABULARY, "a long cumsum"
        assert not (asks and host.capturing), f"{name} in a capture"
        return out


def lower_right(*size, make=bias.causal_lower_right):
    with _disable_current_modes():  # fake mode cannot make this subclass
        return make(*size)


# What asks the driver, or is not for fake tensors.
sys.modules |= {"triton.language": MagicMock(), "triton": MagicMock(
    jit=Kernel, cdiv=lambda a, b: -(-a // b), next_power_of_2=lambda n: n)}
torch.inference_mode = lambda on=True: torch.no_grad() if on else contextlib.nullcontext()
with patch("torch.cuda.is_available", lambda: True):
    import engine.attention
    from engine import pages
    from engine.decode import decode
from engine.packing import collate
from grpo import GRPOConfig, Sequence, policy_loss
from model import Decoder, DecoderConfig
from sampler import Sampler

FakeTensor.is_cuda = property(lambda tensor: tensor.fake_device.type == "lazy")
FakeTensor.pin_memory = lambda tensor: tensor
FakeTensor.tolist = lambda tensor: host.ids
FakeTensor.numpy = lambda tensor: np.zeros(tuple(tensor.shape))
engine.attention.torch = SimpleNamespace(
    **vars(torch) | {"device": lambda device: SimpleNamespace(type="cuda")})
bias.causal_lower_right, bias.can_use_flash_attention = lower_right, lambda *_: True
sys.modules["torch.optim.optimizer"]._get_fused_kernels_supported_devices = lambda: ["lazy"]
torch.lazy = SimpleNamespace(_initialized=False)  # checkpointing asks for random states
torch.autograd.set_multithreading_enabled(False)
torch.cuda.Stream = torch.cuda.current_stream = torch.cuda.CUDAGraph = MagicMock()
torch.cuda.stream, torch.cuda.graph = lambda stream: contextlib.nullcontext(), capture


LINEAR = dict(
    model_type="qwen3_5_text", layer_types=["linear_attention", "full_attention"],
    partial_rotary_factor=0.5, linear_conv_kernel_dim=4, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=16)


def model_of(rank, hybrid):
    with torch.device("meta"):
        model = Decoder(DecoderConfig(
            VOCABULARY, 64, 96, 1 + hybrid, 4, 2, 16, 4096, **LINEAR if hybrid else {}))
    if rank:
        model.add_lora(rank, 32.0)
    weights = {name: torch.empty(w.shape, dtype=BF16, device=GPU)
               for name, w in model.weights().items()}
    weights |= {name: w.detach().to(GPU) for name, w in model.adapters().items()}
    model.fill(weights)
    return model


def update(recompute=False, rank=0, hybrid=False, empty=False):
    model = model_of(rank, hybrid)
    if recompute:
        model.recompute_above = 0
    ids = [[7] * 40 + [i] * 20 for i in range(3)] + [[9] * 33]  # three share a prefix
    ids = [] if empty else ids
    host.ids, host.sampled = sum(ids, []) or [0], 10 * len(ids)
    pack = collate([Sequence(row, [0] * (len(row) - 10) + [1] * 10, [-1.0] * len(row),
                        [1.0] * 10, 1.0) for row in ids], GPU)
    logprobs, entropy = model.logprobs(pack)
    check(logprobs, torch.float32)
    policy_loss(logprobs, entropy, pack, GRPOConfig())[0].backward()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        check(weight.grad, weight.dtype)
    torch.nn.utils.clip_grad_norm_(trained, 1.0).item()
    torch.optim.AdamW(trained, lr=1e-3, fused=True).step()


def sample(rank=0, copy=False, flash=True, hybrid=False):
    pages.decode = decode if flash else None
    sampler = Sampler(model_of(rank, hybrid), memory=1 << 24, batch=2, window=2048,
                      copy=copy)

    async def requests():
        await sampler.generate([5] * 300, 3)
        await asyncio.gather(*(sampler.generate([5] * 300 + [i] * 40, 2) for i in range(3)))

    asyncio.run(requests())
    sampler.load(model_of(rank, hybrid) if sampler.owns else sampler.model)
    assert sampler.stats["sampled"] == 9 and sampler.stats["reused"] > 0
    assert isinstance(sampler.attention, pages.FlashPages) == flash
    assert flash or sampler.pool.nbytes < 9 << 20  # the other half is for rows


for case, how in [
        (update, {}), (update, {"rank": 4, "recompute": True}), (update, {"empty": True}),
        (update, {"empty": True, "rank": 4}), (sample, {}), (sample, {"flash": False}),
        (sample, {"rank": 4}), (sample, {"rank": 4, "copy": True}),
        (update, {"hybrid": True, "rank": 4}), (sample, {"hybrid": True}),
        (update, {"hybrid": True, "recompute": True}),
        (sample, {"hybrid": True, "flash": False})]:
    with FakeTensorMode(allow_non_fake_inputs=True), Watch():
        case(**how)
