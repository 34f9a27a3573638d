"""How ranks find one another, and what they exchange."""
