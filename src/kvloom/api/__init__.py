"""What people and other processes call: the OpenAI gateway and the verbs."""
