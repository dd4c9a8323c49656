"""What the simulator says: words, JSON documents, vectors. All of it pure: prompt and seeds settle it."""
