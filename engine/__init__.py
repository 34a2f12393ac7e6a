"""Tensors, devices, ranks and weight files. It knows no trees and no rewards.

Programs import this before torch, which reads the settings below when it is loaded."""
import contextlib
import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h

# A thread that waits for the others spins a little, then sleeps. torch's default is to spin
# long: 1.3 times faster on two idle cores, ten times slower on two busy ones.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Large tensors of a CPU lie in pages of 2 MB. With the usual 4 KB, a fifth of the processor
# time of a Qwen's update was page faults.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# What is freed is used again. glibc would map each large tensor anew, and return it at
# once: a sixth of the processor time of a Qwen's supervised steps.
with contextlib.suppress(OSError, AttributeError):  # another C library
    for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        ctypes.CDLL("libc.so.6").mallopt(option, 2**31 - 1)
# A GPU's freed blocks of one size serve requests of another.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
