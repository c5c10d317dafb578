"""Who asks: callers behind proxies, and pages in browsers."""
