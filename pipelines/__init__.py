"""What a person runs: the command line, configuration, corpora, the two jobs, plans and reports.

`cli` assembles `commands`; `config` is the one tree of settings and `presets` its published values; `train` is what
`ringspan train` does. `corpus` makes token stores and windows; `code_completion` and `literature_analysis` are the jobs;
`models` brings weights in and out; `evaluation` scores; `plan` foresees a run; `tracking` and `report` put it on record;
`bench` measures this machine.
"""
