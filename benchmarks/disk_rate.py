"""How fast a disk is read, in the ways that offloading has: what bounds it on this machine.

Reads one large file from a cold page cache: past the cache, by requests of several sizes from one
or more threads; through the cache, copied; and through a mapping, populated ahead of use. Ways
take turns, as disks and shared machines drift.

    python benchmarks/disk_rate.py FILE
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from coldcache import drop

from modelopt_lite.offload.hugepages import whole_pages

MB = 1 << 20
POPULATE_READ = 22  # of madvise(2), Linux 5.14
PIECE = 48 * MB  # as large as a layer


def past_the_cache(path: Path, size: int, request: int, threads: int, *, huge: bool) -> None:
    """Read by O_DIRECT to memory that is used again, in huge pages or in small ones."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    starts = iter(range(0, size - request + 1, request))
    lock = threading.Lock()

    def work() -> None:
        room = memoryview(whole_pages(request).numpy() if huge else mmap.mmap(-1, request))
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            os.preadv(fd, [room], start)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.close(fd)


def copied(path: Path, size: int) -> None:
    """Read through the page cache."""
    room = memoryview(mmap.mmap(-1, 4 * MB))
    fd = os.open(path, os.O_RDONLY)
    for start in range(0, size, len(room)):
        os.preadv(fd, [room], start)
    os.close(fd)


def populated(path: Path, size: int) -> None:
    """Have the pages of a mapping brought in, a piece at a time."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for start in range(0, size, PIECE):
            mapped.madvise(POPULATE_READ, start, min(PIECE, size - start))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="of a gigabyte or more")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    path, size = options.file, options.file.stat().st_size // mmap.PAGESIZE * mmap.PAGESIZE
    ways: dict[str, Callable[[], None]] = {
        f"past the cache, {threads} x {request // MB} MB, {'huge' if huge else 'small'} pages": (
            lambda r=request, t=threads, h=huge: past_the_cache(path, size, r, t, huge=h)
        )
        for huge in (False, True)
        for threads, request in ((1, 4 * MB), (1, PIECE), (2, 16 * MB), (4, 4 * MB))
    }
    ways |= {
        "through the cache, copied": lambda: copied(path, size),
        "mapped, populated": lambda: populated(path, size),
    }
    rates: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, read in ways.items():
            drop([path])
            wall, cpu = time.perf_counter(), time.process_time()
            read()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            rates[way].append((size / wall / 1e9, cpu / (size / 1e9)))
    for way, found in rates.items():
        each = ", ".join(f"{rate:.2f}" for rate, _ in found)
        cpu = statistics.median(seconds for _, seconds in found)
        print(f"{way:40} {each} GB/s; {cpu:.3f} s of processor time a GB")


if __name__ == "__main__":
    main()
