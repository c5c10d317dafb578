"""The API of OpenAI: its endpoints, and how their answers are written."""
