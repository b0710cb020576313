"""Numbers in, plans out. No torch, no files, no clock."""
