"""Make the project's module_utils importable as Ansible does on a host."""

from __future__ import annotations

from pathlib import Path

import ansible.module_utils

PROJECT = Path(__file__).resolve().parent.parent
ansible.module_utils.__path__.append(str(PROJECT / "module_utils"))
