"""The clients, against small servers that speak the real protocol."""
