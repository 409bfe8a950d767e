"""A stand-in for flash-attn, whose kernels need CUDA, over PyTorch's fused CPU kernel.

Ring libraries call flash-attn's block functions. With this folder on the path they run on a CPU, and what is measured is
their schedule, messages and merging with the kernel that all others use as well. Only what the drivers reach is here:
whole sequences, no dropout, window, softcap or ALiBi; anything else is refused.
"""

from .flash_attn_interface import flash_attn_func

__all__ = ["flash_attn_func"]
__version__ = "2.8.3"  # whose signatures these are
