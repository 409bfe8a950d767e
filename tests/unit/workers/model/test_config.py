import pytest
import torch

from workers.model import Decoder, ModelConfig
from workers.model.config import padded_vocabulary


@pytest.mark.parametrize(
    "shape, said",
    [
        (dict(dim=0), "model.dim is 0"),
        (dict(layers=0), "model.layers is 0"),
        (dict(heads=6, kv_heads=4), "model.heads = 6 is not a multiple of model.kv_heads = 4"),
        (dict(heads=4, kv_heads=0), "model.kv_heads = 0"),
        (dict(dim=100, heads=8), "model.dim = 100 does not divide by model.heads = 8; set model.head_dim"),
        (dict(dim=24, heads=8), "model.head_dim is 3"),
        (dict(head_dim=0), "model.head_dim is 0"),
        (dict(head_dim=-2), "model.head_dim is -2"),
    ],
)
def test_a_shape_that_cannot_be_built(shape, said):
    with pytest.raises(ValueError, match=said):
        ModelConfig(**shape)


def test_what_is_not_given_follows_from_the_rest():
    config = ModelConfig(dim=64, heads=4)
    assert (config.kv_heads, config.head_dim) == (4, 16)
    assert ModelConfig(dim=64, heads=4, head_dim=32).head_dim == 32


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("extra", [{}, dict(qkv_bias=True), dict(qk_norm=True), dict(head_dim=32), dict(kv_heads=1)], ids=str)
def test_parameters_are_counted_as_the_model_has_them(tied, extra):
    config = ModelConfig(**(dict(dim=64, layers=3, heads=4, kv_heads=2, ffn_dim=96, vocab_size=320, tie_embeddings=tied) | extra))
    with torch.device("meta"):
        model = Decoder(config)
    assert config.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_padded_vocabulary_holds_every_id_and_divides():
    assert [padded_vocabulary(n) for n in (1, 63, 64, 65, 264)] == [64, 64, 64, 128, 320]
