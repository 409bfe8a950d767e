"""FLOPs against PyTorch's own counter and against what attention says it computed."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from workers import flops
from workers.attention.transport import Ring, Traffic
from workers.model import Decoder, ModelConfig
from workers.model.adapter import AdapterConfig, add_adapters

MODEL = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, vocab_size=128)


def test_matrix_products_are_those_that_torch_counts():
    model = Decoder(MODEL)
    model.init_weights(0)
    tokens = torch.arange(40).view(2, 20)
    with FlopCounterMode(display=False) as counter:
        model(tokens, torch.arange(20).expand(2, 20), MODEL.pattern()).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for name, n in counted.items() if "attention" not in str(name))
    # The first layer's input needs a gradient, too, for the embedding is learnt: nothing is left out.
    assert products == flops.matmul_flops(MODEL, 40)


@pytest.mark.parametrize("tied, opened", [(True, True), (True, False), (False, True)])
def test_a_frozen_matrix_has_no_gradient(tied, opened):
    adapter = AdapterConfig(rank=4, targets=("q_proj", "v_proj", "down_proj"), train_norms=True, train_embeddings=opened)
    config = dataclasses.replace(MODEL, tie_embeddings=tied)
    model = add_adapters(Decoder(config), adapter)
    model.init_weights(0)
    tokens = torch.arange(40).view(2, 20)
    hidden = lambda module, inputs, output: output.requires_grad_()  # as it is behind the first adapter
    model.embed_tokens.register_forward_hook(hidden)
    with FlopCounterMode(display=False) as counter:
        model(tokens, torch.arange(20).expand(2, 20), config.pattern()).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    assert sum(n for name, n in counted.items() if "attention" not in str(name)) == flops.matmul_flops(config, 40, adapter)


SEEN = [
    {}, dict(window=17), dict(window=7, sinks=3), dict(block=16), dict(stride=4), dict(window=8, segment=8, summaries=2),
    dict(window=20, segment=16, reach=2), dict(memory=3), dict(top_blocks=2, top_block_size=16), dict(positions="alibi"),
]  # fmt: skip


@pytest.mark.parametrize("seen", SEEN, ids=str)
def test_pairs_are_those_that_attention_computes(seen):
    config = dataclasses.replace(MODEL, **seen)
    model = Decoder(config)
    model.init_weights(0)

    class OneRank:  # as much of a mesh as attention asks for on one rank
        traffic = Traffic()
        ring_transport = Ring(None, traffic)
        layout, ulysses, tp_rank, ulysses_rank = "contiguous", 1, 0, 0
        spec = type("spec", (), {"cp": 1, "tp": 1})

    for block in model.layers:
        block.self_attn.mesh = OneRank
    model(torch.arange(100)[None], torch.arange(100)[None], config.pattern()).sum().backward()
    pairs = OneRank.traffic.scores / (config.layers * config.heads)
    assert flops.seen_pairs(config, 100) == pairs
    assert flops.attention_flops(config, OneRank.traffic.scores) == 12 * config.head_dim * config.layers * config.heads * pairs


def test_causal_pairs_of_a_long_document_need_no_matrix():
    assert flops.seen_pairs(MODEL, 1 << 24) == (1 << 24) * ((1 << 24) + 1) / 2


def test_a_device_that_no_data_sheet_names_is_measured():
    assert 1e8 < flops.peak_flops(torch.device("cpu"), torch.float32) < 1e14


def test_the_longest_name_that_fits_is_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert flops.peak_flops(torch.device("cuda"), torch.bfloat16) == 756e12
    for name, rate in (("NVIDIA L40", 181e12), ("NVIDIA L40S", 362e12), ("NVIDIA A100-SXM4-80GB", 312e12)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert flops.peak_flops(torch.device("cuda"), torch.bfloat16) == rate
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA RTX A1000")  # not an A100
    monkeypatch.setattr(flops, "measured_flops", lambda device, dtype: 1.0)
    assert flops.peak_flops(torch.device("cuda"), torch.bfloat16) == 1.0
