"""How many ranks on many machines act as one: Ray Train starts them, Ray Data feeds them.

Imports ray and ``workers``; knows nothing of MLflow, the command line or where windows come from.
"""
