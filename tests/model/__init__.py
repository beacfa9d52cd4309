"""An explicit-state model of the handoff (docs/handoff.md), searched breadth first."""
