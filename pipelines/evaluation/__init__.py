"""Scoring a trained model on a store.

`pieces` (documents as overlapping windows) → Ray's actors → `evaluate` (sums) → `text` (table, figure, files).
"""
