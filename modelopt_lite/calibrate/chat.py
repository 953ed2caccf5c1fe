"""Chats and pictures as calibration data, through the checkpoint's own templates and processor.

A record of a file is a text, an object with "text", or one with the "messages" of a chat, whose
contents are texts or lists of parts: ``{"type": "text", "text": ...}``, and ``{"type": "image",
"image": FILE}``. An object may name pictures beside its text, too: "image" or "images". Files are
local ones, relative to the file that names them; nothing is fetched.

Shape suffixes: T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.errors import CalibrationError

_FILE_KEYS = ("image", "path", "url", "image_url")
_KINDS = {"text": "text", "image": "image", "image_url": "image"}


@dataclass(frozen=True, slots=True)
class Sample:
    """A sequence that the model is run on.

    Attributes:
        ids: int64 [T].
        others: What else the model is given with it, by the names of its arguments, as its
            processor makes it: pixels, how they lie, kinds of tokens.
    """

    ids: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)


def encode_text(tokenizer: Any, text: str, *, special: bool = True) -> Tensor:
    """Return the ids of a text, int64 [T], with the tokens around a text where ``special``."""
    ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


class RecordReader:
    """Makes samples of a file's records.

    Args:
        path: The file, which errors name and pictures lie beside.
        source: The checkpoint.
        tokenizer: Its tokenizer.
        trust_remote_code: Whether its processor may run code of the checkpoint.
    """

    def __init__(self, path: Path, source: Path, tokenizer: Any, trust_remote_code: bool) -> None:
        self._path = path
        self._source = source
        self._tokenizer = tokenizer
        self._trust = trust_remote_code
        self._processor: Any = None

    def sample(self, record: Any, seq_len: int) -> Sample:
        """Return the sample of a record.

        Texts and chats are cut to ``seq_len`` tokens. One with pictures is taken whole: a cut would
        part a picture from the tokens that stand for it.

        Raises:
            CalibrationError: It is none; a picture cannot be read; the checkpoint has no chat
                template, or no processor, and the record needs it.
        """
        if isinstance(record, str):
            return Sample(encode_text(self._tokenizer, record)[:seq_len])
        messages = self._messages(record)
        if messages is None:
            return Sample(encode_text(self._tokenizer, record["text"])[:seq_len])
        tools = record.get("tools")
        if any(part["type"] == "image" for message in messages for part in _parts(message)):
            return self._pictured(messages, tools)
        # Templates of models of text join contents as texts.
        texts = [{**m, "content": _joined(m["content"])} if "content" in m else m for m in messages]
        made = self._filled(self._tokenizer, "tokenizer", texts, tools=tools, tokenize=False)
        return Sample(encode_text(self._tokenizer, made, special=False)[:seq_len])

    def _messages(self, record: Any) -> list[dict[str, Any]] | None:
        """Return a record's chat with its parts checked; None for a text alone."""
        if isinstance(record, dict) and isinstance(record.get("messages"), list):
            return [self._message(message) for message in record["messages"]]
        if isinstance(record, dict) and isinstance(record.get("text"), str):
            pictures = record.get("images", record.get("image"))
            if pictures is None:
                return None
            files = pictures if isinstance(pictures, list) else [pictures]
            parts = [{"type": "image", "image": file} for file in files]
            parts.append({"type": "text", "text": record["text"]})
            return [self._message({"role": "user", "content": parts})]
        raise self._error(record, 'give texts, or objects with "text" or "messages"')

    def _message(self, message: Any) -> dict[str, Any]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise self._error(message, 'a message has a "role" and a "content"')
        content = message.get("content")
        if isinstance(content, str | None):
            return message
        if not isinstance(content, list):
            raise self._error(message, "a content is a text or a list of parts")
        return {**message, "content": [self._part(part) for part in content]}

    def _part(self, part: Any) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        kind = _KINDS.get(str(part.get("type"))) if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if kind == "image":
            return {"type": "image", "path": str(self._picture(part))}
        raise self._error(part, 'parts are of type "text" or "image"')

    def _picture(self, part: Mapping[str, Any]) -> Path:
        """Return the file of a picture."""
        given = next((part[key] for key in _FILE_KEYS if key in part), None)
        given = given.get("url") if isinstance(given, dict) else given
        if not isinstance(given, str):
            raise self._error(part, 'an image names its file: {"type": "image", "image": FILE}')
        if "://" in given and not given.startswith("file://"):
            raise self._error(part, "nothing is fetched; keep the picture in a local file")
        file = self._path.parent / Path(given.removeprefix("file://")).expanduser()
        if not file.is_file():
            raise CalibrationError(
                f"the picture {str(file)!r}, which {self._path} names, does not exist; paths are "
                "relative to the file that names them"
            )
        return file

    def _pictured(self, messages: list[dict[str, Any]], tools: Any) -> Sample:
        if self._processor is None:
            self._processor = load_processor(self._source, self._trust)
        # A processor's template goes through the parts of each content.
        whole = [
            {**m, "content": list(_parts(m))} if m.get("content") is not None else m
            for m in messages
        ]
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        made = self._filled(self._processor, "processor", whole, tools=tools, **options)
        values = dict(made)
        [ids_T] = values.pop("input_ids")
        mask = values.pop("attention_mask", None)
        if mask is not None and not bool(mask.all()):
            raise self._error(messages, "the processor pads it; remove its padding side or size")
        for name, value in values.items():
            if not isinstance(value, Tensor):
                raise self._error(
                    messages, f"the processor makes a {type(value).__name__} of {name}, no tensor"
                )
        return Sample(ids_T.to(torch.int64), values)

    def _filled(self, owner: Any, what: str, messages: Sequence[Any], **options: Any) -> Any:
        """Return what a chat template makes of messages."""
        if not getattr(owner, "chat_template", None):
            raise CalibrationError(
                f"{self._path} holds messages, and the {what} of {self._source} has no chat "
                "template; add the model's own as chat_template.jinja, or give texts"
            )
        try:
            return owner.apply_chat_template(messages, **options)
        except Exception as error:  # a template's own code raises what it likes, and so do images
            raise CalibrationError(
                f"the {what}'s chat template does not take a sample of {self._path} "
                f"({str(messages)[:80]!r}): {error}; give roles and parts that it knows, or texts"
            ) from error

    def _error(self, record: Any, advice: str) -> CalibrationError:
        """Say what a record, or a part of one, is, and what to give."""
        return CalibrationError(f"a sample of {self._path} is {str(record)[:80]!r}; {advice}")


def _parts(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        yield {"type": "text", "text": content}
    else:
        yield from content or ()


def _joined(content: Any) -> Any:
    return content if isinstance(content, str | None) else "".join(p["text"] for p in content)


def load_processor(source: Path, trust_remote_code: bool) -> Any:
    """Return the checkpoint's processor of texts and images.

    Raises:
        CalibrationError: There is none, or it cannot be loaded.
    """
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers raises many kinds here
        raise CalibrationError(
            f"the checkpoint {source} has no processor that loads ({error}), and a sample has "
            "pictures; add its processor's files, install what they need "
            "(pip install 'modelopt-lite[images]'), or give samples of text"
        ) from error
    if getattr(processor, "image_processor", None) is None:
        raise CalibrationError(
            f"the checkpoint {source} has no processor of images, and a sample has pictures; add "
            "preprocessor_config.json, or give samples of text"
        )
    return processor
