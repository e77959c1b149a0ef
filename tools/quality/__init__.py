"""Commands that look for faults: random load, attacks, planted bugs, all model families."""
