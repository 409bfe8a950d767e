"""The model: a decoder of the Llama family, its positions and its weights."""

from workers.model.config import ModelConfig
from workers.model.decoder import Decoder
from workers.model.huggingface import load_pretrained, save_pretrained

__all__ = ["Decoder", "ModelConfig", "load_pretrained", "save_pretrained"]
