"""What a GB10 host has to know: pure functions, standard library only.

Modules import it as ``ansible.module_utils.gb10``; the same files are installed on the hosts
(/usr/local/lib/gb10-fleet/gb10), where the units import it as ``gb10``. Imports inside are relative.
"""
