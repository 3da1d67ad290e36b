"""Residents, the driver's half."""
