"""The unified head-wise KV pool (MuxServe, section 3.4). Accounting here knows nothing of torch."""
