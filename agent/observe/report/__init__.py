"""A run's report: what happened, the downtime by phase and cause, and the replayed steps; as a page and as a picture.

`run_history.py` gathers the data, `timeline.py` places nodes in time, `figures.py` draws, `page.py` writes the page.
Equal records and an equal time give files that are equal byte by byte.
"""
