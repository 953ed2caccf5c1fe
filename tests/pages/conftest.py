"""The made-up report."""

from __future__ import annotations

import pytest
from made_report import make_report

from modelopt_lite.report import Report


@pytest.fixture
def report() -> Report:
    """Return a report of a made-up run."""
    return make_report()
