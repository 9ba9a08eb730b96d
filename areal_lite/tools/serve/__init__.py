"""``areal-lite serve``: the servers of a config without a run, with OpenAI's API on the embedded one."""
