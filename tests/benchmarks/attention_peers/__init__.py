"""Drivers of other libraries' context-parallel attention; see ``bench_attention``. ``rank`` and ``sides`` import nothing of
the project unless the side is ours, so that they also run in the peers' own environment."""
