"""Generation against full forward passes, and weights of a two-rank run against what one process reads of them."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.distributed.training_cases import MODEL, stream, with_steps
from tests.unit.workers.model.test_decoder import CONFIG, VARIANTS, decoder, logits, tokens
from workers.attention import Pattern
from workers.inference.cache import KVCache
from workers.inference.generate import generate, load_decoder
from workers.mesh import MeshSpec
from workers.training import checkpoint as checkpoints
from workers.training.config import CheckpointConfig
from workers.training.loop import Job, train

PROMPT = tokens(23)[0].tolist()


@pytest.fixture(scope="module")
def model():
    return decoder()


@torch.no_grad()
def in_chunks(model, text: torch.Tensor, chunk: int) -> torch.Tensor:
    """Logits of every token, computed chunk after chunk on a cache."""
    caches = [KVCache(model.config, text.shape[1]) for _ in model.layers]
    positions = torch.arange(text.shape[1])[None]
    parts = [model(t, p, Pattern(), caches=caches) for t, p in zip(text.split(chunk, 1), positions.split(chunk, 1))]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [1, 7, 23, 100])
def test_prefill_in_chunks_gives_the_logits_of_one_pass(variant, chunk):  # I2
    model, text = decoder(VARIANTS[variant]), torch.tensor([PROMPT])
    torch.testing.assert_close(in_chunks(model, text, chunk), logits(model, text), rtol=1e-5, atol=1e-5)


def greedy(model, prompt: list[int], count: int) -> list[int]:
    """The likeliest token of a full pass, again and again."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(logits(model, torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("prefill", [1, 7, 23, 2048])
def test_greedy_generation_is_the_argmax_of_full_passes(model, prefill):
    assert list(generate(model, PROMPT, 12, prefill=prefill)) == greedy(model, PROMPT, 12)


@torch.no_grad()
@pytest.mark.parametrize("prefill", [1, 7, 2048])
def test_papers_of_a_prompt_are_seen_by_their_summaries(prefill):
    model = decoder(dataclasses.replace(CONFIG, window=4, segment=3))
    parts = [0] * 6 + [1] * 9 + [2] * 8
    text = list(PROMPT)
    for _ in range(12):
        pattern = model.config.pattern(None, torch.tensor(parts + [2] * (len(text) - 23)))
        text.append(int(model(torch.tensor([text]), torch.arange(len(text))[None], pattern)[0, -1].argmax()))
    assert list(generate(model, PROMPT, 12, prefill=prefill, parts=parts)) == text[23:]


def test_a_prompt_of_one_token_and_an_answer_of_one(model):
    assert list(generate(model, PROMPT[:1], 1)) == greedy(model, PROMPT[:1], 1)
    assert list(generate(model, PROMPT, 0)) == []


def answer_with_a_new_token(model) -> tuple[list[int], int]:
    """Twelve sampled tokens, and the place of one that none before it equals."""
    answer = list(generate(model, PROMPT, 12, temperature=1.0, seed=3))
    return answer, next(i for i in range(4, 12) if answer[i] not in answer[:i])


def test_it_ends_at_a_stop_id_which_is_not_given(model):
    answer, place = answer_with_a_new_token(model)
    stopped = list(generate(model, PROMPT, 12, temperature=1.0, seed=3, stop=frozenset({answer[place]})))
    assert stopped == answer[:place]
    assert list(generate(model, PROMPT, 12, stop=frozenset(range(CONFIG.vocab_size)))) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_padding_of_the_vocabulary_is_never_chosen(model, temperature):
    answer = list(generate(model, PROMPT, 40, vocabulary=5, temperature=temperature))
    assert len(answer) == 40 and max(answer) < 5
    assert temperature < 50 or max(generate(model, PROMPT, 40, temperature=temperature)) >= 5


def test_samples_depend_on_the_seed_alone(model):
    sample = lambda seed: list(generate(model, PROMPT, 20, temperature=1.0, seed=seed))
    first = sample(0)
    torch.manual_seed(1)
    torch.rand(3)
    assert sample(0) == first
    assert sample(1) != first


def test_a_cold_sample_is_the_likeliest_token(model):
    assert list(generate(model, PROMPT, 8, temperature=1e-5)) == greedy(model, PROMPT, 8)


def test_samples_follow_the_softmax(model):
    """400 first tokens: how often the likeliest four ids came against their share."""
    probabilities = torch.softmax(logits(model, torch.tensor([PROMPT]))[0, -1] / 0.05, 0)
    counts = torch.zeros(CONFIG.vocab_size)
    for seed in range(400):
        counts[next(generate(model, PROMPT, 1, temperature=0.05, seed=seed))] += 1
    likeliest = probabilities.topk(4).indices
    share, found = probabilities[likeliest].sum().item(), counts[likeliest].sum().item() / 400
    assert abs(found - share) < 4 * (share * (1 - share) / 400) ** 0.5 + 1e-9


def test_tokens_come_one_by_one_and_keep_no_gradient(model):
    answer = generate(model, PROMPT, 1000)
    with torch.enable_grad():
        assert [next(answer) for _ in range(3)] == greedy(model, PROMPT, 3)
    assert all(parameter.grad is None for parameter in model.parameters())


def train_and_gather(spec: MeshSpec, run: str) -> dict[str, torch.Tensor]:
    """Train four steps with a checkpoint at the end; the whole weights, as they were left."""
    mesh, models = spec.build("cpu"), []
    job = Job(MODEL, with_steps(4), CheckpointConfig(every=0), Path(run))
    windows = (lambda first: stream(first, job.training.context, mesh, spec.dp)) if mesh.is_leader else None
    train(job, mesh, windows, after_backward=lambda step, model: models.append(model))
    return {name: parameter.full_tensor().detach() for name, parameter in models[-1].named_parameters()}


@pytest.mark.parametrize("spec", [MeshSpec(ring=2), MeshSpec(tp=2)], ids=["ring", "tensor"])
def test_a_checkpoint_of_two_ranks_is_read_whole_by_one(world, tmp_path, spec):
    trained = world.run(train_and_gather, ranks=2, spec=spec, run=str(tmp_path))[0]
    model = load_decoder(checkpoints.latest(tmp_path / "checkpoints"))
    assert model.config == MODEL and not model.training
    read = dict(model.named_parameters())
    assert read.keys() == trained.keys()
    for name, value in trained.items():
        assert torch.equal(read[name], value), name
    untrained = decoder(MODEL)
    assert not torch.equal(untrained.norm.weight, model.norm.weight)
