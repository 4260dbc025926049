"""Files of other frameworks: a module a format, all read into the same tree."""
