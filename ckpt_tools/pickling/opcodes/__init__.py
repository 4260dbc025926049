"""What each opcode does, by kinds; `pickling.reader` makes one table of them."""
