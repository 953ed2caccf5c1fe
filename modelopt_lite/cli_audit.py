"""The commands `verify` and `diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from modelopt_lite.cli_show import AsJson, print_json, set_up_torch, show, show_error
from modelopt_lite.errors import ModelOptLiteError

if TYPE_CHECKING:
    from modelopt_lite.fidelity import Fidelity


def verify(
    export: Annotated[str, typer.Argument(help="Folder of an export, or of one in each dialect.")],
    *,
    source: Annotated[
        str | None,
        typer.Option(
            help="What it was made from: names, shapes and the bytes of copies are compared.",
            metavar="CKPT",
        ),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="With --source: dequantize and compare every matrix.")
    ] = False,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="Only what these refuse or load wrongly: vllm, sglang, tensorrt_llm, "
            "transformers, compressed_tensors; several with commas."
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="With --deep: run both on a text and compare logits and layers. A .txt file, or "
            "cpython for the text that comes with it."
        ),
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Of the text: tokens of a block.")] = 512,
    max_tokens: Annotated[int, typer.Option(help="Of the text: stop after so many.")] = 8192,
    recording: Annotated[
        bool,
        typer.Option(
            "--record", help="With --text: write it into the export's report and model card."
        ),
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow code that the checkpoints bring.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Audit an export, of any tool; exits with 1 where a rule is broken."""
    set_up_torch()
    from modelopt_lite.checking import check_exports
    from modelopt_lite.report_view import audit_view, predictions_view

    if deep and source is None:
        raise typer.BadParameter("--deep compares with a source; give --source CKPT")
    if text is not None and not deep:
        raise typer.BadParameter("--text compares values; give --source CKPT and --deep")
    if recording and text is None:
        raise typer.BadParameter("--record keeps how a text is predicted; give --text")
    if recording:
        from modelopt_lite.errors import OutputError
        from modelopt_lite.paths import asked_path
        from modelopt_lite.record import read_report

        read_report(asked_path(export, OutputError).resolve())
    checked = check_exports(
        export,
        source=source,
        deep=deep,
        engines=engine or (),
        text=text,
        seq_len=seq_len,
        max_tokens=max_tokens,
        trust_remote_code=trust_remote_code,
    )
    failed = any(one.audit.failed for one in checked)
    if as_json:
        print_json({"ok": not failed, "exports": [one.as_dict() for one in checked]})
    for one in () if as_json else checked:
        if one.predictions is not None:
            show(predictions_view(one.predictions))
        show(audit_view(one.audit, source, deep=deep))
    for one in checked if recording else ():
        if one.predictions is not None:
            _record(str(one.audit.folder), str(text), one.predictions)
    if failed:
        raise typer.Exit(1)


def _record(export: str, text: str, predictions: Fidelity) -> None:
    from modelopt_lite.checking import BUNDLED_TEXT
    from modelopt_lite.record import record, text_label

    record(
        export,
        {
            "on": text_label(None if text == BUNDLED_TEXT else text),
            "perplexity": predictions.export_perplexity,
            "source_perplexity": predictions.source_perplexity,
            "kl": predictions.kl,
            "top1": predictions.top1,
            "tokens": predictions.tokens,
        },
    )


def diff(
    a: Annotated[str, typer.Argument(help="Folder of an export.")],
    b: Annotated[str, typer.Argument(help="Folder of another.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Tell how two exports differ; exits with 0, 1 where they do, or 2 in trouble, as diff does."""
    set_up_torch()
    from modelopt_lite.output import resolve_checkpoint
    from modelopt_lite.report_view import difference_view
    from modelopt_lite.verify import diff as differences

    try:
        found = differences.diff(resolve_checkpoint(a), resolve_checkpoint(b))
    except ModelOptLiteError as error:
        show_error(error.code, str(error))
        raise typer.Exit(2) from error
    if as_json:
        print_json(found.as_dict())
    elif found.found:
        show(difference_view(found))
    if found.found:
        raise typer.Exit(1)
