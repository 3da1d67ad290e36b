"""A small model with long-rope, whose short range of positions is 16 tokens."""

from typing import Any

PHI: dict[str, Any] = {
    "model_type": "phi3",
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 3,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0 + each for each in range(16)],
    },
}
