"""The delay server: holds messages until they are due and delivers them once."""
