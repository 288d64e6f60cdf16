"""Kubernetes operator of Trimtab, and the same reconciler with local processes for pods."""
