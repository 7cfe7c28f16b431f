"""RoPE frequencies that depend on the length of a request, fixed for the whole request.

The library changes them during generation; an engine that caches rotated keys cannot. So the reserved length of a
request, prompt plus new tokens, decides once.
"""

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def reserve(model: torch.nn.Module, reserved: int) -> str:
    """Fixes the frequencies for a request of `reserved` tokens. Returns on which side of the trained length it is."""
    rotary, settings = model.model.rotary_emb, model.config.rope_parameters
    frequencies, scaling = ROPE_INIT_FUNCTIONS[settings["rope_type"]](model.config, "cpu", seq_len=reserved)
    rotary.rope_type = "default"  # prevents the module from changing them
    rotary.inv_freq.copy_(frequencies)
    rotary.attention_scaling = scaling
    trained = settings.get("original_max_position_embeddings") or model.config.max_position_embeddings
    return "long" if reserved > trained else "short"


def reserve_scaled(model: torch.nn.Module, reserved: int) -> str:
    """Fixes frequencies and scales for a request of `reserved` tokens, as the family's own code chooses them: the
    library always takes the short factors."""
    rotary, settings = model.model.rotary_emb, model.config.rope_parameters
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](model.config, "cpu", seq_len=reserved)
    side = "long" if reserved > settings["original_max_position_embeddings"] else "short"
    scale = settings[f"{side}_mscale"]

    def forward(x, position_ids):
        angles = (position_ids[..., None].float() * frequencies).repeat(1, 1, 2)
        return angles.cos() * scale, angles.sin() * scale

    rotary.forward = forward
    return side


def inverse_frequencies(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
