"""``areal-lite export``: training rows and tables from dumped episodes. Read export, then conversation_text."""
