import io
import itertools
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchvision.transforms import functional as tv
from transformers import (
    CLIPVisionConfig,
    Idefics3ImageProcessor,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextImageProcessor,
    LlavaNextImageProcessorPil,
    LlavaNextModel,
    LlavaNextProcessor,
    PreTrainedTokenizerFast,
    SmolVLMImageProcessor,
    SmolVLMImageProcessorPil,
)
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.fixtures.processing import measured, written
from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.processors import AnyResProcessor, TileProcessor
from zephon_mm.processors.image import decode
from zephon_mm.protocols import ImageProcessor

PHOTOGRAPHS = Path(skimage.__file__).parent / "data"
BACKENDS = ("torchvision", "pillow")
IDEFICS3 = {"torchvision": Idefics3ImageProcessor, "pillow": Idefics3ImageProcessorPil}
SMOLVLM = {"torchvision": SmolVLMImageProcessor, "pillow": SmolVLMImageProcessorPil}
LLAVA = {"torchvision": LlavaNextImageProcessor, "pillow": LlavaNextImageProcessorPil}
PINPOINTS = ((28, 56), (56, 28), (56, 56), (84, 28), (28, 84))
# Sides of any size, and those that lie around multiples of a tile.
SIDES = st.one_of(st.integers(1, 300), st.sampled_from([27, 28, 29, 55, 56, 57, 111, 112, 113]))
SHAPES = st.tuples(SIDES, SIDES)
RAW = {"do_rescale": False, "do_normalize": False}


def encode(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def noise(shape):
    return np.random.default_rng(shape).integers(0, 256, (*shape, 3), dtype=np.uint8)


def header(shape):
    """Return the beginning of a picture without its pixels."""
    return b"P6\n%d %d\n255\n" % (shape[1], shape[0])


def tiles(**changes):
    """Return a processor whose tiles are small enough for many examples."""
    settings = {"size": 28, "max_side": 112, "patch_size": 7, "scale_factor": 2}
    return TileProcessor(**{**settings, **changes})


def anyres(**changes):
    return AnyResProcessor(**{"size": 28, "patch_size": 7, "grid_pinpoints": PINPOINTS, **changes})


def idefics3(processor, kinds=IDEFICS3):
    return kinds[processor.backend](
        size={"longest_edge": processor.max_side},
        max_image_size={"longest_edge": processor.size},
        resample=processor.resample,
        return_row_col_info=True,
    )


def llava(processor):
    side = processor.size
    return LLAVA[processor.backend](
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_grid_pinpoints=[list(size) for size in processor.grid_pinpoints],
        resample=processor.resample,
    )


def theirs(reference, pixels, **options):
    return reference(
        [[pixels]] if "Llava" not in type(reference).__name__ else pixels,
        return_tensors="pt",
        input_data_format="channels_last",
        **options,
    )


def assert_equals_transformers(processor, reference, encoded):
    ours, pixels = written(processor, encoded), decode(encoded)
    assert np.array_equal(ours, theirs(reference, pixels, **RAW)["pixel_values"][0].numpy())
    normal = processor.normalize(torch.from_numpy(ours), torch.float32)
    assert torch.equal(normal, theirs(reference, pixels)["pixel_values"][0])


# Law 1: bit for bit transformers.


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, backend=st.sampled_from(BACKENDS), resample=st.sampled_from([1, 2, 3]))
@example((1, 300), "torchvision", 1)
@example((300, 1), "pillow", 1)
@example((28, 28), "torchvision", 1)
@example((113, 112), "pillow", 3)
def test_any_picture_in_tiles_equals_idefics3(shape, backend, resample):
    processor = tiles(backend=backend, resample=resample)
    assert_equals_transformers(processor, idefics3(processor), encode(noise(shape)))


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, backend=st.sampled_from(BACKENDS), resample=st.sampled_from([1, 2, 3]))
@example((1, 300), "torchvision", 3)
@example((300, 1), "pillow", 3)
def test_any_picture_in_anyres_equals_llava_next(shape, backend, resample):
    processor, encoded = anyres(backend=backend, resample=resample), encode(noise(shape))
    assert_equals_transformers(processor, llava(processor), encoded)
    sizes = theirs(llava(processor), decode(encoded))["image_sizes"]
    assert sizes.tolist() == [list(measured(processor, encoded).grid)] == [list(shape)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["rocket.jpg", "page.png"])
def test_presets_on_photographs_equal_transformers(backend, name):
    encoded = (PHOTOGRAPHS / name).read_bytes()
    for preset in ("idefics3", "smolvlm-2.2b", "smolvlm-256m"):
        processor = TileProcessor.preset(preset, backend=backend)
        assert_equals_transformers(processor, idefics3(processor, SMOLVLM), encoded)
    assert_equals_transformers(
        AnyResProcessor(backend=backend), llava(AnyResProcessor(backend=backend)), encoded
    )


def test_presets_have_the_published_tokens_per_tile():
    encoded = encode(noise((40, 40)))
    names = ("idefics3", "smolvlm-2.2b", "smolvlm-256m", "nanovlm")
    found = [measured(TileProcessor.preset(name), encoded).num_tokens for name in names]
    assert found == [169, 81, 64, 64]


def nanovlm(processor, pixels):
    """Return nanoVLM's tiles and, where there are several, its global view, in [0, 1]."""
    height, width = pixels.shape[:2]
    size, long = processor.size, max(height, width)
    enlarged = processor.fit == "nanovlm-max"
    side = (
        processor.max_side if enlarged else min(processor.max_side, math.ceil(long / size) * size)
    )
    other = max(math.ceil(min(height, width) * (side / long) / size) * size, size)
    target = [other, side] if width >= height else [side, other]
    bicubic = tv.InterpolationMode.BICUBIC
    whole = tv.to_tensor(tv.resize(Image.fromarray(pixels), target, bicubic))
    cut = [
        whole[:, top : top + size, left : left + size]
        for top in range(0, target[0], size)
        for left in range(0, target[1], size)
    ]
    return torch.stack(cut), tv.resize(whole, [size, size]) if len(cut) > 1 else None


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, fit=st.sampled_from(["nanovlm", "nanovlm-max"]))
@example((28, 28), "nanovlm")
@example((1, 300), "nanovlm-max")
def test_any_picture_equals_nanovlm_but_for_the_rounded_global_view(shape, fit):
    small = {"size": 28, "max_side": 112, "patch_size": 7, "scale_factor": 2, "fit": fit}
    preset = TileProcessor.preset("nanovlm")
    processor = TileProcessor(**{**vars(preset), **small})
    pixels = noise(shape)
    found = torch.from_numpy(written(processor, encode(pixels)))
    normal = processor.normalize(found, torch.float32)
    cut, view = nanovlm(processor, pixels)
    if view is None:
        assert torch.allclose(normal, cut, rtol=0, atol=1e-7)
    else:
        assert torch.allclose(normal[1:], cut, rtol=0, atol=1e-7)
        assert (normal[0] - view).abs().max() <= 1.01 / 255


# Law 2: texts and token counts.


def byte_tokenizer():
    """Return a tokenizer whose decoded text is exactly what it was given."""
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@settings(max_examples=30, deadline=None)
@given(shape=SHAPES)
@example((28, 28))
@example((300, 20))
def test_texts_equal_those_of_idefics3_and_smolvlm(shape):
    processor, pixels = tiles(), noise(shape)
    found = measured(processor, encode(pixels))
    ours = "".join(text + "<image>" * found.num_tokens for text in found.parts)
    closing = found.closing
    reference = idefics3(processor)
    idefics = Idefics3Processor(reference, byte_tokenizer(), image_seq_len=found.num_tokens)
    batch = idefics(text=["<image>"], images=[[Image.fromarray(pixels)]])
    assert ours + closing == idefics.tokenizer.decode(batch["input_ids"][0])
    grid = theirs(reference, pixels)
    rows, cols = grid["rows"][0][0], grid["cols"][0][0]
    names = (closing, "<image>", "<global-img>")
    assert ours + closing == get_image_prompt_string(rows, cols, found.num_tokens, *names)


def test_token_ids_equal_those_of_smolvlm():
    names = [f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)]
    vocabulary = byte_tokenizer()
    vocabulary.add_special_tokens({"additional_special_tokens": [*names, "<global-img>"]})
    processor, pixels = tiles(), noise((60, 90))
    found = measured(processor, encode(pixels))
    theirs = Idefics3Processor(idefics3(processor), vocabulary, image_seq_len=found.num_tokens)
    ids = theirs(text=["<image>"], images=[[Image.fromarray(pixels)]])["input_ids"][0]
    ours = TextTokenizer.load(vocabulary, eos=False)
    written = [ours.control(text) + [ours.image_id] * found.num_tokens for text in found.parts]
    assert [*itertools.chain(*written), ids[-1]] == ids
    assert ids[-1] == ours.control("<fake_token_around_image>")[0]


def test_texts_equal_nanovlm():
    processor = TileProcessor.preset("nanovlm")
    assert measured(processor, encode(noise((20, 40)))).parts == (
        "<|global_image|>",
        *(f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2, 3, 4)),
    )


def test_a_picture_that_fits_one_tile_is_the_global_view_alone():
    processor, pixels = tiles(max_side=28), noise((28, 28))
    assert measured(processor, encode(pixels)).parts == (processor.global_text,)
    assert np.array_equal(written(processor, encode(pixels))[0], pixels.transpose(2, 0, 1))


def test_the_global_view_may_come_first():
    encoded = encode(noise((50, 70)))
    last, first = tiles(), tiles(global_first=True)
    assert np.array_equal(np.roll(written(last, encoded), 1, axis=0), written(first, encoded))
    strip = [[text.strip() for text in measured(one, encoded).parts] for one in (last, first)]
    assert strip[0][-1:] + strip[0][:-1] == strip[1]


TINY_LLAVA = LlavaNextModel(
    LlavaNextConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=7
        ),
        text_config=LlamaConfig(
            vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1
        ),
        image_grid_pinpoints=[list(size) for size in PINPOINTS],
    )
)


@settings(max_examples=300, deadline=None)
@given(shape=st.tuples(st.integers(1, 5000), st.integers(1, 5000)))
@example((1, 5000))
@example((5000, 1))
def test_anyres_tokens_are_those_that_llava_next_packs(shape):
    processor = anyres()
    found = measured(processor, header(shape))
    theirs = LlavaNextProcessor(
        llava(processor), byte_tokenizer(), 7, "default", num_additional_image_tokens=1
    )
    assert theirs._get_num_multimodal_tokens([shape]).num_image_tokens == [found.num_tokens]
    features = torch.zeros(found.shape[0], 16, 8)
    _, lengths = TINY_LLAVA.pack_image_features(
        [features], torch.tensor([found.grid]), "default", TINY_LLAVA.image_newline
    )
    assert lengths.tolist() == [found.num_tokens]


# Law 3: what is measured is written.

PROCESSORS = [
    pytest.param(tiles(), id="tiles"),
    pytest.param(tiles(fit="nanovlm", global_first=True), id="global-first"),
    pytest.param(anyres(), id="anyres"),
]


@pytest.mark.parametrize("processor", PROCESSORS)
@settings(max_examples=40, deadline=None)
@given(shape=SHAPES)
def test_what_is_measured_is_filled(processor, shape):
    encoded = encode(np.full((*shape, 3), 200, np.uint8))
    found, out = measured(processor, encoded), written(processor, encoded)
    assert not (out == 77).any()
    assert out.shape[1:] == processor.unit_shape
    if found.parts:
        assert (out == 200).all()
        assert found.shape == processor.unit_shape
        assert found.grid == ()


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_turned_picture_is_that_of_its_upright_pixels(processor):
    pixels, buffer = noise((40, 90)), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(buffer, "PNG", exif=exif)
    upright = encode(np.rot90(pixels, -1))
    assert measured(processor, buffer.getvalue()) == measured(processor, upright)
    assert np.array_equal(written(processor, buffer.getvalue()), written(processor, upright))


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_damaged_picture_is_refused_and_nothing_is_written(processor):
    encoded = encode(noise((60, 50)))[:-3000]
    found = measured(processor, encoded)
    out = np.full((len(found.parts), *found.shape) if found.parts else found.shape, 77, np.uint8)
    with pytest.raises(SampleError, match="broken_image"):
        processor.write(encoded, out)
    assert (out == 77).all()


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_processor_is_plain_data(processor):
    assert isinstance(processor, ImageProcessor)
    assert pickle.loads(pickle.dumps(processor)) == processor
    assert (processor.pad_to, processor.unit_shape) == (None, (3, 28, 28))
    assert processor.grid_key == ("image_sizes" if isinstance(processor, AnyResProcessor) else None)
    found = json.loads(json.dumps(processor.fingerprint()))
    changed = json.loads(json.dumps(type(processor)(mean=0.25).fingerprint()))
    assert found != changed


@pytest.mark.parametrize(
    ("make", "changes", "named"),
    [
        (tiles, {"max_side": 100}, "max_side=100"),
        (tiles, {"max_side": 28 * 200}, "max_side=5600"),
        (tiles, {"size": 27, "max_side": 27}, "max_side=27"),
        (tiles, {"scale_factor": 3}, "scale_factor=3"),
        (tiles, {"fit": "square"}, "fit='square'"),
        (tiles, {"patch_size": 29}, "patch_size=29"),
        (tiles, {"std": 0.0}, "std=0.0"),
        (tiles, {"backend": "opencv"}, "backend='opencv'"),
        (anyres, {"std": (0.2, 0.0, 0.2)}, "std=(0.2, 0.0, 0.2)"),
        (anyres, {"grid_pinpoints": ()}, "grid_pinpoints=()"),
        (anyres, {"grid_pinpoints": ((28, 50),)}, "grid_pinpoints=((28, 50),)"),
        (anyres, {"grid_pinpoints": ((0, 28),)}, "grid_pinpoints=((0, 28),)"),
        (anyres, {"resample": 0}, "resample=0"),
    ],
)
def test_impossible_settings_are_refused_by_name(make, changes, named):
    with pytest.raises(ConfigError) as caught:
        make(**changes)
    assert named in str(caught.value)


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"idefics3, smolvlm-2\.2b"):
        TileProcessor.preset("idefics4")
