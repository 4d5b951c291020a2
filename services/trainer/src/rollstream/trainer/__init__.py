"""The trainer of rollstream: loss, packing, optimisation, checkpoints and weight publishing."""
