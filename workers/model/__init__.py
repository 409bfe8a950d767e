"""The model: a decoder of the Llama family, its positions and its weights."""

from workers.model.config import ModelConfig
from workers.model.decoder import Decoder

__all__ = ["Decoder", "ModelConfig"]
