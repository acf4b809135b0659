"""Capture of what each rank holds of a sharded model: names, places, and cutting it for another number of ranks."""
