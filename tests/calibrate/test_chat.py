"""Chats and pictures as calibration data: through the checkpoint's own template and processor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import modelopt_lite
from modelopt_lite import perplexity, quantize_and_export
from modelopt_lite.build import quiet_transformers
from modelopt_lite.calibrate.data import CalibrationData, load_calibration_data, load_tokenizer
from modelopt_lite.errors import CalibrationError

TINY = Path(modelopt_lite.__file__).parent / "data" / "tiny_qwen3_moe"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOOLS = "{{ tools[0].name if tools else 'none' }}:" + TEMPLATE
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}"
    "{% if c.type == 'image' %}<boi>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"
)
IMAGE_TOKENS = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"}


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def load(data: Path, source: Path, **options: Any) -> CalibrationData:
    options = {"size": 8, "seq_len": 64, "batch_size": 4, "vocab_size": None, **options}
    return load_calibration_data(data, source, **options)


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.fixture
def chatting(tmp_path: Path, with_tokenizer: Callable[[Path], Path]) -> Callable[[str], Path]:
    """Return a function (chat template) -> a folder with a tokenizer that has it."""

    def make(template: str) -> Path:
        folder = tmp_path / "chatting"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
        (folder / "chat_template.jinja").write_text(template)
        return with_tokenizer(folder)

    return make


# --- chats of text


def decoded(data: CalibrationData, source: Path) -> list[str]:
    tokenizer = load_tokenizer(source, False)
    return [tokenizer.decode(row) for batch in data.batches for row in batch]


def test_a_chat_is_what_the_template_makes_of_it(
    chatting: Callable[[str], Path], tmp_path: Path
) -> None:
    source = chatting(TEMPLATE)
    turns = [said("be brief", "system"), said("hi"), said("hello", "assistant")]
    data = load(lines(tmp_path / "a.jsonl", {"messages": turns, "id": 7}), source)
    assert decoded(data, source) == ["<system>be brief<user>hi<assistant>hello"]
    [cut] = load(tmp_path / "a.jsonl", source, seq_len=9).batches
    assert torch.equal(cut, data.batches[0][:, :9])


def test_contents_in_parts_are_joined(chatting: Callable[[str], Path], tmp_path: Path) -> None:
    source = chatting(TEMPLATE)
    parts = [{"type": "text", "text": "one "}, "two"]
    data = load(lines(tmp_path / "a.jsonl", {"messages": [said(parts)]}), source)
    assert decoded(data, source) == ["<user>one two"]


def test_tools_reach_the_template(chatting: Callable[[str], Path], tmp_path: Path) -> None:
    source = chatting(TOOLS)
    plain = {"messages": [said("hi")]}
    data = load(lines(tmp_path / "a.jsonl", plain, {**plain, "tools": [{"name": "add"}]}), source)
    assert sorted(decoded(data, source)) == ["add:<user>hi", "none:<user>hi"]


def test_no_template_is_an_error(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"messages": [said("hi")]})
    with pytest.raises(CalibrationError, match=r"has no chat template; add .*chat_template\.jinja"):
        load(file, TINY)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": ["hi"]}, 'a message has a "role" and a "content"'),
        ({"messages": [{"content": "hi"}]}, 'a message has a "role"'),
        ({"messages": [said(3)]}, "a content is a text or a list of parts"),
        ({"messages": [said([{"type": "video", "video": "a.mp4"}])]}, 'of type "text" or "image"'),
        ({"messages": [said([{"type": "image"}])]}, "an image names its file"),
        ({"prompt": "hi"}, 'objects with "text" or "messages"'),
        ({"text": "hi", "image": "https://example.com/a.png"}, "nothing is fetched"),
        ({"text": "hi", "images": ["gone.png"]}, r"gone\.png', which .* names, does not exist"),
        ({"messages": [said("hi", "tool")]}, "the template knows no such role"),
    ],
)
def test_records_that_mean_nothing(
    record: Any, message: str, chatting: Callable[[str], Path], tmp_path: Path
) -> None:
    refuses = (
        "{% if messages[0].role == 'tool' %}"
        "{{ raise_exception('the template knows no such role') }}{% endif %}" + TEMPLATE
    )
    file = lines(tmp_path / "a.jsonl", record)
    with pytest.raises(CalibrationError, match=message):
        load(file, chatting(refuses))


def test_pictures_need_a_processor(chatting: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    file = lines(tmp_path / "a.jsonl", {"text": "hi", "image": "a.png"})
    with pytest.raises(CalibrationError, match=r"no processor .*samples of text"):
        load(file, chatting(TEMPLATE))


# --- pictures


def make_processor(folder: Path) -> Any:
    """Write the files of a Gemma 3 processor, of pictures of 28 x 28, and return it."""
    backend = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")
    from transformers import AutoTokenizer, Gemma3Processor

    tokenizer = AutoTokenizer.from_pretrained(TINY, extra_special_tokens=IMAGE_TOKENS)
    pixels = backend.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    processor = Gemma3Processor(pixels, tokenizer, image_seq_length=4, chat_template=PARTS)
    processor.save_pretrained(folder)
    return processor


@pytest.fixture
def seeing(tmp_path: Path) -> tuple[Path, Any]:
    """A tiny Gemma 3 with a tower for pictures, and its processor; two pictures lie beside it."""
    image = pytest.importorskip("PIL.Image")
    import transformers

    folder = tmp_path / "seeing"
    processor = make_processor(folder)
    text = {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "pad_token_id": 257,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=processor.image_token_id,
        image_token_id=processor.image_token_id,
        boi_token_index=processor.tokenizer.convert_tokens_to_ids("<boi>"),
        eoi_token_index=processor.tokenizer.convert_tokens_to_ids("<eoi>"),
    )
    torch.manual_seed(0)
    with quiet_transformers():
        model = transformers.AutoModelForImageTextToText.from_config(config).to(torch.bfloat16)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 0.2)
        model.save_pretrained(folder)
    (folder / "pictures").mkdir()
    generator = torch.Generator().manual_seed(0)
    for name, size in (("a", (40, 30, 3)), ("b", (28, 28, 3))):
        pixels = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        image.fromarray(pixels.numpy()).save(folder / "pictures" / f"{name}.png")
    return folder, processor


def pictured(folder: Path, *files: str) -> Path:
    """Write a file of samples beside the pictures: a chat with each, and one of text."""
    chats = [
        {"messages": [said([{"type": "image", "image": f}, {"type": "text", "text": "what?"}])]}
        for f in files
    ]
    return lines(folder / "pictures" / "samples.jsonl", *chats, {"text": "no picture"})


def test_samples_with_pictures_are_the_processors(seeing: tuple[Path, Any]) -> None:
    source, processor = seeing
    data = load(pictured(source, "a.png", "b.png"), source, seq_len=5)
    assert data.samples == 3
    assert data.batches[0].shape == (1, 5)  # the text, cut; pictures come behind, whole
    for number, name in ((1, "a"), (2, "b")):
        part = {"type": "image", "path": str(source / "pictures" / f"{name}.png")}
        wanted = processor.apply_chat_template(
            [said([part, {"type": "text", "text": "what?"}])],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        assert torch.equal(data.batches[number], wanted["input_ids"])
        assert (data.batches[number] == processor.image_token_id).sum() == 4
        assert torch.equal(data.others[number]["pixel_values"], wanted["pixel_values"])
    [_, first, second] = data.inputs(torch.device("cpu"), torch.bfloat16)
    assert first["pixel_values"].dtype == torch.bfloat16
    assert first["token_type_ids"].dtype == torch.int64
    assert first["pixel_values"].shape == second["pixel_values"].shape


def test_a_text_with_pictures_beside_it(seeing: tuple[Path, Any]) -> None:
    source, _ = seeing
    chat = load(pictured(source, "a.png"), source)
    file = lines(source / "pictures" / "b.jsonl", {"text": "what?", "image": "a.png"})
    beside = load(file, source)
    assert torch.equal(beside.batches[0], chat.batches[1])
    two = lines(source / "pictures" / "b.jsonl", {"text": "what?", "images": ["a.png", "b.png"]})
    assert len(load(two, source).others[0]["pixel_values"]) == 2


def test_other_pixels_are_other_data(seeing: tuple[Path, Any]) -> None:
    source, _ = seeing
    one = load(pictured(source, "a.png"), source)
    other = load(pictured(source, "b.png"), source)
    assert all(map(torch.equal, one.batches, other.batches))
    assert one.fingerprint() != other.fingerprint()
    assert one.fingerprint() == load(pictured(source, "a.png"), source).fingerprint()


def test_scales_are_those_of_what_the_model_sees(seeing: tuple[Path, Any], tmp_path: Path) -> None:
    """Against transformers' own model on the processor's inputs, and unlike text alone."""
    import transformers

    source, _ = seeing
    file = pictured(source, "a.png", "b.png")
    model = transformers.AutoModelForImageTextToText.from_pretrained(source, dtype=torch.bfloat16)
    model.eval()
    largest: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def see(module: Any, inputs: Any) -> None:
            largest[name] = max(largest.get(name, 0.0), float(inputs[0].abs().max()))

        return see

    for name, module in model.named_modules():
        if "language_model" in name and isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(watch(name))
    with torch.no_grad():
        for inputs in load(file, source).inputs(torch.device("cpu"), torch.bfloat16):
            model(**inputs, use_cache=False)

    texts = lines(source / "pictures" / "texts.jsonl", {"text": "no picture"})
    scales = {}
    for kind, data in (("pictures", file), ("texts", texts)):
        out = tmp_path / kind
        quantize_and_export(
            source, export_dir=out, recipe="fp8", calib_data=data, calib_seq_len=64, progress=False
        )
        scales[kind] = {
            name.removesuffix(".input_scale").rpartition("layers.")[2]: float(value)
            for name, value in load_file(out / "model.safetensors").items()
            if name.endswith("down_proj.input_scale")
        }
    wanted = {
        name.rpartition("layers.")[2]: amax / 448
        for name, amax in largest.items()
        if name.endswith("down_proj")
    }
    assert scales["pictures"] == pytest.approx(wanted)
    assert len(wanted) == 2
    assert scales["texts"] != scales["pictures"]


def test_a_search_and_an_evaluation_take_texts_alone(
    seeing: tuple[Path, Any], tmp_path: Path
) -> None:
    source, _ = seeing
    file = pictured(source, "a.png")
    with pytest.raises(CalibrationError, match="only text is predicted"):
        perplexity(source, text=file)
    recipe = tmp_path / "auto.yaml"
    recipe.write_text("auto_quantize:\n  formats: [fp8, none]\n  effective_bits: 12\n")
    with pytest.raises(CalibrationError, match="scores formats on text"):
        quantize_and_export(
            source, export_dir=tmp_path / "o", recipe=recipe, calib_data=file, progress=False
        )
