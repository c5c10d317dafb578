"""Words every layer shares: requests, sampling, jobs, errors, time."""
