"""Launch and operate rollstream runs."""
