"""From stored fields to documents, from encoded images to the model's uint8 arrays."""
