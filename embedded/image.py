"""The root file system of the embedded hosts: built from Debian packages, cached by its content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from .doubles import gb10_doubles
from .settings import CACHE, ENVIRONMENTS, GUEST_ENVIRONMENTS, IMAGES, SSH_KEY, EmbeddedError

SUITE = "bookworm"
PACKAGES = (
    "systemd,systemd-sysv,dbus,udev,kmod,procps,sudo,less,openssh-server,ca-certificates,"
    "iproute2,iputils-ping,iptables,ethtool,nfs-kernel-server,nfs-common,python3,python3-apt,libnuma1,libgomp1,patch,"
    "podman,crun,ufw,nginx-light,rsync"
)
UML_MODULES = Path("/usr/lib/uml/modules")
DISK_SIZE = "12G"  # sparse; the copy-on-write disk of a host grows with what the host writes

SSHD_CONFIG = """\
PermitRootLogin prohibit-password
PasswordAuthentication no
# PAM opens a logind session for every connection: about a second each on these hosts.
UsePAM no
UseDNS no
HostKey /etc/ssh/ssh_host_ed25519_key
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""

HOST_KEY_UNIT = """\
[Unit]
Description=Make this host's own SSH key
Before=ssh.service
ConditionPathExists=!/etc/ssh/ssh_host_ed25519_key

[Service]
Type=oneshot
ExecStart=/usr/bin/ssh-keygen -q -t ed25519 -N "" -f /etc/ssh/ssh_host_ed25519_key

[Install]
WantedBy=multi-user.target
"""

# systemctl enable/mask run inside the tree; the tree is never booted before it becomes an image. From podman's on, what
# is masked takes a third of a boot's processor time and does nothing for these hosts.
CUSTOMIZE = """\
set -eu
root=$1
chroot "$root" systemctl -q enable systemd-networkd systemd-network-generator ssh embedded-host-key
chroot "$root" systemctl -q disable nfs-server rpcbind nginx 2>/dev/null || true
# The kernel has no nf_tables address families.
chroot "$root" update-alternatives --set iptables /usr/sbin/iptables-legacy >/dev/null
chroot "$root" update-alternatives --set ip6tables /usr/sbin/ip6tables-legacy >/dev/null
chroot "$root" systemctl -q mask getty@.service serial-getty@.service console-getty.service getty.target \\
  systemd-networkd-wait-online.service apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer fstrim.timer \\
  dpkg-db-backup.timer podman-auto-update.service podman-auto-update.timer podman-restart.service \\
  e2scrub_reap.service modprobe@dm_mod.service modprobe@drm.service modprobe@efi_pstore.service modprobe@loop.service
rm -f "$root"/etc/ssh/ssh_host_* "$root"/etc/machine-id "$root"/etc/hostname
: > "$root"/etc/machine-id
chroot "$root" depmod "$2"
"""


def _files() -> dict[str, str]:
    """Path in the image to text: all that distinguishes it from plain Debian."""
    return {
        "etc/ssh/sshd_config": SSHD_CONFIG,
        "etc/systemd/system/embedded-host-key.service": HOST_KEY_UNIT,
        "etc/fstab": f"/dev/ubda / ext4 defaults 0 1\nnone {GUEST_ENVIRONMENTS} hostfs ro,nofail,{ENVIRONMENTS} 0 0\n",
        # Else a host waits 20 s for this machine's name server whenever a library asks for its own name.
        "etc/resolv.conf": "# No name server: a look-up fails at once.\n",
        "root/.ssh/authorized_keys": SSH_KEY.with_suffix(".pub").read_text(),
        # Guests share two cores; a slow boot is not a hung one.
        "etc/systemd/system.conf.d/embedded.conf": "[Manager]\nDefaultTimeoutStartSec=300\n",
    }


def modules_version() -> str:
    """Version of the installed User-Mode Linux kernel, as its modules folder names it."""
    versions = sorted(entry.name for entry in UML_MODULES.iterdir())
    if not versions:
        raise EmbeddedError(f"{UML_MODULES} is empty: reinstall the package user-mode-linux")
    return versions[-1]


def ensure_ssh_key() -> None:
    """Make the key that opens every embedded host; it opens nothing else."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if not SSH_KEY.exists():
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "gb10-fleet embedded", "-f", str(SSH_KEY)], check=True
        )


def ensure_image() -> Path:
    """Return the base image's path, building it when no image of this content exists."""
    ensure_ssh_key()
    version = modules_version()
    doubles = Path(gb10_doubles.__file__).read_text()
    files = (f"{name}\0{text}" for name, text in _files().items())
    recipe = "\0".join([SUITE, PACKAGES, version, CUSTOMIZE, DISK_SIZE, doubles, *files])
    image = IMAGES / f"{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.img"
    if image.exists():
        return image
    IMAGES.mkdir(parents=True, exist_ok=True)
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    print(f"building the hosts' root file system from Debian {SUITE} (about a minute)", flush=True)
    tree = IMAGES / f"tree.{os.getpid()}"
    partial = image.with_suffix(f".partial.{os.getpid()}")
    try:
        _build_tree(tree, version)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-d", str(tree), str(partial), DISK_SIZE], check=True)
        partial.rename(image)
    except subprocess.CalledProcessError as error:
        raise EmbeddedError(f"building the root file system failed: {error}; its output stands above") from error
    finally:
        shutil.rmtree(tree, ignore_errors=True)
        partial.unlink(missing_ok=True)
    return image


def _build_tree(tree: Path, version: str) -> None:
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(tree)],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    for name, text in _files().items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tree / "root/.ssh").chmod(0o700)
    (tree / GUEST_ENVIRONMENTS.lstrip("/")).mkdir(parents=True)
    gb10_doubles.install(tree)
    shutil.copytree(UML_MODULES / version, tree / "lib/modules" / version)
    subprocess.run(["sh", "-c", CUSTOMIZE, "customize", str(tree), version], check=True)
