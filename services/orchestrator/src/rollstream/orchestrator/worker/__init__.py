"""The env worker: leases episodes, plays them with verifiers, publishes rollouts."""
