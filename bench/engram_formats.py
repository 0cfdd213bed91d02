"""Random row reads from the two candidate copy formats: sparse at original offsets against row pack.

    python3 bench/engram_formats.py DIRECTORY [--gigabytes 4] [--repeat 3]

Prints the median rows a second, cold (page cache dropped) and cached, and the page cache that cold reads cost.
Needs a C compiler: the interpreter alone would cost more than the read.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

READER = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
enum { BASE = 664 }; /* the real shard's data start: not a multiple of 256, so some rows cross a page */
static int fd, pack;
static long rows, per;
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
static void *reads(void *arg) {
    uint64_t s = ((long)arg + 1) * 0x9E3779B97F4A7C15ull;
    char buf[264];
    for (long i = 0; i < per; i++) {
        s ^= s << 13; s ^= s >> 7; s ^= s << 17;
        long r = s % rows;
        ssize_t n = pack ? pread(fd, buf, 264, r / 15 * 4096 + r % 15 * 264)
                         : pread(fd, buf, 256, BASE + r * 256) + pread(fd, buf + 256, 8, BASE + rows * 256 + r * 8);
        if (n != 264) { perror("pread"); exit(1); }
    }
    return 0;
}
static long resident(void) { /* bytes of the file in the page cache */
    off_t size = lseek(fd, 0, SEEK_END);
    long pages = (size + 4095) / 4096, n = 0;
    unsigned char *v = malloc(pages);
    void *m = mmap(0, size, PROT_READ, MAP_SHARED, fd, 0);
    mincore(m, size, v);
    for (long i = 0; i < pages; i++) n += v[i] & 1;
    return n * 4096;
}
int main(int argc, char **argv) {
    if (argc != 7) return 2;
    fd = open(argv[1], O_RDONLY); pack = atoi(argv[2]); rows = atol(argv[3]); per = atol(argv[4]);
    int threads = atoi(argv[5]), cold = atoi(argv[6]);
    pthread_t t[64];
    posix_fadvise(fd, 0, 0, cold ? POSIX_FADV_DONTNEED : POSIX_FADV_WILLNEED);
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    double start = now();
    for (long i = 0; i < threads; i++) pthread_create(t + i, 0, reads, (void *)i);
    for (int i = 0; i < threads; i++) pthread_join(t[i], 0);
    printf("%.0f %ld\n", threads * per / (now() - start), resident());
}
"""


def fill(path: Path, size: int) -> None:
    block = os.urandom(1 << 24)
    with path.open("wb") as out:
        for offset in range(0, size, len(block)):
            out.write(block[: size - offset])
        os.fsync(out.fileno())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    rows = int(args.gigabytes * 1e9 / 264) // 15 * 15
    files = [("sparse", 664 + rows * 264, 0), ("row pack", rows // 15 * 4096, 1)]
    with tempfile.TemporaryDirectory(dir=args.directory) as scratch:
        binary = Path(scratch, "reader")
        subprocess.run(["cc", "-O2", "-pthread", "-xc", "-", "-o", str(binary)], input=READER.encode(), check=True)
        for name, size, _ in files:
            fill(Path(scratch, name), size)
        for cold, threads, reads in ((1, 1, 20_000), (1, 16, 40_000), (0, 1, 1_000_000), (0, 2, 1_000_000)):
            rates: dict[str, list[float]] = {name: [] for name, _, _ in files}
            cache: dict[str, int] = {}
            for _ in range(args.repeat):  # alternate, so that a slow minute of the machine hits both
                for name, _, pack in files:
                    path = Path(scratch, name)
                    if not cold:
                        subprocess.run(["cat", str(path)], stdout=subprocess.DEVNULL, check=True)
                    argv = [str(binary), str(path), *map(str, (pack, rows, reads // threads, threads, cold))]
                    out = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
                    rate, resident = re.findall(r"\d+", out)
                    rates[name].append(float(rate))
                    cache[name] = int(resident)
            for name, values in rates.items():
                kib = f"  {cache[name] / reads / 1024:.1f} KiB of cache a row" if cold else ""
                state = "cold" if cold else "cached"
                print(f"{state:6} {threads:2} thread(s) {name:8} {statistics.median(values):9.0f} rows/s{kib}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
