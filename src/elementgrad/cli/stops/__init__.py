"""The stops of the tour: questions people ask about single elements, and the code that answers them."""
