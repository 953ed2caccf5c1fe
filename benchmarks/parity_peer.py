"""Quantize checkpoints with NVIDIA Model Optimizer: ``parity_peer.py JOBS.json``.

Run by `benchmarks/parity.py` with the interpreter of an environment that has Model Optimizer;
imports nothing of this package. JOBS is a list of ``{"source", "out", "config", "kv_cache"}``; what
a job raises is written to ``OUT.error``.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def run(job: dict[str, Any]) -> None:
    """Quantize and export one checkpoint."""
    batches = load_file(Path(job["source"]) / "calib_ids.safetensors")
    config = getattr(mtq, job["config"]) if job["config"] else {"quant_cfg": None}
    if job["kv_cache"]:
        cache = getattr(mtq, job["kv_cache"])["quant_cfg"]
        config = update_quant_cfg_with_kv_cache_quant(config, cache)
    model = AutoModelForCausalLM.from_pretrained(job["source"], dtype=torch.bfloat16).eval()

    def loop(model: Any) -> None:
        for name in sorted(batches):
            model(batches[name])

    with torch.no_grad():
        model = mtq.quantize(model, config, forward_loop=loop)
        export_hf_checkpoint(model, export_dir=job["out"])


def main() -> None:
    """Run all jobs; one that fails does not stop the others."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        try:
            run(job)
        except Exception as error:  # whatever it is, it is the answer
            said = " ".join(f"{type(error).__name__}: {error}".split())
            Path(f"{job['out']}.error").write_text(said, encoding="utf-8")
        print(Path(job["out"]).name, flush=True)


if __name__ == "__main__":
    main()
