"""The model that is trained: a frozen SigLIP encoder, an MLP projector, Qwen3.

Laws (tests/benchmarks/test_train.py):
    1. The encoder's weights never change.
    2. Every rank runs every module in each microbatch, with or without an image in it: sharded
       modules wait for one another.

Imports: transformers, nothing from the package. Used by: benchmarks.train.run, .reproduce.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM, SiglipVisionConfig, SiglipVisionModel

SHARDED = ("SiglipEncoderLayer", "Qwen3DecoderLayer")
IMPLEMENTATION = {"sdpa": "sdpa", "varlen": "flash_attention_2", "block": "flex_attention"}


def _sizes(hidden: int, mlp: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_attention_heads": heads}
    return {**sizes, "num_hidden_layers": layers, **more}


# Settings of `SiglipVisionConfig` and `Qwen3Config`, by the name of the recipe that feeds them.
SHAPES = {
    "tiny_vlm": (
        _sizes(64, 256, 2, 4, image_size=64, patch_size=16),
        _sizes(128, 384, 3, 4, num_key_value_heads=2, head_dim=32, vocab_size=512),
    ),
    "siglip2_so400m_qwen3_1.7b": (
        _sizes(1152, 4304, 27, 16, image_size=384, patch_size=16),
        _sizes(2048, 6144, 28, 16, num_key_value_heads=8, head_dim=128, vocab_size=151_936),
    ),
}
ROPE = {"rope_type": "default", "rope_theta": 1e6}


def _loaded(kind: Any, folder: str, **options: Any) -> Any:
    """Return a model with the weights in a folder, on the CPU.

    Raises:
        ValueError: There is no such folder, or it lacks weights, which would be random ones.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: there is no such folder; give one with a model's weights")
    with torch.device("cpu"):  # on another transformers would ask for accelerate
        model, found = kind.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **options
        )
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"{folder} lacks {len(missing)} weights of a {kind.__name__}, such as {missing[0]}: "
            "it is of another model; give one of this kind"
        )
    return model


def make_vision(shape: str, folder: str | None = None) -> SiglipVisionModel:
    """Return an encoder with the weights in a folder, on the CPU, or with random ones.

    Raises:
        ValueError: As `_loaded`.
    """
    if folder:
        encoder: SiglipVisionModel = _loaded(SiglipVisionModel, folder, vision_use_head=False)
        return encoder
    return SiglipVisionModel(SiglipVisionConfig(**SHAPES[shape][0], vision_use_head=False))


def make_language(
    shape: str, vocab_size: int, attention: str, folder: str | None = None
) -> Qwen3ForCausalLM:
    """Return a language model for `to_training(attention=...)`, with at least so many tokens.

    Raises:
        ValueError: As `_loaded`, or the folder's model has fewer tokens.
    """
    how = IMPLEMENTATION[attention]
    if folder:
        model: Qwen3ForCausalLM = _loaded(Qwen3ForCausalLM, folder, attn_implementation=how)
        if model.config.vocab_size < vocab_size:
            raise ValueError(
                f"{folder} has {model.config.vocab_size} tokens, the recipe's tokenizer "
                f"{vocab_size}: give the recipe the tokenizer of the model"
            )
        return model
    config = Qwen3Config(**SHAPES[shape][1], rope_parameters=ROPE, tie_word_embeddings=True)
    config.vocab_size = max(config.vocab_size, vocab_size)
    config._attn_implementation = how
    return Qwen3ForCausalLM(config)


class VLM(nn.Module):
    """Takes what `batch.to_training(dummy_image=True)` returns; gives the summed loss.

    Args:
        vision: The encoder; it is frozen.
        language: The model that takes its projected patches.
        image_token_id: The placeholder that each patch of an image has in `input_ids`.
    """

    def __init__(
        self, vision: SiglipVisionModel, language: Qwen3ForCausalLM, image_token_id: int
    ) -> None:
        super().__init__()
        self.image_token_id, self._fits = image_token_id, False
        self.vision, self.language = vision.requires_grad_(False).eval(), language
        dim = language.config.hidden_size
        first = nn.Linear(vision.config.hidden_size, dim)
        self.projector = nn.Sequential(first, nn.GELU(approximate="tanh"), nn.Linear(dim, dim))

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        pixel_values: Tensor,
        **attention: Any,
    ) -> Tensor:
        """Return the loss, summed over the batch's labels; a float32 scalar.

        Args:
            input_ids: (B, L) int64.
            labels: (B, L) int64, not shifted; -100 where there is no loss.
            position_ids: (B, L) int64, starting at 0 in every document.
            pixel_values: (N, 3, H, W) float; at least one, which has no placeholders if the batch
                has no image.
            **attention: What keeps documents apart.

        Raises:
            ValueError: The first images have other numbers of patches than of placeholders.
        """
        embeddings = self.language.model.embed_tokens(input_ids)
        places = input_ids == self.image_token_id
        with torch.no_grad():
            patches = self.vision(pixel_values).last_hidden_state
        patches = self.projector(patches).flatten(0, 1).to(embeddings.dtype)
        if not self._fits:  # on CUDA counting waits for the device: only until there is an image
            found = int(places.sum())
            if found not in (0, len(patches)):
                raise ValueError(
                    f"the batch has {found} image placeholders, its images have {len(patches)} "
                    "patches: give the recipe the image and patch size of the model"
                )
            self._fits = found > 0
        # So would masked_scatter's backward. Other tokens read a patch, and do not use it.
        order = (places.flatten().cumsum(0) - 1).clamp_(min=0)
        spread = patches.index_select(0, order).view_as(embeddings)
        embeddings = torch.where(places[..., None], spread, embeddings)
        hidden = self.language.model(
            **{"use_cache": False, **attention}, inputs_embeds=embeddings, position_ids=position_ids
        ).last_hidden_state
        logits = self.language.lm_head(hidden[:, :-1]).flatten(0, 1).float()
        return functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")


def shard(model: VLM, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard a model over the ranks of a mesh (FSDP2), layer by layer, computing in `dtype`."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in model.modules():
        if type(module).__name__ in SHARDED:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
