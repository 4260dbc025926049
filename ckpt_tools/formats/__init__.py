"""One module a file format: `sniff` tells whether a file is one, `read` decodes it, `lay_out` plans one."""
