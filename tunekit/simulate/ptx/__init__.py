"""Reading PTX: text to typed values, and the control flow between them."""
