"""Model definition and weight loading (torch). Knows nothing of requests, scheduling or HTTP."""
