"""``areal-lite view``: dumped episodes and metrics in a browser, from a server or as one file.

Promises that text of a model stays text, and that only this machine's own page is answered. Read page_data (the
answers), single_file, page_server (HTTP and the command); static/ is the page, whose app.js is read first.
"""
