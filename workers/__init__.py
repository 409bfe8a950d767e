"""What one rank computes: the mesh it sits in, attention, the model, training and inference.

Imports torch, numpy and safetensors; knows nothing of Ray, MLflow or the command line.
"""
