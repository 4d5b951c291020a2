"""The router in front of the inference replicas."""
