"""One side of `ptq.py`, a process of its own; needs only what that side is made of.

    python ptq_sides.py SIDE SOURCE OUT FORMAT

prints, as its last line, JSON: wall and CPU seconds of each phase, and the bytes written. Peers run
as their documentation shows, on the same token ids, batches and threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SAMPLES, LENGTH, BATCH = 16, 256, 4
# What no recipe here quantizes, in llm-compressor's spelling.
IGNORE = ["lm_head", r"re:.*mlp\.gate$"]

phases: dict[str, tuple[float, float]] = {}


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Note the wall and CPU seconds (children included) of a block."""
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    yield
    phases[name] = (time.perf_counter() - wall, sum(os.times()[:4]) - cpu)


def batches(source: Path) -> list[Any]:
    """Return the same seeded token ids for every side, [4, 256] each."""
    import torch

    vocab = json.loads((source / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(0, vocab, (SAMPLES, LENGTH), generator=generator).split(BATCH))


def load(source: Path) -> Any:
    """Return the model in memory, as every peer wants it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()


def ours(source: Path, out: Path, fmt: str) -> None:
    """modelopt-lite."""
    with phase("import"):
        from modelopt_lite import quantize_and_export
    report = quantize_and_export(
        source, export_dir=out, recipe=fmt, calib_data=batches(source), progress=False
    )
    phases.update({name: (seconds, 0.0) for name, seconds in report.seconds.items()})


def modelopt(source: Path, out: Path, fmt: str) -> None:
    """NVIDIA Model Optimizer: load, calibrate by the largest magnitude, export."""
    with phase("import"):
        import modelopt.torch.quantization as mtq
        import torch
        from modelopt.torch.export import export_hf_checkpoint
    with phase("load"):
        model = load(source)
    config = {"fp8": mtq.FP8_DEFAULT_CFG, "nvfp4": mtq.NVFP4_DEFAULT_CFG}[fmt]

    def forward_loop(model: Any) -> None:
        for ids in batches(source):
            model(input_ids=ids, use_cache=False)

    with phase("quantize"), torch.inference_mode():
        mtq.quantize(model, config, forward_loop)
    with phase("export"), torch.inference_mode():
        export_hf_checkpoint(model, export_dir=out)


def oneshot(source: Path, out: Path, fmt: str, **options: Any) -> None:
    """llm-compressor with a model in memory; every expert sees every token, as is its default."""
    with phase("import"):
        from llmcompressor import oneshot as run
        from llmcompressor.modifiers.quantization import QuantizationModifier
        from tokenizers import Tokenizer, models
        from torch.utils.data import DataLoader
        from transformers import PreTrainedTokenizerFast
    with phase("load"):
        model = load(source)
    samples = [{"input_ids": row} for batch in batches(source) for row in batch]
    # It wants a processor beside data that are tokens already, and the checkpoints have none.
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    recipe = QuantizationModifier(targets="Linear", scheme=fmt.upper(), ignore=IGNORE)
    with phase("quantize"):
        run(
            model=model,
            dataset=DataLoader(samples, batch_size=BATCH),
            recipe=recipe,
            processor=PreTrainedTokenizerFast(tokenizer_object=words),
            num_calibration_samples=SAMPLES,
            max_seq_length=LENGTH,
            **options,
        )
    with phase("export"):
        model.save_pretrained(out, save_compressed=True)


def oneshot_routed(source: Path, out: Path, fmt: str) -> None:
    """The same, with the tokens that the router sends to each expert, as the other sides do."""
    oneshot(source, out, fmt, moe_calibrate_all_experts=False)


def model_free(source: Path, out: Path, fmt: str) -> None:
    """llm-compressor on the files, without a model."""
    with phase("import"):
        from llmcompressor import model_free_ptq
    scheme = {"fp8_2d_blockwise_weight_only": "FP8_BLOCK", "w4a16_nvfp4": "NVFP4A16"}[fmt]
    with phase("quantize"):
        model_free_ptq(
            model_stub=str(source),
            save_directory=str(out),
            scheme=scheme,
            ignore=[*IGNORE, "model.embed_tokens"],
            max_workers=int(os.environ["OMP_NUM_THREADS"]),
            device="cpu",
        )


def floor(source: Path, out: Path, fmt: str) -> None:
    """What no way of doing it can spare: imports, a forward pass, copying in, writing out.

    ``fmt`` names a finished export beside ``out``, whose bytes are those that are written. The
    phase "load" is not part of the floor, as "copy" stands for reading: `ptq.py` takes it off.
    """
    with phase("import"):
        import torch
        import transformers

        config = json.loads((source / "config.json").read_text())
        getattr(transformers, config["architectures"][0])
    with phase("load"):
        model = load(source)
        for parameter in model.parameters():  # mapped from the file until it is read
            parameter.data = parameter.data.clone()
    with phase("forward"), torch.inference_mode():
        for ids in batches(source):
            model(input_ids=ids, use_cache=False)
    out.mkdir()
    with phase("copy"):
        subprocess.run(["cp", "-r", str(source), str(out / "copy")], check=True)
    with phase("write"):
        size = sum(path.stat().st_size for path in (out.parent / fmt).iterdir())
        piece = bytearray(16 << 20)
        with (out / "written").open("wb") as file:
            for start in range(0, size, len(piece)):
                file.write(piece[: size - start])
            file.flush()
            os.fsync(file.fileno())


SIDES = {
    side.__name__: side for side in (ours, modelopt, oneshot, oneshot_routed, model_free, floor)
}


def main() -> None:
    """Run one side."""
    side, source, out, fmt = sys.argv[1:]
    SIDES[side](Path(source), Path(out), fmt)
    written = sum(path.stat().st_size for path in Path(out).rglob("*") if path.is_file())
    print(json.dumps({"phases": phases, "written": written}))


if __name__ == "__main__":
    main()
