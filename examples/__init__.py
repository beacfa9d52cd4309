"""Programs that use delayd as its users do; run each from the repository with ``python -m examples.NAME``."""
