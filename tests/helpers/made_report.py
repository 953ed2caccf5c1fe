"""A report with everything in it: two stacks, cold experts, budgets, and names that are markup."""

from __future__ import annotations

from typing import Any

from modelopt_lite.report import Report

HOSTILE = '<img src="https://example.com/x.png" onerror="alert(1)">'


def make_report(**changes: Any) -> Report:
    """Return a report of a made-up run."""
    layers = range(4)
    kinds = ("self_attn.q_proj", "mlp.experts.0.up_proj", "mlp.experts.1.up_proj")
    names = [f"model.layers.{n}.{kind}" for n in layers for kind in kinds]
    report = Report(
        "/exports/out",
        "nvfp4",
        "qwen3_moe",
        quantized=dict.fromkeys(names, "nvfp4"),
        excluded={
            "lm_head": "output head",
            **{f"model.layers.{n}.mlp.gate": "router" for n in layers},
            HOSTILE: "the recipe excludes it",
        },
        relative_errors={name: 0.09 + 0.001 * n for n, name in enumerate(names)},
        tokens_per_expert={f"model.layers.{n}.mlp.experts": [100 * n, 7, 50, 1] for n in layers},
        cold_experts=["model.layers.0.mlp.experts.0"],
        input_amax={f"model.layers.{n}.self_attn.q_proj": 10.0**n for n in layers},
        notes=[f"a note with {HOSTILE}"],
        source_bytes=8_000_000,
        export_bytes=2_600_000,
        bytes_read=8_000_000,
        parameters=4_000_000,
        seconds={"calibrate and quantize": 12.5, "audit": 1.0},
        peak_memory_bytes=600_000_000,
        predicted_memory_bytes=580_000_000,
        details={
            "source": "/models/Small-MoE",
            "numerics": "exact",
            "recipe": {"kv_cache": None},
            "options": {"seed": 0, "all_experts": False, "on_bad_shape": "error"},
            "versions": {"modelopt_lite": "0.1.0", "torch": "2.13.0"},
            "calibration": {"samples": 64, "tokens": 32768, "origin": "/texts/a.txt"},
        },
        dialects=["modelopt"],
        recipe_text="name: nvfp4\nweights: nvfp4\n",
        command="modelopt-lite quantize /models/Small-MoE --recipe nvfp4",
        calibrated_with={"calib_size": 64, "calib_data": "a.txt"},
        budgets={"host memory": 2_000_000_000},
        layer_bytes={
            **{f"model.layers.{n}": [1_900_000, 560_000] for n in layers},
            "outside of layers": [400_000, 360_000],
        },
        timeline={
            "seconds": [0.0, 4.0, 8.0, 12.5],
            "memory": [4e8, 5e8, 6e8, 6e8],
            "device": [0, 0, 0, 0],
            "read": [0, 3_000_000, 6_000_000, 8_000_000],
            "written": [0, 1_000_000, 2_000_000, 2_600_000],
        },
    )
    for name, value in changes.items():
        setattr(report, name, value)
    return report
