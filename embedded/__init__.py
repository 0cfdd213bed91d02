"""Four real hosts on one machine: User-Mode Linux kernels with systemd, sshd and kernel NFS.

``python3 -m embedded up`` boots them, ``down`` removes every trace. Nothing here is needed to run
the playbooks against GB10 hosts.
"""
