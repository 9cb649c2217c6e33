"""Weight versions: what is published, where the pointer stands, and whether bytes are what they claim to be."""
