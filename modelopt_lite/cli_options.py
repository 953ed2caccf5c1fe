"""The options of a run on the command line: those of `quantize_and_export`, each once."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any

from typer import Option

_WHAT = "What to quantize"
_DATA = "Calibration"
_RESOURCES = "Resources"
_OUTPUT = "Output"


def _option(group: str, text: str, *names: str) -> Any:
    return Option(*names, help=text, rich_help_panel=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The keyword arguments of `modelopt_lite.quantize_and_export`, with the same defaults.

    Choices are plain text here: the library checks them and says what there is to choose from.
    """

    model_type: Annotated[
        str | None, _option(_WHAT, "Must equal the model_type of config.json, where given.")
    ] = None
    export_dir: Annotated[
        str | None,
        _option(_OUTPUT, "Where to write; default ./NAME-RECIPE.", "--export-dir", "-o"),
    ] = None
    recipe: Annotated[
        str, _option(_WHAT, "A preset, or the path of a .yaml file.", "--recipe", "-r")
    ] = "nvfp4"
    kv_cache: Annotated[
        str | None,
        _option(_WHAT, "fp8 adds scales for the key and value cache; none removes the recipe's."),
    ] = None
    effective_bits: Annotated[
        float | None,
        _option(_WHAT, "The most bits a weight that a search for formats may spend."),
    ] = None
    search_dir: Annotated[
        str | None,
        _option(_OUTPUT, "Where scores of such a search are kept; default EXPORT_DIR-search."),
    ] = None
    calib_data: Annotated[
        str | None,
        _option(
            _DATA,
            "A .txt, .jsonl, .json or .parquet file (texts, chats, pictures), or .safetensors of "
            "token ids; default the text that comes with CPython.",
        ),
    ] = None
    calib_size: Annotated[int, _option(_DATA, "The most sequences.")] = 512
    calib_seq_len: Annotated[int, _option(_DATA, "Tokens of a sequence.")] = 512
    batch_size: Annotated[int | None, _option(_DATA, "Sequences a batch; default 8.")] = None
    dialect: Annotated[
        str,
        _option(
            _OUTPUT,
            "Names and config files of the export: modelopt, compressed-tensors, or both, each in "
            "a folder of its own.",
        ),
    ] = "modelopt"
    numerics: Annotated[
        str, _option(_WHAT, "exact, or modelopt for the bytes of NVIDIA Model Optimizer 0.47.")
    ] = "exact"
    offload: Annotated[
        str, _option(_RESOURCES, "auto: one decoder layer at a time; none: the whole model.")
    ] = "auto"
    offload_config: Annotated[
        str | None,
        _option(
            _RESOURCES,
            "A .yaml, .json or .ini file of an OffloadConfig, in the place of --offload: which "
            "parameters come and go. FT_ variables go before it.",
        ),
    ] = None
    ep: Annotated[
        int | None,
        _option(_RESOURCES, "Of several processes (torchrun), how many share a layer's experts."),
    ] = None
    device: Annotated[
        str | None, _option(_RESOURCES, "Where it runs; default the accelerator, or the CPU.")
    ] = None
    device_memory: Annotated[
        str | None,
        _option(_RESOURCES, "The most on the device, as 80GB or 50%; or FT_DEVICE_MEMORY."),
    ] = None
    host_memory: Annotated[
        str | None,
        _option(_RESOURCES, "The most host memory, as 32GiB or 50%; or FT_HOST_MEMORY."),
    ] = None
    disk_scratch: Annotated[
        str | None,
        _option(_RESOURCES, "The most temporary files, 100GB or 50%; or FT_DISK_SCRATCH."),
    ] = None
    moe_calibrate_all_experts: Annotated[
        bool,
        _option(_DATA, "Every expert sees every token.", "--moe-calibrate-all-experts"),
    ] = False
    on_bad_shape: Annotated[
        str, _option(_WHAT, "error, or skip to leave what the format cannot hold.")
    ] = "error"
    strict: Annotated[
        bool, _option(_OUTPUT, "Exit with 3 where the run had to fall back.", "--strict")
    ] = False
    resume: Annotated[
        bool,
        _option(
            _OUTPUT,
            "Go on with an interrupted run, and reuse a finished export, of the same inputs.",
        ),
    ] = True
    overwrite: Annotated[
        bool, _option(_OUTPUT, "Replace a folder that is not empty.", "--overwrite")
    ] = False
    max_shard_size: Annotated[str, _option(_OUTPUT, "Largest weight file.")] = "10GB"
    trust_remote_code: Annotated[
        bool,
        _option(_WHAT, "Allow code that the checkpoint brings.", "--trust-remote-code"),
    ] = False
    seed: Annotated[int, _option(_DATA, "For model code that draws random numbers.")] = 0
    verify: Annotated[bool, _option(_OUTPUT, "Audit the export.")] = True
    progress: Annotated[bool, _option(_OUTPUT, "Show how far the run is.")] = True

    def arguments(self) -> dict[str, Any]:
        """Return the options by name, as `modelopt_lite.quantize_and_export` takes them.

        Raises:
            OffloadConfigError: Of ``offload_config``.
        """
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        if (path := found.pop("offload_config")) is not None:
            from modelopt_lite.offload.config_sources import load_config

            found["offload"] = load_config(path)
        return found


def with_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Show typer the fields of `RunOptions` in place of a command's parameter ``options``."""
    hints = typing.get_type_hints(RunOptions, include_extras=True)
    own = inspect.signature(command, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    run = [
        inspect.Parameter(field.name, keyword, default=field.default, annotation=hints[field.name])
        for field in fields(RunOptions)
    ]
    others = [p for p in own.parameters.values() if p.name != "options"]

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        options = RunOptions(**{field.name: given.pop(field.name) for field in fields(RunOptions)})
        command(**given, options=options)

    first = [p for p in others if p.kind is not keyword]
    rest = [p for p in others if p.kind is keyword]
    vars(expanded)["__signature__"] = own.replace(parameters=[*first, *run, *rest])
    return expanded
