"""What is shown, as values, and how it is written: text, pictures, pages."""
