"""What stands around every command: settings, completion in a shell, which version this is."""
