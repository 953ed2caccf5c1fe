"""What a run took of memory and of the disk, from its beginning to its end."""

from __future__ import annotations

import time
from collections.abc import Callable

from modelopt_lite.progress import Progress, Sample, sample_process

_MOST = 256  # samples that are kept; where there are more, every second one goes
_FIRST_INTERVAL = 0.02  # seconds between two samples, doubled each time


class Timeline:
    """Takes samples as units are finished: no thread of its own, and few of them.

    Args:
        device_used: Tells how many bytes of an accelerator are in use; None where there is none.
        sample: Tells what the process has done.
    """

    def __init__(
        self,
        device_used: Callable[[], int] | None = None,
        sample: Callable[[], Sample] = sample_process,
    ) -> None:
        self._device_used = device_used
        self._sample = sample
        self._interval = _FIRST_INTERVAL
        self._samples: list[tuple[Sample, int]] = []
        self.mark()

    def mark(self) -> None:
        """Take a sample, however near the one before is."""
        device = self._device_used() if self._device_used is not None else 0
        self._samples.append((self._sample(), device))
        if len(self._samples) > _MOST:
            self._samples = self._samples[::2]
            self._interval *= 2

    def around(self, tell: Progress) -> Progress:
        """Return a function that does what ``tell`` does, and takes a sample now and then."""

        def told(phase: str, done: int, total: int) -> None:
            if time.monotonic() - self._samples[-1][0].time >= self._interval or done == total:
                self.mark()
            tell(phase, done, total)

        return told

    def columns(self) -> dict[str, list[float]]:
        """Return the samples by what they tell, as JSON values.

        ``seconds`` since the first; ``memory`` and ``device`` in bytes, and ``read`` and
        ``written`` in bytes since the first.
        """
        first = self._samples[0][0]
        return {
            "seconds": [round(s.time - first.time, 3) for s, _ in self._samples],
            "memory": [s.resident for s, _ in self._samples],
            "device": [device for _, device in self._samples],
            "read": [s.read - first.read for s, _ in self._samples],
            "written": [s.written - first.written for s, _ in self._samples],
        }
