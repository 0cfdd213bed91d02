"""Takes memory until it is stopped, after six seconds in which the guard sees it small."""

import time

time.sleep(6)
held = []
while True:
    held.append(b"x" * (16 << 20))
