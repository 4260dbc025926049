"""What every command and public function says and writes, kept in files: `make golden` writes them anew, the tests compare."""
