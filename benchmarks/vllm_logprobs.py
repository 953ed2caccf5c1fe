"""Print the mean log-probability that vLLM gives to the tokens of some prompts, as JSON.

Run by `benchmarks/served.py` with the interpreter of an environment that has vLLM; imports nothing
of this package. The engine runs as it is installed, with nothing replaced.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

# One process, few cores: the engine else starts a second one, and binds its threads to cores.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def mean_logprob(folder: str, ids: list[list[int]]) -> float:
    """Return the mean over all tokens but the first of each prompt."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=2 * max(map(len, ids)),
        max_num_batched_tokens=2048,
        max_num_seqs=8,
        enable_prefix_caching=False,
    )
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in ids], asked)
    found = []
    for prompt, output in zip(ids, outputs, strict=True):
        pairs = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        found += [logprobs[token].logprob for token, logprobs in pairs]
    return math.fsum(found) / len(found)


def main() -> None:
    """Measure one checkpoint: ``vllm_logprobs.py FOLDER IDS.json OUT.json``."""
    folder, ids, out = sys.argv[1:]
    prompts = json.loads(Path(ids).read_text(encoding="utf-8"))
    found = mean_logprob(folder, prompts)
    import vllm

    Path(out).write_text(json.dumps({"logprob": found, "version": vllm.__version__}))


if __name__ == "__main__":
    main()
