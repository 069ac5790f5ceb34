"""Tasks, the records that they leave behind, and how they are spread over cores and machines."""
