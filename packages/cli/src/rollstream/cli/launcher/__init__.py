"""The local launcher: every process of a run on one machine, started, restarted, shown and stopped."""
