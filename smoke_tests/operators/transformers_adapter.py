"""The rotary embedding of transformers."""

from __future__ import annotations

import torch


class TransformersRope:
    """The rotary embedding of transformers' Mistral, built for few positions so that its table has to grow."""

    angles = torch.float32

    def __init__(self, head_size: int, base: float) -> None:
        from transformers.models.mistral import modeling_mistral

        self.embedding = modeling_mistral.MistralRotaryEmbedding(head_size, max_position_embeddings=8, base=base)
        self.apply = modeling_mistral.apply_rotary_pos_emb

    def __call__(self, x: torch.Tensor, start: int) -> torch.Tensor:
        positions = torch.arange(start, start + x.shape[-2])[None]
        cosine, sine = self.embedding(x, seq_len=start + x.shape[-2])
        turned: torch.Tensor = self.apply(x, x, cosine, sine, positions)[0]
        return turned
