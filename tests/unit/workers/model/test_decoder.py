"""The decoder as a function of its tokens: nothing sees the future, nothing crosses a document, positions are explicit."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from workers.attention import Pattern
from workers.model import Decoder, ModelConfig

CONFIG = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, vocab_size=64)
VARIANTS = {
    "llama": CONFIG,
    "tied": dataclasses.replace(CONFIG, tie_embeddings=True),
    "qwen": dataclasses.replace(CONFIG, qkv_bias=True, qk_norm=True),
}


def decoder(config: ModelConfig = CONFIG, seed: int = 0) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device="cpu")
    model.tie()
    model.init_weights(seed)
    return model


def tokens(length: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(0, CONFIG.vocab_size, (rows, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def logits(model, tokens_BS, documents=None, positions=None):
    positions = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS) if positions is None else positions
    return model(tokens_BS, positions, Pattern(documents=documents))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("changed", [0, 1, 37, 95])
def test_a_changed_token_changes_nothing_before_it(variant, changed):
    model, before = decoder(VARIANTS[variant]), tokens(96)
    after = before.clone()
    after[0, changed] = (after[0, changed] + 1) % CONFIG.vocab_size
    a, b = logits(model, before), logits(model, after)
    assert torch.equal(a[:, :changed], b[:, :changed])
    assert not torch.equal(a[:, changed:], b[:, changed:])


def test_a_change_in_one_document_changes_nothing_in_another():
    model, before = decoder(), tokens(96)
    documents = torch.tensor([0] * 30 + [1] * 40 + [2] * 26)
    after = before.clone()
    after[0, 35] = (after[0, 35] + 1) % CONFIG.vocab_size
    a, b = logits(model, before, documents), logits(model, after, documents)
    assert torch.equal(a[:, :35], b[:, :35]) and torch.equal(a[:, 70:], b[:, 70:])
    assert not torch.equal(a[:, 35:70], b[:, 35:70])


def test_two_equal_documents_in_one_window_have_equal_losses():  # W5
    model, document = decoder(), tokens(25)
    twice, targets = document[:, :-1].repeat(1, 2), document[:, 1:].repeat(1, 2)
    documents, restarting = torch.arange(48) // 24, (torch.arange(48) % 24)[None]
    losses = F.cross_entropy(logits(model, twice, documents, restarting)[0], targets[0], reduction="none")
    torch.testing.assert_close(losses[24:], losses[:24], rtol=1e-6, atol=1e-6)
    # Rotation is relative: positions that go on through the window leave the loss where it is, but for rounding.
    going_on = F.cross_entropy(logits(model, twice, documents)[0], targets[0], reduction="none")
    torch.testing.assert_close(going_on, losses, rtol=1e-5, atol=1e-5)
    leaking = F.cross_entropy(logits(model, twice)[0], targets[0], reduction="none")
    assert not torch.allclose(leaking[24:], losses[:24], atol=1e-4)


def test_positions_are_those_given_and_not_the_index():
    model, text = decoder(), tokens(16)
    spread = torch.arange(16)[None] * 3
    assert not torch.allclose(logits(model, text), logits(model, text, positions=spread), atol=1e-4)
    torch.testing.assert_close(logits(model, text), logits(model, text, positions=torch.arange(16)[None] + 10**7), rtol=1e-3, atol=1e-4)


def test_rows_of_a_batch_do_not_mix():
    model, rows = decoder(), tokens(40, rows=3)
    together = logits(model, rows)
    for row in range(3):
        torch.testing.assert_close(together[row], logits(model, rows[row : row + 1])[0], rtol=1e-5, atol=1e-5)


def test_a_head_gets_hidden_states_and_the_weight():
    model, text = decoder(), tokens(8)
    hidden, weight = model(text, torch.arange(8)[None], Pattern(), head=lambda h, w: (h, w))
    assert weight is model.lm_head.weight
    torch.testing.assert_close(F.linear(hidden, weight), logits(model, text))


def test_weights_depend_on_the_seed_alone():
    first, torch_state = decoder(seed=3), torch.get_rng_state()
    torch.manual_seed(99)
    again, other = decoder(seed=3), decoder(seed=4)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters()):
        assert torch.equal(a, b), name
        assert a.ndim == 1 or not torch.equal(a, c), name
    torch.set_rng_state(torch_state)
    assert len({parameter.flatten()[:4].sum().item() for parameter in first.parameters() if parameter.ndim > 1}) > 10  # no two alike


def test_a_tied_head_is_the_embedding():
    model = decoder(VARIANTS["tied"])
    assert model.lm_head.weight is model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
