"""Find, show, plot and rescore dumped episodes. Read dumps and run_dumps, then filters, dump_index and index_update."""
