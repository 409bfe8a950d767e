"""Literature analysis over many papers.

In: `find` (files) → `formats` (which reader: `pdf`, `latex`, `jats`, `tei`, `markup`, `sets`) → `paper` (one text with its
structure as places) → `same` (one paper in two forms) → `shelves` (which papers are read together) → `kind` (rows of a token
store). Readers share `tree` (XML), `tex` and `bibliography` (TeX), `prose` and `mend` (plain text), `references`; shelves use
`similarity`. Out: `relevance` (which sections a question is about) → `analyze` (the answer from them).
"""
