"""Results as plain values, and how they are written: as text, pictures and web pages."""
