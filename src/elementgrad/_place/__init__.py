"""Which elements: what stands between the brackets, the text of it, and the places that verbs take."""
