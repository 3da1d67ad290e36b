"""Implements nothing."""
