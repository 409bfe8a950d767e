"""Cross-fade: how much each window of a long document has to say about each of its tokens.

Where two windows overlap, the later one knows little at first, for its context is short: its weight rises linearly over the
overlap, and that of the one before falls as much. So the weights of a token, over all windows that hold it, sum to 1, and a
weighted sum over windows can be formed window by window, in any order. Imports numpy only.
"""

from __future__ import annotations

import numpy as np


def cross_fade(starts: np.ndarray, stops: np.ndarray, window: int, blind: int = 0) -> np.ndarray:
    """The weights of ``window``'s tokens, float32 [stop − start]. Windows [start, stop) are in order; each reaches beyond the one before.

    blind: the first tokens of a window that the model, whose receptive field is cut off there, would see otherwise in the whole
    document: they weigh nothing where the overlap is long enough for that. Then the sum over windows is what the whole would give.
    """
    places = np.arange(starts[window], stops[window])
    weights = _rise(starts, stops, window, places, blind)
    for later in range(window + 1, len(starts)):
        if starts[later] >= stops[window]:
            break
        weights *= 1 - _rise(starts, stops, later, places, blind)
    return weights.astype(np.float32)


def _rise(starts: np.ndarray, stops: np.ndarray, window: int, places: np.ndarray, blind: int) -> np.ndarray:
    """0 before the window, 1 from the end of its overlap with the one before on, between them a line."""
    if window == 0:
        return np.ones(len(places))
    overlap = int(stops[window - 1] - starts[window])
    silent = blind if blind <= overlap else 0
    return np.clip((places - starts[window] - silent + 1) / (overlap - silent + 1), 0, 1)
