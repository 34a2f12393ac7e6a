"""Tensors, devices, ranks and weight files. It knows no trees and no rewards.

Programs import this before torch, which reads the settings below when it is loaded."""
import os

# A thread that waits for the others spins a little, then sleeps. torch's default is to spin
# long: 1.3 times faster on two idle cores, ten times slower on two busy ones.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Large tensors of a CPU lie in pages of 2 MB. With the usual 4 KB, a fifth of the processor
# time of a Qwen's update was page faults.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# A GPU's freed blocks of one size serve requests of another.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
