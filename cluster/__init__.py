"""How many ranks on many machines act as one: Ray Train starts them, Ray Data feeds them.

`launch` is a training run, `feed` its windows, `process` documents of any length over actors that hold a model.

Imports ray and ``workers``; knows nothing of MLflow, the command line or where windows come from.
"""
