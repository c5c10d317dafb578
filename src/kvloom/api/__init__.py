"""HTTP: the OpenAI API of a gateway, its administration, and the verbs of an engine."""
