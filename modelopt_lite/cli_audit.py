"""The commands `verify` and `diff`."""

from __future__ import annotations

from typing import Annotated

import typer

from modelopt_lite.cli_show import AsJson, print_json, set_up_torch, show, show_error
from modelopt_lite.errors import ModelOptLiteError


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
    if failed:
        raise typer.Exit(1)


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
