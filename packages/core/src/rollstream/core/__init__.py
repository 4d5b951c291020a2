"""The contracts of rollstream: records, bus, store, run directory, telemetry and configuration."""
