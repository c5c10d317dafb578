"""`kvloom workload` and `kvloom bench`: workloads made and shown, and asked of any OpenAI endpoint."""
