"""reverse-text: write a short phrase backwards (a verifiers v1 taskset)."""

from reverse_text.taskset import ReverseTextTaskset

__all__ = ["ReverseTextTaskset"]
