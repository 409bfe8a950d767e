"""Trained models as files.

`importing` and `exporting`: Hugging Face folders, and GGUF through `gguf`. `source`: what a path to something trained means.
"""
