"""Code completion over a repository.

For a corpus: `links` (imports and includes) → `order` (of the files in their repository), `fim` (fill-in-the-middle). At a
cursor: `definitions` and `links` → `select` (what of the repository is worth its tokens) → `prompt` → `complete`.
"""
