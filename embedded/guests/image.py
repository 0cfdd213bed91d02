"""The guests' root file system, kernel and initrd: built from Debian packages, cached by content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..image import HOST_KEY_UNIT, SSHD_CONFIG, SUITE, ensure_ssh_key
from ..settings import IMAGES, SSH_KEY, EmbeddedError
from . import FABRIC_INTERFACE, GUESTS, HCA

PACKAGES = (
    "linux-image-amd64,systemd,systemd-sysv,dbus,udev,kmod,procps,openssh-server,python3,iproute2,iputils-ping,"
    "netplan.io,rdma-core,ibverbs-utils,ibverbs-providers,rdmacm-utils,perftest,busybox-static"
)
# What the virtual machine and soft-RoCE use. Unpacking and indexing the other modules would be most of the build, and
# every one that udev finds a use for is loaded by an emulated processor at every boot.
MODULES = (
    "drivers/infiniband/core/*",
    "drivers/infiniband/sw/rxe/*",
    "drivers/virtio/*",
    "drivers/block/virtio_blk.ko",
    "drivers/net/virtio_net.ko",
    "drivers/net/net_failover.ko",
    "net/core/failover.ko",
    "net/ipv4/udp_tunnel.ko",
    "net/ipv6/ip6_udp_tunnel.ko",
    "fs/ext4/*",
    "fs/jbd2/*",
    "fs/mbcache.ko",
    "fs/configfs/*",
    "lib/*",
    "crypto/crc32_generic.ko",
    "crypto/crc32c_generic.ko",
    "arch/x86/crypto/crc32c-intel.ko",
)
DPKG_OPTIONS = [
    *(f"path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "locale")),
    "path-exclude=/lib/modules/*/kernel/*",
    *(f"path-include=/lib/modules/*/kernel/{module}" for module in MODULES),
]
# Size and options of mkfs.ext4: writes die with the process, so nothing is gained by a journal.
DISK = ("3G", "-q", "-F", "-O", "^has_journal,^metadata_csum")

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

# Debian's own initrd runs a second udev; this one loads the disk's modules and leaves.
INIT = """\
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
exec >/dev/console 2>&1
for module in $(/bin/busybox cat /modules); do /bin/busybox insmod "/$module"; done
/bin/busybox mount -t ext4 /dev/vda /root && exec /bin/busybox switch_root /root /sbin/init
"""

# A guest is not a machine to keep: what systemd does for one costs half of an emulated boot.
MASKED_UNITS = (
    "getty@.service serial-getty@.service getty.target systemd-networkd-wait-online.service systemd-random- "
    "seed.service systemd-update-utmp.service systemd-logind.service e2scrub_reap.service e2scrub_all.timer apt- "
    "daily.timer apt-daily-upgrade.timer fstrim.timer dpkg-db-backup.timer systemd-binfmt.service proc-sys-fs- "
    "binfmt_misc.automount dev-hugepages.mount dev-mqueue.mount sys-kernel-debug.mount sys-kernel-tracing.mount "
    "sys-kernel-config.mount sys-fs-fuse-connections.mount modprobe@.service kmod-static-nodes.service systemd- "
    "sysusers.service systemd-journal-flush.service systemd-pstore.service rdma-load-modules@.service rdma- "
    "ndd.service systemd-ask-password-console.path systemd-ask-password-wall.path systemd-machine-id- "
    "commit.service systemd-update-done.service systemd-update-utmp-runlevel.service systemd-tmpfiles-setup- "
    "dev.service"
)
MASKED_GENERATORS = (
    "cryptsetup debug fstab getty gpt-auto hibernate-resume integritysetup rc-local run system-update sysv veritysetup"
)

UDEV_TRIGGER = """\
[Service]
ExecStart=
ExecStart=udevadm trigger --action=add --subsystem-match=net --subsystem-match=block
"""

# Runs in the tree, which is never booted before it becomes an image.
CUSTOMIZE = f"""\
set -eu
systemctl -q enable systemd-networkd systemd-network-generator ssh embedded-host-key soft-roce
systemctl -q set-default multi-user.target
systemctl -q mask {MASKED_UNITS}
mkdir -p /etc/systemd/system-generators
for generator in {MASKED_GENERATORS}; do
  ln -s /dev/null "/etc/systemd/system-generators/systemd-$generator-generator"
done
rm -rf /etc/ssh/ssh_host_* /etc/machine-id /etc/hostname /etc/network /var/lib/apt/lists
: > /etc/machine-id

version=$(ls /lib/modules)
modules=$(for module in virtio_pci virtio_blk crc32c_generic ext4; do
  modprobe -S "$version" --show-depends "$module"
done | awk '!seen[$2]++ {{ print substr($2, 2) }}')
cd /initrd
mkdir -p bin dev root
cp /bin/busybox bin/
echo "$modules" > modules
(cd / && cp --parents $modules /initrd)
chmod 755 init
find . | cpio --quiet -o -H newc > "/boot/initrd.img-$version"
rm -r /initrd
"""


@dataclass(frozen=True)
class Image:
    disk: Path
    kernel: Path
    initrd: Path


def _files() -> dict[str, str]:
    """Path in the image to text: all that distinguishes it from plain Debian."""
    files = {
        # Of the key exchanges that OpenSSH prefers, the cheapest for an emulated processor.
        "etc/ssh/sshd_config": f"{SSHD_CONFIG}KexAlgorithms curve25519-sha256\n",
        "etc/systemd/system/embedded-host-key.service": HOST_KEY_UNIT,
        "etc/systemd/system/soft-roce.service": SOFT_ROCE_UNIT,
        "etc/modules-load.d/fabric.conf": "virtio_net\nrdma_rxe\nib_uverbs\nrdma_ucm\n",
        "root/.ssh/authorized_keys": SSH_KEY.with_suffix(".pub").read_text(),
        # An emulated guest on a shared core is slow, not hung.
        "etc/systemd/system.conf.d/guest.conf": "[Manager]\nDefaultTimeoutStartSec=300\n",
        "etc/systemd/journald.conf.d/guest.conf": "[Journal]\nStorage=volatile\n",
        # Of the devices that exist at boot, only these are waited for.
        "etc/systemd/system/systemd-udev-trigger.service.d/guest.conf": UDEV_TRIGGER,
        "initrd/init": INIT,
    }
    for index, name in enumerate(("mgmt0", FABRIC_INTERFACE)):
        macs = " ".join(guest.macs[index] for guest in GUESTS)
        files[f"etc/systemd/network/10-{name}.link"] = f"[Match]\nMACAddress={macs}\n\n[Link]\nName={name}\n"
    return files


def ensure_image() -> Image:
    """Return the guests' image, building it when none of this content exists."""
    ensure_ssh_key()
    files = (f"{name}\0{text}" for name, text in _files().items())
    recipe = "\0".join([SUITE, PACKAGES, *DPKG_OPTIONS, CUSTOMIZE, *DISK, *files])
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
        subprocess.run(["mkfs.ext4", *DISK[1:], "-d", str(tree), str(partial / image.disk.name), DISK[0]], check=True)
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
            *(f"--dpkgopt={option}" for option in DPKG_OPTIONS),
            SUITE,
            str(tree),
        ],
        check=True,
        stdin=subprocess.DEVNULL,
        # The kernel package's hook then leaves out Debian's initrd, which would be replaced below.
        env=os.environ | {"INITRD": "No"},
    )
    for name, text in _files().items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tree / "root/.ssh").chmod(0o700)
    (tree / "usr/local/lib/gb10-fleet").mkdir(parents=True)
    subprocess.run(["chroot", str(tree), "sh", "-c", CUSTOMIZE], check=True)
