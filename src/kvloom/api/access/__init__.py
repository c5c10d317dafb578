"""Who asks: keys, proxies and pages in browsers; what the caller may do and how much, and what admins did."""
