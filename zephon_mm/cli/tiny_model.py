"""A vision-language model small enough to train on a CPU: SigLIP, a projector, Qwen3.

The architecture is that of the large ones (transformers' own classes), so the demo checks what a
trainer relies on: placeholders are replaced in order, packed documents do not see one another.

Law: the loss of packed documents is that of the same documents alone, weighted by their tokens.

Cost: 0.8 million weights at a vocabulary of 512; a step of 4 x 256 tokens with 10 images takes
about 0.1 s on two cores.

Imports: nothing from the package. Used by: cli.demo_training, notebooks.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM, SiglipVisionConfig, SiglipVisionModel

IMAGE_SIZE = 64
PATCH_SIZE = 16
TOKENS_PER_IMAGE = (IMAGE_SIZE // PATCH_SIZE) ** 2


class Output(NamedTuple):
    """`loss` is the mean over `num_valid` tokens; `logits` is (B, L, vocabulary)."""

    loss: Tensor
    num_valid: Tensor
    logits: Tensor


class TinyVLM(nn.Module):
    """Takes what `batch.to_training(attention="sdpa")` returns: `model(**inputs).loss`.

    Args:
        vocab_size: Entries of the tokenizer's vocabulary.
        image_token_id: The placeholder that each patch of an image has in `input_ids`.
        video_token_id: That of a video's frames; None where there are none.
        seed: Equal seeds give equal weights; the global random state is left alone.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        image_token_id: int,
        video_token_id: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.image_token_id = image_token_id
        self.video_token_id = video_token_id
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.vision = SiglipVisionModel(_vision_config())
            self.language = Qwen3ForCausalLM(_language_config(vocab_size))
            vision_dim, dim = self.vision.config.hidden_size, self.language.config.hidden_size
            self.projector = nn.Sequential(
                nn.Linear(vision_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
            )

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
    ) -> Output:
        """Return the loss of one batch.

        Args:
            input_ids: (B, L) int64.
            labels: (B, L) int64, not shifted; -100 where there is no loss.
            position_ids: (B, L) int64, starting at 0 in every document.
            pixel_values: (N, 3, 64, 64) float; None without images.
            attention_mask: (B, 1, L, L) bool, True where a token may attend. None for causal
                attention inside the documents that `position_ids` shows.
            pixel_values_videos: (F, 3, 64, 64) float, the frames of all videos.

        Raises:
            ValueError: The placeholders are not as many as the images have patches.
        """
        embeddings = self._embed(input_ids, pixel_values)
        if pixel_values_videos is not None:
            assert self.video_token_id is not None
            places = input_ids.eq(self.video_token_id)
            embeddings = self._filled(embeddings, places, pixel_values_videos)
        hidden = self.language.model(
            inputs_embeds=embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        ).last_hidden_state
        logits = self.language.lm_head(hidden)
        # The first token of a document follows nothing: its neighbour belongs to another document.
        targets = labels[:, 1:].masked_fill(position_ids[:, 1:] == 0, -100)
        total = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="sum"
        )
        num_valid = (targets != -100).sum()
        return Output(total / num_valid.clamp(min=1), num_valid, logits)

    def _embed(self, input_ids: Tensor, pixel_values: Tensor | None) -> Tensor:
        """Return (B, L, dim) embeddings, those of image placeholders replaced by patches."""
        embeddings: Tensor = self.language.model.embed_tokens(input_ids)
        if pixel_values is None:
            pixel_values = embeddings.new_zeros(0)
        return self._filled(embeddings, input_ids == self.image_token_id, pixel_values)

    def _filled(self, embeddings: Tensor, placeholders: Tensor, pixel_values: Tensor) -> Tensor:
        """Return (B, L, dim) embeddings, those of placeholders replaced by patches in order."""
        found, wanted = int(placeholders.sum()), len(pixel_values) * TOKENS_PER_IMAGE
        if found != wanted:
            raise ValueError(
                f"the batch has {found} image placeholders and its {len(pixel_values)} images have "
                f"{wanted} patches. Use an image processor that gives {TOKENS_PER_IMAGE} tokens an "
                f"image: size={IMAGE_SIZE}, patch_size={PATCH_SIZE}."
            )
        if wanted == 0:
            return embeddings
        patches = self.projector(self.vision(pixel_values).last_hidden_state)
        return embeddings.masked_scatter(placeholders[..., None], patches.to(embeddings.dtype))


def _vision_config() -> SiglipVisionConfig:
    return SiglipVisionConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        vision_use_head=False,
    )


def _language_config(vocab_size: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
