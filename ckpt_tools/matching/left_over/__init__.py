"""What a matching leaves over: what may be left out, what would go further, what to ask; and the answers, as pairs."""
