"""The orchestrator and the env workers of rollstream."""
