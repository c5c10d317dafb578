"""The API of OpenAI: the forms of its requests and answers, its parameters, and tool calls."""
