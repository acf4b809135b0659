"""A job's report: what happened to it, where the time went, what was lost; as a page and as a picture.

`timeline.py` places nodes in time, `figures.py` draws, `page.py` writes the page. Equal records and an equal time give
equal files, byte by byte.
"""
