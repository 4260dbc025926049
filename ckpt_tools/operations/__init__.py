"""A module, or a room, for every command."""
