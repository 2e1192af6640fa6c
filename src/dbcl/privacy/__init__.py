"""Noise, clipping and what they promise."""
