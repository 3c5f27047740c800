"""Pairs of an image and its caption: what SigLIP's two towers take, as transformers gives it."""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from skimage import data
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.fixtures.memory import ELSEWHERE, Recipe, dataset, run_ranks, take, write_images
from tests.fixtures.tokenizers import byte_level_bpe
from zephon_mm.batch import Batch
from zephon_mm.errors import ConfigError
from zephon_mm.io import Dataset
from zephon_mm.pipeline import Pipeline
from zephon_mm.processors import NaFlexProcessor, SigLIPProcessor, TileProcessor
from zephon_mm.recipe import load_recipe
from zephon_mm.records import Image, Text, Video
from zephon_mm.work import StaticMixtureWorkSource

pytestmark = pytest.mark.usefixtures("warm_workers")
CAPTIONS = [
    "A small cat",
    "Coffee, in a CUP; ÀÉ!",
    "an astronaut in front of a flag and a model of a rocket " * 40,
    "<eos> spelt in a text",
    "",
]
SPELLS = 3
PICTURES = [data.chelsea, data.coffee, data.astronaut, data.rocket, data.cat]
MARKS = r"[!-/:-@\[-`{-~]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write photographs with captions as a WebDataset shard."""
    folder = tmp_path_factory.mktemp("captions")
    with tarfile.open(folder / "0.tar", "w") as tar:
        for number, (make, caption) in enumerate(zip(PICTURES, CAPTIONS, strict=True)):
            buffer = io.BytesIO()
            PIL.Image.fromarray(make()).resize((150 - number, 100 + number)).save(buffer, "PNG")
            for suffix, content in (("png", buffer.getvalue()), ("txt", caption.encode())):
                member = tarfile.TarInfo(f"{number}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return folder


def siglip2_tokenizer() -> Any:
    """Like SigLIP 2's: Gemma's kind with the end token behind, made of few words."""
    model = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    model.normalizer = normalizers.Replace(" ", "\u2581")
    model.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False)
    model.train_from_iterator(["a small cat in a cup", "a flag and a rocket"], trainer)
    parts = json.loads(model.to_str())["model"]
    return transformers.Siglip2Tokenizer(
        vocab=parts["vocab"],
        merges=[tuple(pair) for pair in parts["merges"]],
        add_bos_token=False,
        add_eos_token=True,
        padding_side="right",
    )


def siglip_tokenizer() -> Any:
    """Like SigLIP's: pieces of text without punctuation, padded with the end token."""
    model = Tokenizer(models.Unigram())
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    plain = [normalizers.Lowercase(), normalizers.Replace(Regex(MARKS), ""), spaces]
    model.normalizer = normalizers.Sequence([*plain, normalizers.Strip()])
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>"
    )
    model.train_from_iterator(CAPTIONS[:3], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.eos_token_id)]
    )
    return tokenizer


def pairs(folder: Path, tokenizer: Any, processor: Any, **settings: Any) -> Pipeline:
    source = StaticMixtureWorkSource(
        [Dataset.from_path("c", folder)], {"c": 1.0}, seed=0, stop_after_passes=1
    )
    return (
        Pipeline(source)
        .options(canonical_replicas=1, runner="inline", max_error_rate=1.0)
        .pair(tokenizer=tokenizer, image_processor=processor, **settings)
        .batch(microbatch_size=4)
    )


def rows_of(batch: Batch) -> Iterator[tuple[int, int]]:
    """Yield each row with the number of its sample."""
    for row, (key,) in enumerate(batch.keys):
        yield row, int(key.rpartition("/")[2])


@pytest.mark.parametrize("make", [siglip2_tokenizer, siglip_tokenizer])
def test_rows_are_those_of_transformers(make: Any, folder: Path) -> None:
    tokenizer = make()
    with pairs(folder, tokenizer, SigLIPProcessor(size=32, patch_size=16)) as pipeline:
        (batch,) = take(pipeline, 9)
        counts = pipeline.metrics()["skipped"]
    assert batch.input_ids.shape == (4, 64)
    for row, number in rows_of(batch):
        expected = tokenizer(
            CAPTIONS[number], padding="max_length", truncation=True, max_length=64
        )["input_ids"]
        if number != SPELLS:
            assert batch.input_ids[row].tolist() == expected
        elif tokenizer.pad_token == "<pad>":  # text that spells a control token stays text
            assert batch.input_ids[row].tolist().count(tokenizer.eos_token_id) == 1
            assert expected.count(tokenizer.eos_token_id) == 2
    assert batch.image_index.tolist() == [[row, 0, 0] for row in range(4)]
    assert counts["truncated"] == 1
    assert counts["empty_text"] == 1


@pytest.mark.parametrize("kind", ["siglip", "naflex"])
def test_a_model_takes_a_batch_as_it_takes_what_transformers_made(kind: str, folder: Path) -> None:
    tokenizer = siglip2_tokenizer()
    towers: dict[str, Any] = {
        "text_config": {
            "vocab_size": 400,
            "hidden_size": 32,
            "intermediate_size": 37,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "bos_token_id": None,
            "eos_token_id": None,
            "projection_size": 32,
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 37,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": 16,
        },
    }
    torch.manual_seed(0)
    model: Any
    if kind == "siglip":
        towers["vision_config"]["image_size"] = 32
        model = transformers.SiglipModel(transformers.SiglipConfig(**towers))
        ours: Any = SigLIPProcessor(size=32, patch_size=16, backend="pillow", resample=2)
        theirs: Any = transformers.SiglipImageProcessorPil(
            size={"height": 32, "width": 32}, resample=2, image_mean=[0.5] * 3, image_std=[0.5] * 3
        )
    else:
        towers["vision_config"]["num_patches"] = 64
        model = transformers.Siglip2Model(transformers.Siglip2Config(**towers))
        ours = NaFlexProcessor(max_num_patches=24)
        theirs = transformers.Siglip2ImageProcessor(max_num_patches=24)
    with pairs(folder, tokenizer, ours) as pipeline:
        (batch,) = take(pipeline, 1)
    given = batch.to_training(attention="full")
    assert given.keys() - {"input_ids", "pixel_values"} == (
        set() if kind == "siglip" else {"pixel_attention_mask", "spatial_shapes"}
    )
    numbers = [number for _, number in rows_of(batch)]
    pictures = []
    for number in numbers:
        made = PIL.Image.fromarray(PICTURES[number]())
        pictures.append(made.resize((150 - number, 100 + number)))
    expected = dict(theirs(images=pictures, return_tensors="pt"))
    expected["input_ids"] = torch.tensor(
        tokenizer(
            [CAPTIONS[number] for number in numbers],
            padding="max_length",
            truncation=True,
            max_length=64,
        )["input_ids"]
    )
    same = [row for row, number in enumerate(numbers) if number != SPELLS]
    with torch.no_grad():
        found, wanted = (
            model.eval()(**part).logits_per_text[same][:, same] for part in (given, expected)
        )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_captions_keep_their_case_where_a_model_wants_it(folder: Path) -> None:
    processor = SigLIPProcessor(size=32, patch_size=16)
    settings: dict[str, Any] = {"lowercase": False, "max_length": 4096}
    with pairs(folder, byte_level_bpe(), processor, **settings) as pipeline:
        (batch,) = take(pipeline, 1)
    texts = {
        number: byte_level_bpe().decode(batch.input_ids[row].tolist())
        for row, number in rows_of(batch)
    }
    assert texts[1].startswith(CAPTIONS[1])
    assert pipeline.metrics()["skipped"].get("truncated", 0) == 0


def test_pairs_are_the_same_on_any_topology_and_with_an_index(tmp_path: Path) -> None:
    blobs = write_images(tmp_path)
    rows = [
        (Text(f"a picture {'of a fox ' * (n % 40)}{n}"), Image(blobs[n % 5]))[:: n % 2 or -1]
        for n in range(50)
    ]
    data = dataset("d", rows, cache_dir=tmp_path / "cache")
    recipe = Recipe(datasets=(data,), pair=True, max_length=24, shuffle=4)
    whole = run_ranks(recipe, dp=1, microbatch=2, sequences=32)
    for options in ELSEWHERE:
        assert run_ranks(recipe, sequences=32, **options) == whole
    with recipe.build() as pipeline:
        take(pipeline, 7)
        state = pipeline.checkpoint()
    with recipe.build(state=state) as pipeline:
        rest = take(pipeline, 9)
    assert [batch.row_sha256()[0] for batch in rest] == [whole[n] for n in range(7, 16)]


@pytest.mark.parametrize("shuffle", [None, 4])
def test_text_i_is_that_of_picture_i_also_beside_padding(
    tmp_path: Path, shuffle: int | None
) -> None:
    """Rows that were excluded in the middle leave padding in front of others."""
    blobs = write_images(tmp_path)
    rows = [(Image(blobs[n % 5]), Text(f"number {n}")) for n in range(60)]
    recipe = Recipe(datasets=(dataset("d", rows),), pair=True, lanes=1, shuffle=shuffle)
    with recipe.build(microbatch=4) as pipeline:
        (first,) = take(pipeline, 1)
        state = pipeline.checkpoint()
        (second,) = take(pipeline, 1)
    (gone,) = second.keys[1]
    with recipe.build(microbatch=4) as pipeline:
        (batch,) = take(pipeline.restore(state, exclude_keys=[gone]), 1)
    assert [len(keys) for keys in batch.keys] == [1, 0, 1, 1]
    for size, order in ((None, [0, 2, 3]), (4, [0, 2, 3, 1])):
        given = batch.to_training(attention="full", pad_images_to=size)
        assert torch.equal(given["input_ids"], second.input_ids[order]) is (size is None)
        assert torch.equal(given["input_ids"], batch.input_ids[order])
        assert len(given["pixel_values"]) == len(order)
        wanted = second.to_training(attention="full")["pixel_values"]
        assert torch.equal(given["pixel_values"][:3], wanted[order[:3]])
    whole = first.to_training(attention="full", pad_images_to=4)
    assert torch.equal(whole["input_ids"], first.input_ids)


def test_what_is_no_pair_is_skipped_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (blob, *_) = write_images(tmp_path)
    pair = (Image(blob), Text("a"))
    rows = [pair, (Text("alone"),), (*pair, Text("b")), (Image(blob), Image(blob)), pair, pair]
    rows.append((*pair, Video(blob)))
    recipe = Recipe(
        datasets=(dataset("d", rows),), pair=True, lanes=1, passes=1, max_error_rate=1.0, tail="pad"
    )
    with recipe.build() as pipeline:
        keys = [batch.keys[0] for batch in pipeline]
        assert pipeline.metrics()["skipped"]["no_pair"] == 4
        told = "".join(pipeline.metrics()["defects"])
    assert len([key for key in keys if key]) == 3
    assert "found 1 images, 1 texts, 1 videos, expected one image and one text" in told
    pipeline.explain()
    assert ".pair, images: SigLIPProcessor" in capsys.readouterr().out


def test_what_cannot_be_a_pair_is_told(tmp_path: Path, folder: Path) -> None:
    processor = SigLIPProcessor(size=32, patch_size=16)
    with pytest.raises(ConfigError, match="pair: image_processor takes a processor"):
        pairs(folder, byte_level_bpe(), None)
    with pytest.raises(ConfigError, match="max_length must be at least 2"):
        pairs(folder, byte_level_bpe(), processor, max_length=1)
    tiles = TileProcessor(size=32, max_side=64, patch_size=16, scale_factor=1)
    with pytest.raises(ConfigError, match="takes no tiles"):
        take(pairs(folder, byte_level_bpe(), tiles), 1)
    (blob, *_) = write_images(tmp_path)
    heavy = dataset("d", [(Image(blob, weight=2.0), Text("a"))] * 9)
    weighted = Recipe(datasets=(heavy,), pair=True)
    with weighted.build() as pipeline, pytest.raises(ConfigError, match="has the loss weights"):
        take(pipeline, 1)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats = Dataset.from_rows("d", [{"messages": turns}])
    talk = Pipeline(StaticMixtureWorkSource([chats], {"d": 1.0}, seed=0)).options(runner="inline")
    talk.pair(tokenizer=byte_level_bpe(), image_processor=processor).batch(microbatch_size=1)
    with pytest.raises(ConfigError, match="data are conversations: use"):
        take(talk, 1)
    packed = Recipe(datasets=(dataset("d", [(Text("a"),)] * 99),), max_length=64)
    with (
        packed.build() as pipeline,
        pytest.raises(ConfigError, match="'full' is for rows of one document"),
    ):
        take(pipeline, 1)[0].to_training(attention="full")


def test_a_recipe_may_hold_pairs(tmp_path: Path, folder: Path) -> None:
    byte_level_bpe().save(str(tmp_path / "tokenizer.json"))
    text = f"""
        datasets = [{{name = "c", path = {str(folder)!r}, weight = 1.0}}]
        source = {{seed = 0}}
        image_processor = {{kind = "siglip", size = 32, patch_size = 16}}
        pair = {{tokenizer = "tokenizer.json"}}
        batch = {{microbatch_size = 2}}
        options = {{canonical_replicas = 1, runner = "inline", max_error_rate = 1.0}}
    """
    (tmp_path / "recipe.toml").write_text(text)
    recipe = load_recipe(tmp_path / "recipe.toml")
    with recipe.pipeline() as pipeline:
        (batch,) = take(pipeline, 1)
    assert batch.input_ids.shape == (2, 64)
    assert np.array_equal(batch.image_index[:, 2], [0, 0])
    for section, told in (("pack = {max_length = 64}", "not for"), ("tokenize = {}", "one of")):
        (tmp_path / "recipe.toml").write_text(f"{text}\n{section}")
        with pytest.raises(ConfigError, match=told):
            load_recipe(tmp_path / "recipe.toml")
