"""The laboratory: what a researcher uses to train, compare and measure. The product never imports it."""
