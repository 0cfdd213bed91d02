"""Building kernels ahead: what is refused, what is built once, and what was compiled while serving."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import kernel_prebuild

MEMINFO = "MemTotal:       127535892 kB\nMemFree:        20000000 kB\nMemAvailable:   {} kB\n"
PLENTY = MEMINFO.format(100 * 2**20)
MOUNTS = (
    "/dev/nvme0n1p2 / ext4 rw 0 0\nhead:/srv/models /mnt/models nfs4 ro 0 0\n"
    "/dev/nvme1n1 /mnt/models/local\\040disk xfs rw 0 0\ntmpfs /run tmpfs rw 0 0\n"
)

REFUSED = [
    (PLENTY, [], "ext4", []),
    (PLENTY, ["vllm-rank.service"], "ext4", ["vllm-rank.service is running"]),
    (MEMINFO.format(23 * 2**20), [], "ext4", ["MemAvailable is 23.0 GiB, wanted 24.0"]),
    (PLENTY, [], "nfs4", ["the cache is on nfs4"]),
    (MEMINFO.format(2**20), ["a", "b"], "nfs", ["a is running", "b is running", "1.0 GiB", "on nfs,"]),
]


@pytest.mark.parametrize(("meminfo", "units", "filesystem", "said"), REFUSED)
def test_every_reason_is_given(meminfo: str, units: list[str], filesystem: str, said: list[str]) -> None:
    faults = kernel_prebuild.refusals(meminfo, 24.0, units, filesystem)
    assert len(faults) == len(said)
    assert all(part in fault for part, fault in zip(said, faults, strict=True))


def test_a_meminfo_without_the_line_is_an_error() -> None:
    with pytest.raises(kernel_prebuild.KernelPrebuildError, match="no MemAvailable"):
        kernel_prebuild.mem_available_gib("MemTotal: 1 kB\n")


@pytest.mark.parametrize(
    ("path", "wanted"),
    [("/var/cache/x", "ext4"), ("/mnt/models/x", "nfs4"), ("/mnt/models/local disk/x", "xfs"), ("/run", "tmpfs")],
)
def test_the_file_system_under_a_path(path: str, wanted: str) -> None:
    assert kernel_prebuild.filesystem_of(Path(path), MOUNTS) == wanted


def test_the_builds_environment_forbids_nothing_and_bounds_the_compilers(tmp_path: Path) -> None:
    env = kernel_prebuild.environment(
        tmp_path, "12.1a", {"FLASHINFER_DISABLE_JIT": "1", "MAX_JOBS": "20", "PATH": "/bin"}
    )
    assert env == {
        "PATH": "/bin",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "FLASHINFER_CUDA_ARCH_LIST": "12.1a",
        "FLASHINFER_NVCC_THREADS": "1",
        "MAX_JOBS": "2",
    }


FAKE = """
import os, pathlib
class Spec:
    def __init__(self, name):
        self.file = pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / (name + ".so")
    def try_load(self):
        return True if self.file.exists() else None
    def build(self, need_lock):
        assert need_lock and os.environ["MAX_JOBS"] == "2"
        if self.file.name == "bad.so":
            print("nvcc fatal: Unsupported gpu architecture"); raise SystemExit(2)
        self.file.write_text("kernel")
def one(): return Spec("one")
def bad(): return Spec("bad")
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python that has a FlashInfer; the double has the two calls that the real one offers."""
    (tmp_path / "fakeinfer.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Path(sys.executable)


def test_a_module_is_built_once(engine: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for action in ("built", "kept"):
        done = kernel_prebuild.prebuild(engine, cache, "12.1a", ["fakeinfer:one"], lambda _: None)
        assert [(item.module, item.action) for item in done] == [("fakeinfer:one", action)]
    assert (cache / "one.so").exists()


@pytest.mark.parametrize(
    ("module", "said"), [("fakeinfer:bad", "Unsupported gpu architecture"), ("fakeinfer:none", "AttributeError")]
)
def test_a_build_that_fails_says_the_compilers_last_lines(engine: Path, tmp_path: Path, module: str, said: str) -> None:
    with pytest.raises(kernel_prebuild.KernelPrebuildError, match=said):
        kernel_prebuild.prebuild(engine, tmp_path / "cache", "12.1a", [module], lambda _: None)


def test_a_build_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef f(): time.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said: list[str] = []
    with pytest.raises(kernel_prebuild.KernelPrebuildError, match=r"1/1 slow:f took more than 1 s"):
        kernel_prebuild.prebuild(Path(sys.executable), tmp_path / "c", "12.1a", ["slow:f"], said.append, timeout_s=1)
    assert said == ["1/1 slow:f, 5 s"]


def test_main_reports_and_refuses(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--python", str(engine), "--cache", str(tmp_path / "cache"), "fakeinfer:one"]
    assert kernel_prebuild.main([*arguments, "--floor-gib", "0"]) == 0
    assert "fakeinfer:one: built" in capsys.readouterr().out
    assert kernel_prebuild.main([*arguments, "--floor-gib", "1e9"]) == 1
    assert "wanted 1000000000.0" in capsys.readouterr().err


def test_what_was_compiled_while_serving_is_named(tmp_path: Path) -> None:
    for name in ("a.so", "b.lock", "deep/c.cubin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    recorded = kernel_prebuild.contents([tmp_path])
    assert recorded == {str(tmp_path / "a.so"), str(tmp_path / "deep/c.cubin")}
    (tmp_path / "deep/d.cubin").touch()
    assert kernel_prebuild.compiled_since([tmp_path], recorded) == [str(tmp_path / "deep/d.cubin")]
