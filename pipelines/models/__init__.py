"""Trained models as files: `importing` and `exporting` (Hugging Face folders, GGUF through `gguf`), and `source`, what a path to one means."""
