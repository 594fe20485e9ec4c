"""Prints the fingerprints of some runs of the simulator, as JSON: `python tests/sim/digests.py`.

They depend on no Python version and on no hash seed. Tests run this in other interpreters, which have what the
simulator needs and need not have what tests do.
"""

from __future__ import annotations

import json
import sys
from typing import Final

from sim.cluster import simulate
from sim.random_scenarios import random_scenario
from sim.scenario import load_scenario

SHIPPED: Final = ("crash", "partition")
SEEDS: Final = range(16)
"""Of random scenarios, in which there is a bit of everything."""


def digests() -> dict[str, str]:
    """Return the fingerprint of each run, by what was run."""
    found: dict[str, str] = {}
    for name in SHIPPED:
        scenario = load_scenario(name)
        found |= {f"{name} {policy}": simulate(scenario, policy, 7, check=False).digest for policy in scenario.policies}
    for seed in SEEDS:
        scenario = random_scenario(seed)
        found[f"seed {seed}"] = simulate(scenario, scenario.policies[0], seed, check=False).digest
    return found


if __name__ == "__main__":
    json.dump(digests(), sys.stdout)
