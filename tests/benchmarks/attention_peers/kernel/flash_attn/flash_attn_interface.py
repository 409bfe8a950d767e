"""The block functions of flash-attn 2.8 with its own names and argument order, tensors [B, S, H, D], lse [B, H, S]."""

import torch
import torch.nn.functional as F

aten = torch.ops.aten


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
    return_softmax=False,
):  # fmt: skip
    _plain(q, k, dropout_p, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse.contiguous(), None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1,
    softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None,
):  # fmt: skip
    _plain(q, k, dropout_p, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    tensors = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, softmax_lse, 0.0, causal, scale=softmax_scale)
    for place, grad in zip((dq, dk, dv), grads):
        place.copy_(grad.transpose(1, 2))


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """With autograd."""
    _plain(q, k, dropout_p, causal, window_size, softcap, alibi_slopes)
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=softmax_scale, enable_gqa=grouped).transpose(1, 2)


def _flash_attn_varlen_forward(*_, **__):
    raise NotImplementedError("the stand-in has no packed sequences")


_flash_attn_varlen_backward = _flash_attn_varlen_forward


def _plain(q, k, dropout_p, causal, window, softcap, alibi_slopes) -> None:
    if dropout_p or tuple(window) != (-1, -1) or softcap or alibi_slopes is not None:
        raise NotImplementedError("the stand-in has no dropout, window, softcap or ALiBi")
    if causal and q.shape[1] != k.shape[1]:
        raise NotImplementedError("the stand-in's causal blocks are square")
