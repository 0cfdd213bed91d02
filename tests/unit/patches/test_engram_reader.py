"""The C reader of patch 0001: every row it stages, and what it does when it cannot."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from reader_lib import BLOCK, COMMON, PER_BLOCK, Part, Reader, build, new_files

ROWS = 1000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("reader"))


class Table:
    """Random rows, as a pack and as a safetensors-like file with an odd header."""

    def __init__(self, folder: Path, rows: int = ROWS) -> None:
        rng = random.Random(rows)  # noqa: S311 - test data
        self.count = rows
        self.rows = [rng.randbytes(264) for _ in range(rows)]
        self.pack, self.shard = folder / "layer-1.rows", folder / "shard"
        blocks = -(-rows // PER_BLOCK)
        data = bytearray(blocks * BLOCK)
        for i, row in enumerate(self.rows):
            at = i // PER_BLOCK * BLOCK + i % PER_BLOCK * 264
            data[at : at + 264] = row
        self.pack.write_bytes(data)
        self.base = 667  # rows then start at odd places and cross pages
        weights, scales = b"".join(r[:256] for r in self.rows), b"".join(r[256:] for r in self.rows)
        self.shard.write_bytes(b"h" * self.base + weights + scales)

    def open(self, library: Path, source: str, threads: int = 4, max_rows: int = 4096, prefetch: int = 0) -> Reader:
        if source == "pack":
            return Reader(library, self.pack, self.count, max_rows, threads, prefetch_threads=prefetch)
        parts = Part(self.base, 1, 256, 0), Part(self.base + 256 * self.count, 1, 8, 0)
        return Reader(library, self.shard, self.count, max_rows, threads, parts=parts, prefetch_threads=prefetch)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return Table(tmp_path_factory.mktemp("table"))


def wanted(table: Table, i: int) -> bytes | None:
    return table.rows[i] if 0 <= i < table.count else None


def evict(path: Path) -> None:
    with path.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


EDGES = [0, ROWS - 1, ROWS, -1, 14, 15, 16, 2**31 - 1, -(2**31), 0, 0, 7, 7, ROWS + 10**6]
BATCHES = {
    "edges": EDGES,
    "one": [5],
    "all": list(range(ROWS)),
    "reversed twice": list(range(ROWS))[::-1] * 2,
    "only others'": [-1] * 40,
}


@pytest.mark.parametrize("source", ["pack", "shard"])
@pytest.mark.parametrize("threads", [1, 4, 64])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("cached", [True, False])
def test_rows(library: Path, table: Table, source: str, threads: int, batch: str, cached: bool) -> None:
    ids = BATCHES[batch]
    if not cached:
        evict(table.pack if source == "pack" else table.shard)
    with table.open(library, source, threads) as reader:
        reader.lookup(ids)
        assert [reader.row(i) for i in range(len(ids))] == [wanted(table, i) for i in ids]
        stats = reader.stats()
        own = [i for i in ids if 0 <= i < table.count]
        assert (stats["rows"], stats["unique"]) == (len(ids), len(set(own)))
        assert stats["out_of_range"] == len(ids) - len(own)
        assert stats["cached"] + stats["read"] == len(set(own))
        assert (stats["lookups"], stats["timed"]) == (1, 1)


def test_every_row_is_staged_once(library: Path, table: Table) -> None:
    with table.open(library, "pack") as reader:
        reader.lookup([9, 9, 3, 9, 3])
        assert list(reader.slots[:5]) == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("source", ["pack", "shard"])
def test_fuzz_of_ids(library: Path, table: Table, source: str) -> None:
    """What piecewise graph capture hands over: anything at all."""
    rng = random.Random(11)  # noqa: S311 - test data
    with table.open(library, source) as reader:
        for _ in range(300):
            span = rng.choice([10, ROWS, 2 * ROWS, 2**31])
            ids = [rng.randrange(-span, span) for _ in range(rng.randrange(1, 400))]
            reader.lookup(ids)
            assert [reader.row(i) for i in range(len(ids))] == [wanted(table, i) for i in ids]


def test_a_row_beyond_32_bit_offsets(library: Path, tmp_path: Path) -> None:
    """The last row of the published table, in a sparse file of 101 GB."""
    rows, base = 384_016_682, 672
    shard = tmp_path / "shard"
    with shard.open("wb") as f:
        f.truncate(base + rows * 264)
        for i, row in ((0, b"a"), (288_011_564, b"b"), (rows - 1, b"c")):
            f.seek(base + i * 256)
            f.write(row * 256)
            f.seek(base + rows * 256 + i * 8)
            f.write(row * 8)
    parts = Part(base, 1, 256, 0), Part(base + rows * 256, 1, 8, 0)
    with Reader(library, shard, rows, 16, 2, parts=parts) as reader:
        reader.lookup([0, 288_011_564, rows - 1, 1])
        assert [reader.row(i) for i in range(4)] == [b"a" * 264, b"b" * 264, b"c" * 264, bytes(264)]


REFUSED = {
    "a block short": (lambda p: os.truncate(p, p.stat().st_size - BLOCK), "cut short"),
    "a byte short": (lambda p: os.truncate(p, (ROWS - 1) // 15 * BLOCK + (ROWS - 1) % 15 * 264 + 263), "cut short"),
    "empty": (lambda p: os.truncate(p, 0), "cut short"),
    "gone": (lambda p: p.unlink(), "No such file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_cannot_hold_the_rows_is_refused(library: Path, tmp_path: Path, case: str) -> None:
    damage, message = REFUSED[case]
    table = Table(tmp_path)
    damage(table.pack)
    with pytest.raises(OSError, match=message):
        table.open(library, "pack")


def test_more_rows_than_the_table_has_are_refused(library: Path, tmp_path: Path) -> None:
    table = Table(tmp_path)
    table.count = ROWS + 1
    table.pack.write_bytes(table.pack.read_bytes()[: ROWS // 15 * BLOCK])
    with pytest.raises(OSError, match="cut short"):
        table.open(library, "pack")


def child(library: Path, pack: Path, body: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, as the reader ends the one it lives in."""
    code = f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).resolve().parents[3] / "bench")!r})
        from pathlib import Path
        from reader_lib import Reader
        pack = Path({str(pack)!r})
        reader = Reader(Path({str(library)!r}), pack, {ROWS}, 64, 4)
    """
    program = textwrap.dedent(code) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


def test_a_file_truncated_under_the_reader_ends_the_process(library: Path, tmp_path: Path) -> None:
    table = Table(tmp_path)
    body = """
        os.truncate(pack, 4096)
        reader.lookup([0, 500])
        print("served", flush=True)
    """
    result = child(library, table.pack, body)
    assert result.returncode == -6
    assert "served" not in result.stdout
    offset = 500 // 15 * BLOCK + 500 % 15 * 264
    assert (
        f"row 500: file {table.pack}, offset {offset}, wanted 264 bytes, got 0, errno 0 (short read)" in result.stderr
    )


def test_a_short_read_that_heals_is_retried(library: Path, tmp_path: Path) -> None:
    table = Table(tmp_path)
    whole = table.pack.read_bytes()
    with table.open(library, "pack") as reader:
        os.truncate(table.pack, BLOCK)

        def heal() -> None:
            table.pack.write_bytes(whole)

        timer = threading.Timer(0.03, heal)
        timer.start()
        reader.lookup([999])
        timer.join()
        assert reader.row(0) == table.rows[999]
        assert reader.stats()["retries"] >= 1


def test_an_input_error_ends_the_process(library: Path, tmp_path: Path) -> None:
    """EIO and its kin: here the descriptors are swapped for a directory's (EISDIR)."""
    table = Table(tmp_path)
    body = """
        folder = os.open(pack.parent, os.O_RDONLY)
        for fd in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{fd}") == str(pack):
                    os.dup2(folder, int(fd))
            except OSError:
                pass
        reader.lookup([1])
        print("served", flush=True)
    """
    result = child(library, table.pack, body)
    assert result.returncode == -6
    assert "errno 21" in result.stderr
    assert "4 attempts" in result.stderr


def test_a_lookup_larger_than_its_room_ends_the_process(library: Path, tmp_path: Path) -> None:
    result = child(library, Table(tmp_path).pack, "reader.lookup([0] * 65)")
    assert result.returncode == -6
    assert "65 rows in one lookup, room for 64" in result.stderr


def test_a_file_system_without_nowait_is_read_all_the_same(tmp_path: Path) -> None:
    """As on NFS: preadv2 answers EOPNOTSUPP to the flag, every row is a plain read."""
    shim = tmp_path / "shim.h"
    shim.write_text(
        "#include <errno.h>\n#include <sys/uio.h>\n"
        "static ssize_t nfs_preadv2(int fd, const struct iovec *v, int n, off_t at, int flags) {\n"
        "  if (flags) { errno = EOPNOTSUPP; return -1; }\n  return preadv(fd, v, n, at);\n}\n"
        "#define preadv2 nfs_preadv2\n"
    )
    library = build(tmp_path, "-D_GNU_SOURCE", "-Wno-error", "-w", "-include", str(shim))
    table = Table(tmp_path)
    with table.open(library, "pack", prefetch=2) as reader:
        for _ in range(2):
            reader.lookup(list(range(200)))
            assert [reader.row(i) for i in range(200)] == table.rows[:200]
        assert reader.stats()["read"] == 400
        reader.prefetch(list(range(500)))
        assert reader.stats()["prefetch_rows"] == 0


def test_prefetch_fills_the_page_cache(library: Path, tmp_path: Path) -> None:
    table = Table(tmp_path, 20_000)
    with table.open(library, "pack", prefetch=4) as reader:
        evict(table.pack)
        ids = list(range(0, 20_000, 15))
        reader.prefetch([*ids, -1, 10**9])
        stats = reader.stats()
        assert stats["prefetch_rows"] == len(ids)
        assert stats["prefetch_read"] > len(ids) // 2, "the file was not evicted, so nothing is shown"
        reader.lookup(ids)
        assert reader.stats()["read"] == 0
        assert reader.row(1) == table.rows[15]


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers(tmp_path: Path, sanitizer: str) -> None:
    """Two tables on one pool, lookups and prefetches at once, cached and not, ids of all kinds."""
    source = new_files(tmp_path) / COMMON / "engram_disk.c"
    table = Table(tmp_path, 3000)
    # As on a host with many processors, so that the cached pass is shared out too.
    many = tmp_path / "many.h"
    many.write_text("#include <sched.h>\n#undef CPU_COUNT\n#define CPU_COUNT(set) ((void)(set), 16)\n")
    driver = tmp_path / "driver.c"
    driver.write_text(DRIVER)
    program = tmp_path / "driver"
    flags = ["-g", "-O1", "-std=c11", "-D_GNU_SOURCE", "-pthread", "-include", str(many)]
    flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    subprocess.run(["gcc", *flags, "-o", str(program), str(driver), str(source)], check=True)
    result = subprocess.run([program, table.pack, "3000"], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout == "same\n"


DRIVER = r"""
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { int64_t base, per_block, block, stride; } part;
typedef struct { void *table; int64_t count; const int32_t *ids; int32_t *slots; uint8_t *w, *s; } job;
void *engram_pool_new(int);
void engram_pool_free(void *);
void *engram_open(const char *, const char *, const part *, const part *, int64_t, int32_t, void *,
                  void *, int32_t, char *, size_t);
void engram_close(void *);
void engram_host_lookup(void *);
void engram_prefetch(void *, const int32_t *, int64_t);
void engram_get_stats(void *, void *);

enum { N = 2000 };
static const char *path;
static int64_t rows;
static uint8_t *whole;
static void *pool, *prefetch_pool;
static int wrong;

static void *prefetcher(void *table) {
  int32_t ids[N];
  for (int n = 0; n < 30; n++) {
    for (int i = 0; i < N; i++)
      ids[i] = (i * 7 + n * 31) % (int)(rows + 50) - 20;
    engram_prefetch(table, ids, N);
  }
  return NULL;
}

static void *user(void *seed) {
  part w = {0, 15, 4096, 264}, s = {256, 15, 4096, 264};
  char error[256];
  void *t = engram_open(path, path, &w, &s, rows, N, pool, prefetch_pool, 512, error, sizeof error);
  if (!t) { fprintf(stderr, "%s\n", error); exit(2); }
  int32_t *ids = malloc(sizeof *ids * N), *slots = malloc(sizeof *slots * N);
  uint8_t *weight = malloc(N * 256), *scale = malloc(N * 8);
  uint64_t stats[600];
  pthread_t other;
  pthread_create(&other, NULL, prefetcher, t);
  unsigned x = (unsigned)(uintptr_t)seed;
  int fd = open(path, O_RDONLY);
  for (int n = 0; n < 60; n++) {
    job j = {t, 1 + rand_r(&x) % N, ids, slots, weight, scale};
    for (int i = 0; i < j.count; i++)
      ids[i] = (int32_t)(rand_r(&x) % (unsigned)(rows + 200)) - 100;
    if (n % 3 == 0)
      posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    engram_host_lookup(&j);
    engram_get_stats(t, stats);
    for (int i = 0; i < j.count; i++) {
      int ours = ids[i] >= 0 && ids[i] < rows;
      const uint8_t *row = whole + ids[i] / 15 * 4096 + ids[i] % 15 * 264;
      if (ours != (slots[i] >= 0) || (ours && (memcmp(row, weight + slots[i] * 256, 256) ||
                                               memcmp(row + 256, scale + slots[i] * 8, 8))))
        __atomic_store_n(&wrong, 1, __ATOMIC_RELAXED);
    }
  }
  close(fd);
  pthread_join(other, NULL);
  engram_close(t);
  free(ids); free(slots); free(weight); free(scale);
  return NULL;
}

int main(int argc, char **argv) {
  (void)argc;
  path = argv[1];
  rows = atoll(argv[2]);
  FILE *f = fopen(path, "rb");
  fseek(f, 0, SEEK_END);
  size_t size = (size_t)ftell(f);
  rewind(f);
  whole = malloc(size);
  if (fread(whole, 1, size, f) != size) return 3;
  fclose(f);
  pool = engram_pool_new(6);
  prefetch_pool = engram_pool_new(2);
  pthread_t a, b;
  pthread_create(&a, NULL, user, (void *)1);
  pthread_create(&b, NULL, user, (void *)2);
  pthread_join(a, NULL);
  pthread_join(b, NULL);
  engram_pool_free(pool);
  engram_pool_free(prefetch_pool);
  free(whole);
  puts(wrong ? "wrong" : "same");
  return wrong;
}
"""


def test_the_structures_agree_with_the_wrapper(library: Path, table: Table) -> None:
    """A field added on one side only would shift every counter after it."""
    with table.open(library, "pack") as reader:
        reader.lookup([1, 2])
        stats = reader.stats()
        assert (stats["bytes"], stats["retries"], stats["prefetch_read"]) == (2 * 264, 0, 0)
        assert 0 < stats["busy_ns"] < 10**9
        assert ctypes.sizeof(Part) == 32
