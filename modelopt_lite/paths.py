"""Paths that users name."""

from __future__ import annotations

import errno
import os
import reprlib
from pathlib import Path

from modelopt_lite.errors import ModelOptLiteError

_NEVER = {errno.ENAMETOOLONG, errno.EILSEQ}


def asked_path(given: str | Path, error: type[ModelOptLiteError]) -> Path:
    """Return a path, ``~`` expanded, that the system could have; there need not be anything.

    What else is asked of a path, whether it is there, say, then has an answer and raises nothing.

    Args:
        given: By a user.
        error: To raise, where a name is too long, holds a zero byte, or has no such home folder.
    """
    try:
        path = Path(given).expanduser()
        os.lstat(path)
    except (ValueError, RuntimeError) as cause:
        raise error(f"{reprlib.repr(str(given))} is no path ({cause}); give another") from cause
    except OSError as cause:
        if cause.errno in _NEVER:
            why = cause.strerror
            raise error(f"{reprlib.repr(str(given))} is no path ({why}); give another") from cause
    return path
