import random
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.corpus.duplicates import HASHES, NearDuplicates, _values, _word_hashes, signature


def words(seed: int, count: int) -> list[str]:
    generator = random.Random(seed)
    return [f"w{generator.randrange(3000)}" for _ in range(count)]


def shingles(text: str) -> set[tuple]:
    found = re.findall(r"\w+", text)
    return {tuple(found[i : i + 5]) for i in range(len(found) - 4)}


def similarity(a: str, b: str) -> float:
    return float((_values(signature(a)) == _values(signature(b))).mean())


def test_signature_is_the_same_everywhere():
    # A store made elsewhere must leave out the same files.
    assert signature("naïve_name = f(x, 1)\n" * 4 + " ".join(words(0, 50)))[:24] == "9kdDAF0LCQH6AdQBbHCbAQ3c"


@given(st.integers(0, 10**6), st.floats(0.5, 1))
@settings(max_examples=60, deadline=None)
def test_estimates_the_jaccard_similarity_of_shingles(seed, kept):
    generator = random.Random(seed)
    first = words(seed, 600)
    second = [word if generator.random() < kept else "other" + word for word in first]
    a, b = " ".join(first), "\n\t".join(second)
    exact = len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))
    assert abs(similarity(a, b) - exact) < 5 * (0.25 / HASHES) ** 0.5


def test_only_words_in_their_order_count():
    text = " ".join(words(1, 100))
    assert signature(text) == signature(text.replace(" ", ",\r\n  ")) == signature("(" + text + ")")
    assert similarity(text, " ".join(reversed(text.split()))) < 0.1


def test_a_short_text_has_no_signature():
    assert signature("") is None and signature("#\n" * 1000) is None
    assert signature("a " * 19) is None and signature("a " * 20) is not None


def test_the_first_stays_and_names_the_other():
    near = NearDuplicates(0.85)
    texts = [" ".join(words(seed, 400)) for seed in range(30)]
    for text in texts:
        assert near.earlier(signature(text)) is None
        near.add(signature(text))
    for i, text in enumerate(texts):
        assert near.earlier(signature(text + " and a little more of it")) == i
        half = " ".join(text.split()[:200] + words(1000 + i, 200))
        assert near.earlier(signature(half)) is None


def test_finds_nearly_all_pairs_at_the_threshold():
    generator = random.Random(5)
    found = close = 0
    for seed in range(150):
        first = words(seed, 500)
        second = [word if generator.random() < 0.985 else "x" + word for word in first]
        a, b = " ".join(first), " ".join(second)
        if similarity(a, b) >= 0.85:
            close += 1
            near = NearDuplicates(0.85)
            near.add(signature(a))
            found += near.earlier(signature(b)) == 0
    assert close > 60 and found >= 0.97 * close


def test_linear_in_texts_and_length():
    sign = signature(" ".join(words(3, 100)))
    near = NearDuplicates(0.85)
    start = time.process_time()
    for _ in range(3000):  # all in the same buckets
        near.earlier(sign)
        near.add(sign)
    assert time.process_time() - start < 3
    text = " ".join(words(4, 100_000))
    start = time.process_time()
    signature(text)
    one = time.process_time() - start
    signature(text * 8)
    assert time.process_time() - start < 40 * one + 1


def test_a_threshold_out_of_range():
    for wrong in (0, 0.49, 1.01):
        with pytest.raises(ValueError, match="between 0.5 and 1"):
            NearDuplicates(wrong)


def test_a_word_hashes_alike_wherever_it_stands():
    text = " ".join(words(6, 50))
    far = "z " * 100_000 + text + " " + "q" * 100_000 + " " + text
    hashes = [_word_hashes(np.frombuffer(part.encode(), np.uint8)).tolist() for part in (text, far)]
    assert hashes[1][100_000:100_050] == hashes[1][100_051:] == hashes[0]
    assert len(set(hashes[0])) == len(set(text.split()))
