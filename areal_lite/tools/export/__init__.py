"""``areal-lite export``: training rows and tables from dumped episodes. Read export, conversation_text, frames."""
