"""The guests' root file system, kernel and initrd: built from Debian packages, cached by content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..image import SSHD_CONFIG, SUITE, ensure_ssh_key
from ..settings import IMAGES, SSH_KEY, EmbeddedError
from . import FABRIC_INTERFACE, GUESTS, HCA

PACKAGES = (
    "linux-image-amd64,systemd,systemd-sysv,dbus,udev,kmod,procps,openssh-server,python3,iproute2,iputils-ping,"
    "netplan.io,rdma-core,ibverbs-utils,ibverbs-providers,rdmacm-utils,perftest"
)
# Half of the kernel package drives hardware that QEMU does not show; unpacking it is most of the build.
EXCLUDED = [
    "/usr/share/doc/*",
    "/usr/share/man/*",
    "/usr/share/locale/*",
    *(f"/lib/modules/*/kernel/{part}/*" for part in ("sound", "drivers/gpu", "drivers/media", "drivers/net/wireless")),
    *(f"/lib/modules/*/kernel/drivers/{part}/*" for part in ("staging", "iio", "usb", "mtd", "hid", "scsi", "isdn")),
    "/lib/modules/*/kernel/drivers/net/ethernet/*",
]
DISK_SIZE = "3G"

SOFT_ROCE_UNIT = f"""\
[Unit]
Description=Soft-RoCE device on the fabric interface
Requires=sys-subsystem-net-devices-{FABRIC_INTERFACE}.device
After=sys-subsystem-net-devices-{FABRIC_INTERFACE}.device

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/rdma link add {HCA} type rxe netdev {FABRIC_INTERFACE}

[Install]
WantedBy=multi-user.target
"""

HOST_KEY_UNIT = """\
[Unit]
Description=Make this guest's own SSH key
Before=ssh.service
ConditionPathExists=!/etc/ssh/ssh_host_ed25519_key

[Service]
Type=oneshot
ExecStart=/usr/bin/ssh-keygen -q -t ed25519 -N "" -f /etc/ssh/ssh_host_ed25519_key

[Install]
WantedBy=multi-user.target
"""

CUSTOMIZE = """\
set -eu
root=$1
chroot "$root" systemctl -q enable systemd-networkd systemd-network-generator ssh guest-host-key soft-roce
chroot "$root" systemctl -q mask getty@.service serial-getty@.service getty.target \\
  systemd-networkd-wait-online.service systemd-random-seed.service systemd-update-utmp.service \\
  systemd-logind.service e2scrub_reap.service \\
  apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer fstrim.timer dpkg-db-backup.timer
cd "$root"
rm -rf etc/ssh/ssh_host_* etc/machine-id etc/hostname etc/network var/lib/apt/lists
: > etc/machine-id
chroot "$root" update-initramfs -u >/dev/null
"""


@dataclass(frozen=True)
class Image:
    disk: Path
    kernel: Path
    initrd: Path


def _files() -> dict[str, str]:
    """Path in the image to text: all that distinguishes it from plain Debian."""
    files = {
        "etc/ssh/sshd_config": SSHD_CONFIG,
        "etc/systemd/system/guest-host-key.service": HOST_KEY_UNIT,
        "etc/systemd/system/soft-roce.service": SOFT_ROCE_UNIT,
        "etc/modules-load.d/fabric.conf": "virtio_net\nrdma_rxe\nib_uverbs\nrdma_ucm\n",
        "etc/fstab": "/dev/vda / ext4 defaults 0 1\n",
        "root/.ssh/authorized_keys": SSH_KEY.with_suffix(".pub").read_text(),
        # An emulated guest on a shared core is slow, not hung.
        "etc/systemd/system.conf.d/guest.conf": "[Manager]\nDefaultTimeoutStartSec=300\n",
        # Only what the virtual machine has: the initrd is unpacked by an emulated processor at every boot.
        "etc/initramfs-tools/conf.d/guest": "MODULES=list\n",
        "etc/initramfs-tools/modules": "virtio_pci\nvirtio_blk\nvirtio_net\next4\ncrc32c_generic\n",
    }
    for index, name in enumerate(("mgmt0", FABRIC_INTERFACE)):
        macs = " ".join(guest.macs[index] for guest in GUESTS)
        files[f"etc/systemd/network/10-{name}.link"] = f"[Match]\nMACAddress={macs}\n\n[Link]\nName={name}\n"
    return files


def ensure_image() -> Image:
    """Return the guests' image, building it when none of this content exists."""
    ensure_ssh_key()
    recipe = "\0".join([SUITE, PACKAGES, *EXCLUDED, CUSTOMIZE, DISK_SIZE, *(f"{k}\0{v}" for k, v in _files().items())])
    home = IMAGES / f"guests-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    image = Image(home / "disk.img", home / "vmlinuz", home / "initrd")
    if home.exists():
        return image
    IMAGES.mkdir(parents=True, exist_ok=True)
    print(f"building the guests' root file system from Debian {SUITE} (one to two minutes)", flush=True)
    tree = IMAGES / f"guests-tree.{os.getpid()}"
    partial = IMAGES / f"guests-partial.{os.getpid()}"
    try:
        partial.mkdir()
        _build_tree(tree)
        for name, file in (("vmlinuz", image.kernel), ("initrd.img", image.initrd)):
            shutil.copy(next((tree / "boot").glob(f"{name}-*")), partial / file.name)
        shutil.rmtree(tree / "boot")
        subprocess.run(
            ["mkfs.ext4", "-q", "-F", "-d", str(tree), str(partial / image.disk.name), DISK_SIZE], check=True
        )
        partial.rename(home)
    except subprocess.CalledProcessError as error:
        raise EmbeddedError(
            f"building the guests' root file system failed: {error}; its output stands above"
        ) from error
    finally:
        shutil.rmtree(tree, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)
    return image


def _build_tree(tree: Path) -> None:
    subprocess.run(
        [
            "mmdebstrap",
            "--quiet",
            "--variant=minbase",
            f"--include={PACKAGES}",
            *(f"--dpkgopt=path-exclude={pattern}" for pattern in EXCLUDED),
            SUITE,
            str(tree),
        ],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    for name, text in _files().items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tree / "root/.ssh").chmod(0o700)
    (tree / "usr/local/lib/gb10-fleet").mkdir(parents=True)
    subprocess.run(["sh", "-c", CUSTOMIZE, "customize", str(tree)], check=True)
