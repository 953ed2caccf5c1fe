"""``python -m modelopt_lite``: the same as ``modelopt-lite``."""

from __future__ import annotations

from modelopt_lite.cli import main

if __name__ == "__main__":
    main()
