"""The forms of requests and answers: pydantic reads the former, and the document describes both."""
