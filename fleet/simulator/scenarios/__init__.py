"""One small file per scenario: `SCENARIO` says how the fleet begins, what happens to it, and what must be so then."""
