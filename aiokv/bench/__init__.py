"""The benchmark behind `aiokv bench`: a real cluster of processes on this machine, timed and checked.

`cluster` starts one and `worker` is what its workers run; `workloads`, `pattern` and `checks` say what they move and
what has to come back; `report` turns what they found into figures. `limits` measures the machine itself, without a
cluster.
"""

from __future__ import annotations
