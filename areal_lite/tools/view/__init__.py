"""``areal-lite view``: dumped episodes in a browser; page_server serves, page_data answers, static/ is the page."""
