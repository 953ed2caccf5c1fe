"""The default text: the language reference that every CPython carries in ``pydoc_data.topics``.

The topics are taken in sorted order. The first four fifths of the list are the calibration share,
the rest is the evaluation share. A few topics quote others word for word ("try" and "with" repeat
"compound"), so a paragraph that the calibration share holds is left out of the evaluation share:
no paragraph is ever in both.

The text belongs to the interpreter and differs between Python releases; `text_fingerprint` tells
two of them apart. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import functools
import hashlib
import platform

from modelopt_lite.errors import CalibrationError

SEPARATOR = "\n\n"
"""Stands between two topics; also what divides a topic into paragraphs."""


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise CalibrationError(
            f"the default text is missing: this Python {platform.python_version()} was installed "
            "without its module pydoc_data.topics; pass a text file as calib_data, "
            "or install the complete standard library"
        ) from error
    return dict(topics)


@functools.cache
def _shares() -> tuple[str, str]:
    """Return the calibration share and the evaluation share."""
    topics = _topics()
    names = sorted(topics)
    first_of_rest = len(names) * 4 // 5
    calibration = SEPARATOR.join(topics[name] for name in names[:first_of_rest])
    rest = SEPARATOR.join(topics[name] for name in names[first_of_rest:])

    known = {paragraph.strip() for paragraph in calibration.split(SEPARATOR)}
    evaluation = SEPARATOR.join(p for p in rest.split(SEPARATOR) if p.strip() not in known)
    return calibration, evaluation


def calibration_text() -> str:
    """Return the text to calibrate (and to train) on: about 330,000 characters in Python 3.11.

    Raises:
        CalibrationError: This Python was installed without ``pydoc_data``.
    """
    return _shares()[0]


def evaluation_text() -> str:
    """Return the text to measure on: about 120,000 characters in Python 3.11.

    Shares no paragraph with `calibration_text`.

    Raises:
        CalibrationError: This Python was installed without ``pydoc_data``.
    """
    return _shares()[1]


def text_fingerprint() -> str:
    """Return ``sha256:<64 hex digits>/python:<version>``, the hash being that of both shares.

    Raises:
        CalibrationError: This Python was installed without ``pydoc_data``.
    """
    # No text holds a NUL, so moving the boundary between the shares changes the hash as well.
    digest = hashlib.sha256("\0".join(_shares()).encode()).hexdigest()
    return f"sha256:{digest}/python:{platform.python_version()}"
